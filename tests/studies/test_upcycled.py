"""A mixture that is made of a dense model: the same with all experts, and times that a model of them finds again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outpace.core.errors import BadInput
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.studies.registry import StudyContext, find_study, read_settings, run_study
from outpace.studies.upcycled import Cell, Mixture, fitted_seconds, upcycle


def mlp(width: int = 32) -> SimpleNamespace:
    torch.manual_seed(0)
    gate, up, down = nn.Linear(8, width, False), nn.Linear(8, width, False), nn.Linear(width, 8, False)
    return SimpleNamespace(gate_proj=gate, up_proj=up, down_proj=down, act_fn=nn.functional.silu)


def test_a_mixture_of_all_its_experts_is_the_dense_mlp() -> None:
    dense, hidden = mlp(), torch.randn(2, 5, 8)
    expected = dense.down_proj(dense.act_fn(dense.gate_proj(hidden)) * dense.up_proj(hidden))
    whole = Mixture(dense, 4, 4)
    assert torch.allclose(whole(hidden), expected, atol=1e-6)
    assert whole.touched == 4
    sparse = Mixture(dense, 4, 1)
    assert not torch.allclose(sparse(hidden), expected, atol=1e-3)
    sparse(hidden[:1, :1])
    assert sparse.touched == 1


def test_balanced_experts_are_used_about_as_often() -> None:
    """Hidden states with much in common answer to one expert above all, until experts are compared with themselves."""
    one, hidden = Mixture(mlp(), 4, 1), torch.randn(400, 8) + 5.0
    one(hidden[:20])
    before = one.touched
    one.balancing = True
    one(hidden)
    one.balancing = False
    one(hidden[:20])
    assert before < one.touched == 4


def test_what_no_mixture_is_made_of_is_refused() -> None:
    def model(width: int) -> SimpleNamespace:
        return SimpleNamespace(get_decoder=lambda: SimpleNamespace(layers=[SimpleNamespace(mlp=mlp(width))]))

    with pytest.raises(BadInput, match="power of two"):
        upcycle(model(32), 6, 2)
    with pytest.raises(BadInput, match="width 36 cannot be divided into 8"):
        upcycle(model(36), 8, 2)
    assert len(upcycle(model(32), 8, 2)) == 1


def test_the_model_of_times_finds_what_made_them() -> None:
    def seconds(rows: int) -> float:
        return 0.01 + 0.002 * 8 * (1 - 0.75**rows) + 0.0005 * rows

    known = [Cell(batch, length, seconds(batch * (1 + length)), 0.0) for batch in (1, 4, 16) for length in (0, 1, 3)]
    found = fitted_seconds(known, 8, 2)
    assert [found(rows) for rows in (2, 8, 40)] == pytest.approx([seconds(rows) for rows in (2, 8, 40)])


@pytest.mark.model
def test_moesd_on_an_upcycled_model(smollm2: Model) -> None:
    one = find_study("moesd")
    about = StudyContext("smollm2", load_prompts(limit=4), lambda name, dtype: smollm2)
    found = run_study(one, about, read_settings(one, {"batches": [1, 2, 4], "lengths": [1]}))
    assert [round(row["tiny_experts"]) <= 8 for row in found.rows] == [True] * 3
    assert [row["tiny_fitted"] for row in found.rows] == [True, False, True]
    assert all(row["tiny_efficiency"] > 0 and row["tiny_predicted"] > 0 for row in found.rows)
    assert found.rows[0]["tiny_experts"] < found.rows[2]["tiny_experts"]
    assert len(found.result["claims"]) == 5
