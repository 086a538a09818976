"""What a report shows of quality: a table, notes, and the frontier of speed against divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from outpace.bench.charts import Chart, Point, ScatterChart, colours
from outpace.bench.columns import Column, lossy_detail, table_of
from outpace.bench.figure_text import UNDEFINED, number, percent, times
from outpace.bench.quality.frontier import on_frontier
from outpace.bench.report import Cell, Row, Table, Tone
from outpace.methods.bindings import row_series

Divergence = Literal["excess_nll", "tv"]
_LABELS = 14  # labelled points: more would overlap
_NAMED = 4  # rows that a note counts one by one


def has_quality(result: Mapping[str, Any]) -> bool:
    """Whether the bench measured quality."""
    return any("quality" in row for row in result["methods"])


def _of(row: Row) -> Mapping[str, Any]:
    found: Mapping[str, Any] = row["quality"]
    return found


def _signed(value: float | None, digits: int) -> str:
    return UNDEFINED if value is None else f"{value:+.{digits}f}"


def _between(ci95: Sequence[float] | None, digits: int, scale: float = 1.0) -> str:
    return f"{scale * ci95[0]:+.{digits}f} to {scale * ci95[1]:+.{digits}f}" if ci95 else ""


def _worse(ci95: Sequence[float] | None, *, lower_is_better: bool) -> Tone:
    """Bad where the whole interval of a difference lies on the worse side of 0, good where on the better."""
    if not ci95 or ci95[0] <= 0 <= ci95[1]:
        return ""
    return "bad" if (ci95[0] > 0) == lower_is_better else "good"


def _score(row: Row) -> Cell:
    found = _of(row)
    if found["score"] is None:
        return Cell(UNDEFINED)
    return Cell(percent(found["score"]), detail=f"of {found['of']}")


def _score_difference(row: Row) -> Cell:
    found = _of(row)
    difference = found["score_difference"]
    if difference is None:
        return Cell("" if row["method"] == "none" else UNDEFINED)
    return Cell(f"{100 * difference:+.1f}", _worse(found["score_difference_ci95"], lower_is_better=False))


QUALITY_COLUMNS: tuple[Column[Any], ...] = (
    Column(title="method", cell=lambda row: Cell(row["method"], "strong", detail=lossy_detail(row)), left=True),
    Column(title="speed-up", cell=lambda row: times(row["speedup"])),
    Column(
        title="excess NLL",
        cell=lambda row: Cell(
            _signed(_of(row)["excess_nll"], 3), _worse(_of(row)["excess_nll_ci95"], lower_is_better=True)
        ),
        legend="nats per token above autoregressive decoding's answers, under the target",
        definition="Negative log-likelihood of the answers under the target, per token, minus that of autoregressive "
        "decoding's answers to the same prompts, in nats.",
    ),
    Column(
        title="NLL 95 %",
        cell=lambda row: Cell("" if row["method"] == "none" else _between(_of(row)["excess_nll_ci95"], 3), "dim"),
        definition="The excess NLL's 95 % interval: paired bootstrap over prompts.",
    ),
    Column(
        title="TV",
        cell=lambda row: number(_of(row)["tv"], 4),
        legend="total variation of a committed token's distribution from the target's",
        definition="Total variation between the distribution that a token is committed from and the target's after the "
        "same tokens, mean over tokens. At temperature 0: the share of tokens that are not the target's first choice.",
    ),
    Column(
        title="edits",
        cell=lambda row: percent(_of(row)["edit_distance"]),
        legend="edit distance to the greedy answers",
        definition="Tokens to insert, delete or replace to get from the greedy answer, over the tokens of the longer.",
    ),
    Column(
        title="score",
        cell=_score,
        definition="Share of the answers to prompts with 'answer' or tests that are right: exact match of the final "
        "answer, or all tests passed by the one answer (pass@1).",
    ),
    Column(
        title="difference",
        cell=_score_difference,
        legend="points of score above autoregressive decoding",
        definition="Score minus that of autoregressive decoding on the same prompts, in points.",
    ),
    Column(
        title="score 95 %",
        cell=lambda row: Cell(_between(_of(row)["score_difference_ci95"], 1, 100.0), "dim"),
        definition="The difference's 95 % interval for paired shares (Agresti and Min 2005).",
    ),
    Column(
        title="smallest",
        cell=lambda row: (
            number(None if (least := _of(row)["smallest_difference"]) is None else 100 * least)
            if row["method"] != "none"
            else ""
        ),
        legend="smallest difference in points that so many answers would show",
        definition="The smallest difference in score that a test at 5 % would show on this sample with a power of "
        "80 %, in points.",
    ),
)


def quality_table(rows: Sequence[Row]) -> Table:
    """The table of all rows."""
    scored = any(_of(row)["score"] is not None for row in rows)
    edited = any(_of(row)["edit_distance"] is not None for row in rows)
    scores = ("score", "difference", "score 95 %", "smallest")
    shown = [one for one in QUALITY_COLUMNS if (scored or one.title not in scores) and (edited or one.title != "edits")]
    return table_of("Quality", shown, rows)


def quality_notes(result: Mapping[str, Any]) -> list[str]:
    """What could not be measured, and what a reader should know of the scores."""
    rows = [row for row in result["methods"] if not row["error"]]
    if not rows:
        return []
    notes = []
    if without := [row["method"] for row in rows if _of(row)["tv"] is None and row["prompts"]]:
        notes.append(f"No closed form of a committed token's distribution, so tv is null: {', '.join(without)}.")
    of, prompts = _of(rows[0])["of"], rows[0]["prompts"]
    if not of:
        notes.append(
            "No prompt can be scored, so score is null: rows need 'answer', or 'prompt', 'entry_point' and 'test' "
            "(tests are run on Linux alone, on x86-64 and ARM64)."
        )
        return notes
    if of < prompts:
        notes.append(f"Scores count the {of} of {prompts} prompts that have an answer or tests.")
    for key, said in (
        ("unanswered", "gave no final answer or program; they count as wrong"),
        ("cut_off", "reached the limit on new tokens (--max-new-tokens) and were scored as they stood"),
    ):
        counts = {row["method"]: _of(row)[key] for row in rows if _of(row)[key]}
        if counts:
            notes.append(f"Of {of} scored answers, some {said}: {by_row(counts)}.")
    least = [100 * found for row in rows if (found := _of(row)["smallest_difference"]) is not None]
    if least:
        low, high = f"{min(least):.0f}", f"{max(least):.0f}"
        points = low if low == high else f"{low} to {high}"
        notes.append(
            f"{of} scored answers show a difference in score only from about {points} points on (power 80 %): smaller "
            "ones may be there unseen."
        )
    return notes


def by_row(counts: Mapping[str, int]) -> str:
    """12 of none, 13 of pld; of many rows the fewest and the most."""
    if len(counts) > _NAMED:
        few, many = min(counts, key=lambda name: counts[name]), max(counts, key=lambda name: counts[name])
        return f"from {counts[few]} ({few}) to {counts[many]} ({many}) in {len(counts)} rows"
    return ", ".join(f"{count} of {name}" for name, count in counts.items())


def frontier_charts(result: Mapping[str, Any]) -> list[Chart]:
    """Speed-up against each divergence, where lossy methods were measured."""
    rows = [row for row in result["methods"] if row["method"] != "none" and row["speedup"] and not row["error"]]
    if all(row["lossless"] for row in rows):
        return []
    palette = colours(list(dict.fromkeys(row_series(row["method"])[0] for row in rows)))
    told = {
        "excess_nll": ("excess negative log-likelihood, nats per token", "excess NLL"),
        "tv": ("total variation of a committed token's distribution", "total variation"),
    }
    return [
        _chart(shown, key, *told[key], palette)
        for key in ("excess_nll", "tv")
        if (shown := [row for row in rows if _of(row)[key] is not None])
    ]


def _chart(rows: Sequence[Row], key: str, axis: str, name: str, palette: Mapping[str, str]) -> ScatterChart:
    points = [(_of(row)[key], row["speedup"]) for row in rows]
    best = on_frontier(points, [row["lossless"] for row in rows])
    series: dict[str, list[Point]] = {}
    for row, marked in zip(rows, best, strict=True):
        of, knob = row_series(row["method"])
        said = f"{row['method']}: {times(row['speedup'])}, {name} {_signed(_of(row)[key], 4)}"
        label = (knob or of) if marked and sum(best) <= _LABELS else ""
        ci95 = _of(row).get(f"{key}_ci95")
        series.setdefault(of, []).append(
            Point(_of(row)[key], row["speedup"], label, said, ci95, row["speedup_ci95"], marked)
        )
    ordered = {of: sorted(points, key=lambda one: one.x) for of, points in series.items()}
    return ScatterChart(
        f"Speed against {name}",
        "Each point is a row; a line joins the settings of one method and rule. Up and towards 0 is better. Filled "
        "points are on the frontier: no other row is at least as fast with no more divergence, on either side of 0; "
        "nor is autoregressive decoding. Lossless rows count as at 0. Thin lines are 95 % intervals.",
        axis,
        "speed-up",
        ordered,
        {of: palette[of] for of in ordered},
    )
