"""``se``: its prompts, what counts as repeated, and the study on smollm2."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from cli_support import Run, refused
from outpace.bench.records import Answer
from outpace.core.metrics import RequestMetrics
from outpace.model import Model
from outpace.prompts.questions import bench_texts, load_prompts
from outpace.studies.registry import StudyContext, find_study, read_settings, run_study
from outpace.studies.se import TASKS, correlation, repeated


def test_the_set_has_six_prompts_of_each_task_whose_code_compiles() -> None:
    prompts = load_prompts("software")
    assert Counter(one.category for one in prompts) == dict.fromkeys(TASKS, 6)
    assert len({one.id for one in prompts}) == len({one.text for one in prompts}) == 18
    blocks = [block.partition("```")[0] for one in prompts for block in one.text.split("```python\n")[1:]]
    assert len(blocks) >= 10
    for block in blocks:
        compile(block, "prompt", "exec")
    assert set(bench_texts()) >= {one.text for one in prompts}  # training must not see them


def answer(context: tuple[int, ...], tokens: tuple[int, ...]) -> Answer:
    return Answer(context, tokens, RequestMetrics(), 0.0)


def test_runs_repeat_where_four_tokens_stood_before() -> None:
    assert repeated(answer((1, 2, 3, 4, 5), (1, 2, 3, 4, 5))) == 1.0  # 1234 and 2345; both are in the prompt
    assert repeated(answer((1, 2, 3, 4, 5), (1, 2, 3, 4, 9))) == 0.5
    assert repeated(answer((7,), (1, 2, 1, 2, 1, 2))) == pytest.approx(1 / 3)  # 1212, 2121, 1212 again
    assert repeated(answer((7,), (1, 2, 3))) == 0.0


def test_the_correlation_is_pearson_s_in_every_resample() -> None:
    x, y = np.array([1.0, 2.0, 4.0, 3.0]), np.array([2.0, 1.0, 5.0, 4.0])
    weights = np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 0.0, 1.0], [4.0, 0.0, 0.0, 0.0]])
    drawn = [0, 0, 1, 3]
    expected = [np.corrcoef(x, y)[0, 1], np.corrcoef(x[drawn], y[drawn])[0, 1], 0.0]
    assert correlation(weights, x, y) == pytest.approx(expected)


@pytest.mark.model
def test_kinds_of_methods_are_compared_by_task(smollm2: Model) -> None:
    about = StudyContext("smollm2", load_prompts("software", 4), lambda name, dtype: smollm2)
    one = find_study("se")
    assert one.prompts == "software"
    found = run_study(
        one, about, read_settings(one, {"based": ["draft-model"], "free": ["pld", "sam"], "max_new_tokens": 12})
    )
    assert [(row["task"], row["method"]) for row in found.rows] == [
        (task, name) for task in TASKS for name in ("draft-model", "pld", "sam")
    ]
    assert [row["prompts"] for row in found.rows[::3]] == [2, 1, 1]
    assert all(1.0 <= row["low"] <= row["tokens"] <= row["high"] for row in found.rows[:3])
    assert all(row["low"] is row["high"] is row["speedup_low"] is None for row in found.rows[3:]), "one prompt each"
    assert all(row["tokens"] >= 1.0 for row in found.rows)
    assert {claim["verdict"] for claim in found.result["claims"] if claim["interval"] is None} == {"undecided"}
    assert sum(claim["interval"] is None for claim in found.result["claims"]) == 4
    claims = [claim["says"] for claim in found.result["claims"]]
    assert [says.split(":")[0] for says in claims[:6]] == [*TASKS, *TASKS]
    assert "model-based method is faster than the best model-free" in claims[0]
    assert "model-free method is faster than the best model-based" in claims[1]


def test_what_it_lacks_is_refused(cli: Run) -> None:
    refused(cli("study", "se", "--limit", "1"), "no prompts of category repair and edit")
    refused(cli("study", "se", "--prompts", "chat"), "generation and repair and edit", "'software'")
    refused(cli("study", "se", "--setting", "free=sam,draft-model"), "named twice")
    refused(cli("study", "se", "--setting", "based=eagle3"), "eagle3")  # the toy model has no such head
