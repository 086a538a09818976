"""What a bench found, in one plain sentence; and how many prompts its intervals still lack.

Two methods are level within the noise where their 95 % intervals overlap. A method is faster than autoregressive
decoding where its whole interval lies above 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.bench.figure_text import bounds, times
from outpace.bench.report import Row

WIDE = 0.15
"""Half-width of an interval, relative to its speed-up, above which more prompts are suggested."""
WANTED = 0.05
"""Half-width that those prompts would give."""
_NAMED = 3  # methods that one sentence names


def verdict(result: Mapping[str, Any]) -> str:
    """One sentence about the JSON object of a bench: the fastest method, its speed-up, whether answers are identical.

    It ends with a full stop, and is not empty for any result, also an interrupted one.
    """
    rows = [row for row in result["methods"] if row["method"] != "none"]
    if not result["methods"]:
        return "No results: the bench was interrupted before it began."
    if not rows:
        return "Only autoregressive decoding was measured, so there is nothing to compare."
    measured = [row for row in rows if row["speedup"] is not None and not row["error"]]
    if not measured:
        return "No method could be measured."
    best = max(measured, key=lambda row: float(row["speedup"]))
    found = _gain(best, measured) if _faster(best) else _no_gain(best)
    exceptions = _by_task(best, measured)
    partly = "" if result.get("complete", True) else f" (interrupted after {best['prompts']} prompts)"
    return found + (f"; {exceptions}" if exceptions else "") + partly + "."


def wide_intervals(result: Mapping[str, Any]) -> str | None:
    """How many prompts would narrow the intervals that are wide; None where none is, or nothing can be said.

    The width of an interval falls with the square root of the number of prompts.
    """
    found = {
        row["method"]: (_half_width(row), row["prompts"])
        for row in result["methods"]
        if row["method"] != "none" and row["speedup"] and row["speedup_ci95"] and not row["error"]
    }
    wide = {name: one for name, one in found.items() if one[0] > WIDE}
    if not wide:
        return None
    name, (half, prompts) = max(wide.items(), key=lambda item: item[1][0])
    needed = _rounded_up(prompts * (half / WANTED) ** 2)
    others = f" ({len(wide) - 1} more above ±{WIDE:.0%})" if len(wide) > 1 else ""
    return (
        f"Wide interval: the speed-up of {name} is known to ±{half:.0%} after {prompts} prompts{others}; about "
        f"{needed:,} prompts would give ±{WANTED:.0%}."
    )


def answers(row: Row) -> str:
    """Whether a method's answers are those of autoregressive decoding: "identical answers on all 42 prompts"."""
    found = row["identical"]
    if not row["lossless"]:
        same = f" ({found['same']} of {found['of']} were identical)" if found and found["of"] else ""
        return f"answers that may differ, because it is lossy{same}"
    if not found or not found["of"]:
        return "the same output distribution"
    same, ties, count = found["same"], found["near_ties"], found["of"]
    if same == count:
        return "identical answers" + (f" on all {count} prompts" if count > 1 else "")
    other = f"{ties} near tie{'' if ties == 1 else 's'}"
    if same + ties == count:
        return f"identical answers on {same} of {count} prompts, and {other}"
    wrong = count - same - ties
    return f"different answers on {wrong} of {count} prompts, which is a defect"


def _gain(best: Row, measured: Sequence[Row]) -> str:
    level = [row for row in measured if row is not best and _overlap(row, best)]
    level.sort(key=lambda row: -float(row["speedup"]))
    if not level:
        first = "was the fastest" if len(measured) > 1 else "was faster"
        return f"{best['method']} {first}: {_speed(best)}, with {answers(best)}"
    together = [best, *level]
    if len(together) <= _NAMED:
        names = " and ".join([", ".join(row["method"] for row in together[:-1]), together[-1]["method"]])
        speeds = " and ".join([", ".join(map(_figure, together[:-1])), _figure(together[-1])])
        return (
            f"{names} were the fastest, level within the noise: {speeds} the speed of autoregressive decoding, "
            f"{_all(together)}"
        )
    return (
        f"{best['method']} was the fastest, level within the noise with {level[0]['method']} and {len(level) - 1} "
        f"others: {_speed(best)}, with {answers(best)}"
    )


def _no_gain(best: Row) -> str:
    beyond = best["speedup"] > 1
    if best["speedup_ci95"] is None and beyond:
        return f"{best['method']} was the fastest: {_speed(best)}, from too few prompts for an interval"
    noise = " beyond the noise" if best["speedup_ci95"] and best["speedup_ci95"][1] > 1 else ""
    return (
        f"No method was faster than autoregressive decoding{noise}; the best was {best['method']}: {_figure(best)}, "
        f"with {answers(best)}"
    )


def _by_task(best: Row, measured: Sequence[Row]) -> str:
    """The tasks in which another method is faster than the best one beyond the noise, or the only gain."""
    said, tasks = [], best.get("by_category", {})
    for name, own in tasks.items() if len(tasks) > 1 else ():
        cells = [(row, cell) for row in measured if (cell := row["by_category"].get(name)) and cell["speedup"]]
        if not cells:
            continue
        row, cell = max(cells, key=lambda pair: float(pair[1]["speedup"]))
        above = row is not best and own["speedup"] and cell["speedup"] > own["speedup"] and not _overlap(cell, own)
        if _faster(cell) and (above or not _faster(best)):
            said.append(f"{row['method']} in {name} ({times(cell['speedup'])})")
    if not said:
        return ""
    named = ", ".join(said[:_NAMED]) + (f" and {len(said) - _NAMED} other tasks" if len(said) > _NAMED else "")
    return f"by task, faster beyond the noise: {named}" if not _faster(best) else f"by task, faster still: {named}"


def _all(rows: Sequence[Row]) -> str:
    """The answers of several rows; once, where they are alike."""
    said = list(dict.fromkeys(map(answers, rows)))
    return "with " + (said[0] if len(said) == 1 else ", ".join(f"{answers(row)} ({row['method']})" for row in rows))


def _speed(row: Row) -> str:
    return f"{_figure(row)} the speed of autoregressive decoding"


def _figure(row: Row) -> str:
    return f"{times(row['speedup'])} {bounds(row['speedup_ci95'])}".rstrip()


def _faster(row: Row) -> bool:
    """Whether it is faster than autoregressive decoding beyond the noise."""
    return bool(row["speedup_ci95"]) and row["speedup_ci95"][0] > 1


def _overlap(one: Row, other: Row) -> bool:
    """Whether two speed-ups are level within the noise; without an interval nothing is known of the noise."""
    first, second = one["speedup_ci95"], other["speedup_ci95"]
    return bool(first and second) and first[0] <= second[1] and second[0] <= first[1]


def _half_width(row: Row) -> float:
    low, high = row["speedup_ci95"]
    return float(high - low) / 2 / float(row["speedup"])


def _rounded_up(value: float) -> int:
    """To two digits."""
    unit: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit
