"""``sdsl``: the law finds what made the figures, and the study trains, predicts and checks on smollm2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_support import Run, refused
from outpace.core.errors import BadInput
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.studies.acceptance_law import fitted
from outpace.studies.draft_sizes import DraftSettings, read_size
from outpace.studies.registry import StudyContext, find_study, read_settings, run_study
from outpace.studies.sdsl import chain_speedups, tells

SIZES = (1e6, 2e6, 4e6, 8e6, 16e6)


def test_the_law_finds_what_made_the_figures() -> None:
    """Two resamples with laws of their own, without noise."""
    truth = [(1.0, 60.0, 0.3, -0.01, 0.7), (1.5, 400.0, 0.5, -0.02, 0.9)]
    logs = np.array([[floor + scale * size**-power for size in SIZES] for floor, scale, power, *_ in truth])
    lines = np.array([[slope] for *_, slope, _ in truth]), np.array([[level] for *_, level in truth])
    law = fitted(SIZES, np.exp(logs), lines[0] * np.exp(logs) + lines[1])
    assert law.exponent == pytest.approx([0.3, 0.5])
    assert law.floor == pytest.approx([1.0, 1.5])
    assert law.determination == pytest.approx(1.0)
    for size in (3e6, 30e6):
        expected = [np.exp(floor + scale * size**-power) for floor, scale, power, *_ in truth]
        assert law.perplexity(size) == pytest.approx(expected)
        assert law.acceptance(size) == pytest.approx([0.7 - 0.01 * expected[0], 0.9 - 0.02 * expected[1]])


def test_acceptance_that_does_not_follow_perplexity_is_no_line() -> None:
    perplexity = np.array([[9.0, 8.0, 7.0, 6.0, 5.0]])
    law = fitted(SIZES, perplexity, np.array([[0.1, 0.5, 0.1, 0.5, 0.1]]))
    assert law.determination[0] < 0.2


def test_speedups_of_chains_by_hand() -> None:
    found = chain_speedups(np.array([0.5, 0.0]), np.array([1.1, 1.2]), 0.2)
    assert found[0] == pytest.approx([1.5 / 1.3, 1.75 / 1.6])
    assert found[1] == pytest.approx([1.0 / 1.3, 1.0 / 1.6])


def test_a_law_is_only_as_good_as_it_is_better_than_the_mean() -> None:
    truth, mean = np.array([0.07, 0.07, 0.5]), np.array([0.06, 0.06, 0.3])
    assert tells(np.array([0.085, 0.068, 0.45]), mean, truth).tolist() == [False, True, False]


@pytest.mark.model
def test_sizes_are_read_from_text(smollm2: Model) -> None:
    settings = DraftSettings.model_validate({})
    small, large = read_size(smollm2, "1:tiny", settings), read_size(smollm2, "6:large", settings)
    assert (small.layers, large.layers) == (1, 6)
    # Attention of 576 x (576 + 192 + 192 + 576), an MLP of 3 x 576 x 384, two norms and the last one.
    assert small.weights == 576 * 1536 + 3 * 576 * 384 + 3 * 576
    assert large.weights > 5 * small.weights
    for text in ("base", "two:base", "0:base", "2:huge"):
        with pytest.raises(BadInput):
            read_size(smollm2, text, settings)


@pytest.mark.model
@pytest.mark.slow
def test_the_study_trains_predicts_and_checks(smollm2: Model, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    topics = ("bees", "tides", "chess", "bread", "glass", "maps", "rain", "trains", "violins", "coal", "ferns", "salt")
    rows = [{"prompt": f"Tell me three things about {topic}."} for topic in topics]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    wish: dict[str, Any] = {
        "sizes": ["1:tiny", "1:base", "2:base"],
        "candidates": ["1:small", "2:tiny"],
        "train_prompts": str(prompts),
        "tokens": 80,
        "answer_tokens": 12,
        "batch_tokens": 256,
        "vocabulary": 512,
        "max_new_tokens": 6,
        "longest": 2,
        "timed": 1,
    }
    about = StudyContext("smollm2", load_prompts(limit=2), lambda name, dtype: smollm2)
    one = find_study("sdsl")
    found = run_study(one, about, read_settings(one, wish))
    assert [row["size"] for row in found.rows[:3]] == wish["sizes"]
    assert [row["chosen"] for row in found.rows] == [False, False, False, True]
    assert found.rows[3]["size"] in wish["candidates"]
    for row in found.rows:
        assert 0.0 <= row["low"] <= row["acceptance"] <= row["high"] <= 1.0
        assert row["perplexity"] > 1.0 and row["draft_ms"] > 0 and row["speedup"] > 0
    assert len(found.result["claims"]) == 4
    with pytest.raises(BadInput, match="trained already"):
        run_study(one, about, read_settings(one, wish | {"candidates": ["1:tiny"]}))
    with pytest.raises(BadInput, match="named twice"):
        run_study(one, about, read_settings(one, wish | {"sizes": ["1:tiny", "1:tiny", "2:base"]}))


def test_what_it_lacks_is_refused(cli: Run) -> None:
    refused(cli("study", "sdsl", "--setting", "sizes=1:tiny,2:base"), "setting 'sizes'")
    refused(cli("study", "sdsl", "--setting", "tokens=0"), "setting 'tokens'")
    refused(cli("study", "sdsl"), "leave out --fixed-costs")  # those of the toy model are
