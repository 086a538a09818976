"""The comparison in words: the headline, notes, definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.bench.words import number, percent, times

Row = Mapping[str, Any]

DEFINITIONS = {
    "tok/s": "Decode rate: tokens after the first, over the time after the first, all prompts together. In brackets "
    "the 95 % interval: bootstrap over prompts.",
    "precision": "In what the weights are kept, and in what is computed where the library says so. Libraries that read "
    "the GGUF file keep its weights as they are; bfloat16 takes more memory and time.",
    "TTFT": "Milliseconds from the call to the first token that the library hands out, prefill included; mean over "
    "prompts.",
    "MB": "The largest resident memory of the library's process while it answered. Weights in a mapped file count.",
    "same": "Answers that are those of outpace's plain decoding, token by token, and how much of an answer agrees "
    "before the first difference. Other kernels and precisions round differently: this informs, it does not judge.",
    "over the best peer": "The fastest row of outpace's over the fastest row of all other libraries. By task: the same "
    "row of outpace's over the row that is fastest in that task. The interval is a paired bootstrap over prompts.",
}


def label(row: Row) -> str:
    """One name for a row: those of outpace differ by precision too."""
    ours = row["name"] == "outpace"
    return f"{row['name']} {row['config']}" + (f" {row['precision']}" if ours else "")


def rows(result: Mapping[str, Any]) -> list[Row]:
    """All rows, the fastest first; those without figures last."""
    found = [*result["ours"], *result["peers"]]
    return sorted(found, key=lambda row: (row["error"] is not None, -(row["decode_tokens_per_second"] or 0)))


def bounds(ci95: Sequence[float] | None, digits: int = 2) -> str:
    """[1.31, 1.55], or nothing."""
    return f"[{ci95[0]:.{digits}f}, {ci95[1]:.{digits}f}]" if ci95 else ""


def headline(result: Mapping[str, Any]) -> str:
    """The comparison in one sentence."""
    found = result["ratio_to_best_peer"]
    if found["overall"] is None:
        return "Nothing to compare: " + ("no peer" if found["ours"] else "no row of outpace's") + " could be measured."
    pace = f"{found['ours']}: {times(found['overall'])} the decode rate of {found['peer']}"
    return f"{pace} {bounds(found['ci95'])}".rstrip()


def comparisons(result: Mapping[str, Any]) -> list[tuple[str, Row, str]]:
    """(what, the ratio, how to read it) of the three comparisons."""
    return [
        ("best against best", result["ratio_to_best_peer"], "decode rate, above 1 outpace is faster"),
        ("plain against plain", result["plain_ratio"], "decode rate, above 1 outpace is faster"),
        ("time to first token", result["ttft_ratio"], "wait, below 1 outpace is sooner"),
    ]


def agreement(row: Row) -> str:
    """5/14, 62 %: equal answers, and the mean share before the first difference."""
    found = row["agreement"]
    return f"{found['same']}/{found['of']}, {percent(found['prefix'])}" if found and found["of"] else ""


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader should know before believing the table."""
    found = [] if result["complete"] else ["Interrupted: only the prompts that every row finished are counted."]
    found += result["notes"]
    found += [f"{one['name']} is left out: {one['why']}; to install: {one['install']}" for one in result["skipped"]]
    best = next((row for row in result["ours"] if label(row) == result["ratio_to_best_peer"]["ours"]), None)
    for row in (*result["ours"], *result["peers"]):
        if row["error"]:
            rate = row["decode_tokens_per_second"]
            pace = f" after {row['prompts']} prompts ({number(rate)} tok/s)" if rate else ""
            found.append(f"{label(row)} failed{pace}: {row['error']}")
            if rate and best and row in result["peers"] and rate > best["decode_tokens_per_second"]:
                found.append(f"{label(row)} was faster than {label(best)} until it failed.")
    return found


def categories(result: Mapping[str, Any]) -> list[str]:
    """Task groups in the order of the prompts."""
    return list(next(iter([*result["ours"], *result["peers"]]), {"by_category": {}})["by_category"])
