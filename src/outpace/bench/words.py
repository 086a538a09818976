"""The result in words: the headline, notes, definitions, and how figures are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

DEFINITIONS = {
    "tok/s": "Decode rate: tokens after the first, over the time after the first. A batch's time is split equally "
    "among the requests in each round.",
    "speed-up": "Decode rate over plain decoding's, same target, prompts and run. In brackets the 95 % interval: "
    "paired bootstrap over prompts.",
    "tok/fwd": "Mean acceptance length: tokens committed per forward of the target, bonus included. Plain decoding: 1.",
    "accepted": "Acceptance rate: accepted draft tokens over drafted ones; every node of a tree counts.",
    "drafting": "Share of the rounds in which anything was drafted; in brackets the tokens committed per such round.",
    "draft ms": "Milliseconds of drafting (propose and observe) per round, rounds without a draft included.",
    "TTFT": "Milliseconds from the start of a request to its first token, prefill included; mean over requests.",
    "same": "Prompts whose answers are plain decoding's, token by token (temperature 0 only). Near tie: the first "
    "difference lies between tokens whose logits differ by no more than rounding explains.",
    "MB": "The process's largest resident memory while the method ran; models of all methods are loaded together.",
    "time split": "Share of the decoding time in draft / score (the target's forward) / accept / other, in per cent.",
    "repeats": "Share of 4-grams of an answer that occurred before in it. Small models loop, and loops flatter methods "
    "that copy.",
}


def number(value: float | None, digits: int = 1) -> str:
    """A figure, or a dash where it is undefined."""
    return "–" if value is None else f"{value:,.{digits if abs(value) < 1000 else 0}f}"


def percent(value: float | None) -> str:
    """A share in per cent."""
    return "–" if value is None else f"{100 * value:.0f} %"


def times(value: float | None) -> str:
    """A ratio: 1.42x."""
    return "–" if value is None else f"{value:.2f}x"


def drafting(row: Row) -> str:
    """86 % (2.31): the share of rounds with a draft, the tokens of such a round, and who drafted, if several may."""
    if not row["drafting_rounds"]:
        return "–"
    shown = f"{percent(row['drafting_rounds'])} ({number(row['drafting_acceptance_length'], 2)})"
    return f"{shown}: {parts(row['drafting_parts'])}" if row["drafting_parts"] else shown


def parts(shares: Mapping[str, float | None]) -> str:
    """eagle3 71 % + sam 12 %: the rounds in which each part of a method drafted."""
    return " + ".join(f"{name} {percent(share)}" for name, share in shares.items()) or "–"


def interval(row: Row) -> str:
    """[1.31, 1.55], or nothing for a row without interval."""
    bounds = row["speedup_ci95"]
    return "" if not bounds or row["method"] == "none" else f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def agreement(row: Row) -> str:
    """40 of 42 prompts, 2 near ties."""
    found = row["identical"]
    if not found:
        return ""
    ties = found["near_ties"]
    noted = "" if found["same"] == found["of"] else f", {ties} near tie{'' if ties == 1 else 's'}"
    return f"{found['same']} of {found['of']} {'prompt' if found['of'] == 1 else 'prompts'}{noted}"


def drafted(result: Mapping[str, Any]) -> list[Row]:
    """The rows of methods other than plain decoding."""
    return [row for row in result["methods"] if row["method"] != "none"]


def headline(result: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    measured = [row for row in drafted(result) if row["speedup"] is not None and not row["error"]]
    if not measured:
        return "Plain decoding alone: nothing to compare." if not drafted(result) else "No method could be measured."
    best = max(measured, key=lambda row: float(row["speedup"]))
    pace = f"{best['method']}: {times(best['speedup'])} the speed of plain decoding {interval(best)}".rstrip()
    if best["speedup"] < 1:
        pace = f"nothing beat plain decoding here; the best was {pace}"
    elif best["speedup_ci95"] and best["speedup_ci95"][0] <= 1:
        pace += ", no clear gain"
    return f"{pace}, {_answers(best)}"


def _answers(row: Row) -> str:
    if row["identical"]:
        return f"same answers on {agreement(row)}"
    return "same output distribution" if row["lossless"] else "answers may differ (lossy)"


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader should know before believing the table."""
    found = [] if result["complete"] else ["Interrupted: only the prompts that every method finished are counted."]
    for row in result["methods"]:
        if row["error"]:
            found.append(f"{row['method']} failed after {row['prompts']} prompts: {row['error']}")
        same = row["identical"]
        if same and row["lossless"] and same["same"] + same["near_ties"] < same["of"]:
            wrong = same["of"] - same["same"] - same["near_ties"]
            found.append(f"{row['method']}: {wrong} different answers that are not near ties. That should not happen.")
    repeats = result["methods"][0]["repeated_ngrams"] if result["methods"] else None
    if repeats is not None and repeats > 0.3:
        found.append(
            f"{percent(repeats)} of plain decoding's 4-grams repeat earlier ones: the answers loop, which flatters "
            "methods that copy."
        )
    if name := result["settings"].get("namespace"):
        found.append(
            f"Namespace '{name}': methods kept what they learned from prompt to prompt, each for itself, so that the "
            "figures depend on the order of the prompts."
        )
    if result["settings"].get("skipped_turns"):
        found.append(f"{result['settings']['skipped_turns']} turns had no room left in the context and were left out.")
    return found


def categories(result: Mapping[str, Any]) -> list[str]:
    """Task groups in the order of the first row."""
    return list(result["methods"][0]["by_category"]) if result["methods"] else []


def split_text(row: Row) -> str:
    """3/91/2/4: the time split in per cent."""
    shares: Sequence[float | None] = list(row["time_split"].values())
    return "–" if None in shares else "/".join(f"{100 * share:.0f}" for share in shares if share is not None)
