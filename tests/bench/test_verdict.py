"""The bench's last sentence, and its advice on intervals, over rows as the JSON object has them."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.bench.verdict import verdict, wide_intervals

SAME = {"same": 42, "of": 42, "near_ties": 0}
TIES = {"same": 40, "of": 42, "near_ties": 2}


def row(name: str, speedup: float | None, interval: list[float] | None, **more: Any) -> dict[str, Any]:
    return {
        "method": name,
        "prompts": 42,
        "speedup": speedup,
        "speedup_ci95": interval,
        "identical": SAME,
        "lossless": True,
        "error": None,
        "by_category": {},
    } | more


def tasks(**cells: tuple[float, list[float]]) -> dict[str, Any]:
    return {name: {"speedup": speedup, "speedup_ci95": ci95} for name, (speedup, ci95) in cells.items()}


def result(*rows: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    return {"complete": complete, "methods": [row("none", 1.0, [1.0, 1.0]), *rows]}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [row("sam", 1.42, [1.31, 1.55]), row("pld", 1.1, [1.0, 1.2])],
            "sam was the fastest: 1.42x [1.31, 1.55] the speed of autoregressive decoding, with identical answers on "
            "all 42 prompts.",
        ),
        (
            [row("sam", 1.42, [1.31, 1.55], identical=TIES)],
            "sam was faster: 1.42x [1.31, 1.55] the speed of autoregressive decoding, with identical answers on 40 of "
            "42 prompts, and 2 near ties.",
        ),
        (
            [row("sam", 1.42, [1.31, 1.55]), row("pld", 1.38, [1.25, 1.5])],
            "sam and pld were the fastest, level within the noise: 1.42x [1.31, 1.55] and 1.38x [1.25, 1.50] the "
            "speed of autoregressive decoding, with identical answers on all 42 prompts.",
        ),
        (
            [row(name, 1.4 - i / 100, [1.2, 1.6]) for i, name in enumerate("abcd")],
            "a was the fastest, level within the noise with b and 2 others: 1.40x [1.20, 1.60] the speed of "
            "autoregressive decoding, with identical answers on all 42 prompts.",
        ),
        (
            [row("pld", 0.9, [0.8, 0.95])],
            "No method was faster than autoregressive decoding; the best was pld: 0.90x [0.80, 0.95], with identical "
            "answers on all 42 prompts.",
        ),
        (
            [row("pld", 1.05, [0.97, 1.12])],
            "No method was faster than autoregressive decoding beyond the noise; the best was pld: 1.05x [0.97, 1.12], "
            "with identical answers on all 42 prompts.",
        ),
        (
            [row("pld", 1.5, None, prompts=1)],
            "pld was the fastest: 1.50x the speed of autoregressive decoding, from too few prompts for an interval.",
        ),
        (
            [
                row("sam", 1.5, [1.4, 1.6], by_category=tasks(qa=(1.2, [1.1, 1.3]), math=(1.8, [1.6, 2.0]))),
                row("pld", 1.2, [1.1, 1.3], by_category=tasks(qa=(1.6, [1.5, 1.7]), math=(1.9, [1.7, 2.1]))),
            ],
            "sam was the fastest: 1.50x [1.40, 1.60] the speed of autoregressive decoding, with identical answers on "
            "all 42 prompts; by task, faster still: pld in qa (1.60x).",
        ),
        (
            [row("sam", 0.9, [0.8, 1.0], by_category=tasks(qa=(1.2, [1.1, 1.3]), math=(0.8, [0.6, 0.9])))],
            "No method was faster than autoregressive decoding; the best was sam: 0.90x [0.80, 1.00], with identical "
            "answers on all 42 prompts; by task, faster beyond the noise: sam in qa (1.20x).",
        ),
        (
            [row("typical", 1.6, [1.5, 1.7], lossless=False, identical={"same": 3, "of": 42, "near_ties": 0})],
            "typical was faster: 1.60x [1.50, 1.70] the speed of autoregressive decoding, with answers that may "
            "differ, because it is lossy (3 of 42 were identical).",
        ),
        (
            [row("pld", 1.6, [1.5, 1.7], identical=None)],
            "pld was faster: 1.60x [1.50, 1.70] the speed of autoregressive decoding, with the same output "
            "distribution.",
        ),
        (
            [row("pld", 1.6, [1.5, 1.7], identical={"same": 39, "of": 42, "near_ties": 1})],
            "pld was faster: 1.60x [1.50, 1.70] the speed of autoregressive decoding, with different answers on 2 of "
            "42 prompts, which is a defect.",
        ),
        ([row("pld", 3.0, None, error="broke")], "No method could be measured."),
        ([row("pld", None, None)], "No method could be measured."),
        ([], "Only autoregressive decoding was measured, so there is nothing to compare."),
    ],
)
def test_one_sentence_for_every_result(rows: list[dict[str, Any]], sentence: str) -> None:
    assert verdict(result(*rows)) == sentence


def test_answers_of_level_methods_are_told_apart_where_they_differ() -> None:
    said = verdict(result(row("sam", 1.42, [1.31, 1.55]), row("pld", 1.38, [1.25, 1.5], identical=TIES)))
    assert said.endswith(
        "with identical answers on all 42 prompts (sam), identical answers on 40 of 42 prompts, and 2 near ties (pld)."
    )


def test_an_interrupted_bench_is_named_so() -> None:
    assert verdict(result(row("pld", 1.6, [1.5, 1.7]), complete=False)).endswith(" (interrupted after 42 prompts).")
    assert verdict({"complete": False, "methods": []}).startswith("No results: ")


def test_wide_intervals_ask_for_more_prompts() -> None:
    assert wide_intervals(result(row("pld", 1.0, [0.86, 1.14]))) is None
    assert wide_intervals(result(row("pld", 1.0, None), row("sam", 2.0, [0.1, 4.0], error="broke"))) is None
    # ±20 % of 42 prompts: sixteen times as many halve it twice.
    assert wide_intervals(result(row("pld", 2.0, [1.6, 2.4]))) == (
        "Wide interval: the speed-up of pld is known to ±20% after 42 prompts; about 680 prompts would give ±5%."
    )
    said = wide_intervals(result(row("pld", 2.0, [1.6, 2.4]), row("sam", 1.0, [0.5, 1.5])))
    assert said is not None
    assert "of sam is known to ±50% after 42 prompts (1 more above ±15%); about 4,200 prompts" in said
