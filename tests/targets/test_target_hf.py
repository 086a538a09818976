"""HFTarget: the suite that every target passes, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.targets.base import Target
from outpace.targets.hf import HFTarget
from target_suite import KVChoice, KVMemory, SubGraphs, TreeScoring, opened, reference, tiny_config, tiny_model


def build(model: Any) -> Target:
    return HFTarget(model, prefill_chunk=16)


class TestTreeScoring(TreeScoring):
    build = staticmethod(build)


class TestKVMemory(KVMemory):
    build = staticmethod(build)


class TestSubGraphs(SubGraphs):
    build = staticmethod(build)


class TestKVChoice(KVChoice):
    build = staticmethod(build)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama")
    expected = reference(model, [1, 2, 3])
    implementation = model.config._attn_implementation
    target = HFTarget(model)
    target.score([(opened(target, [5, 6, 7]), TokenTree.chain([8]))])
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(reference(model, [1, 2, 3]), expected)
    again = HFTarget(model)  # a second target around the same model does not stack its gates
    torch.testing.assert_close(again.score([(opened(again, [1, 2, 3]), TokenTree())])[0].logits[0], expected)


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    model = tiny_model("llama")
    HFTarget(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[1].mlp.down_proj.weight.zero_()
    target = HFTarget(twin)
    scores = target.score([(opened(target, [1, 2, 3]), TokenTree())])
    torch.testing.assert_close(scores[0].logits[0], reference(twin, [1, 2, 3]), atol=2e-4, rtol=2e-4)
    assert not torch.allclose(scores[0].logits[0], reference(model, [1, 2, 3]))


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 256),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 64,
            },
            64,
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_scaling_that_depends_on_length_is_right_below_and_refused_above(rope: dict[str, Any], limit: int) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama")
    config.rope_parameters = rope
    if rope["rope_type"] == "longrope":
        config.original_max_position_embeddings = 64
    model = AutoModelForCausalLM.from_config(config).float().eval()
    target = HFTarget(model)
    assert target.context_length == limit
    tokens = [(7 * i) % 90 for i in range(limit - 8)]
    sequence = opened(target, tokens)
    scores = target.score([(sequence, TokenTree.chain([3, 4]))])
    torch.testing.assert_close(scores[0].logits[2], reference(model, [*tokens, 3, 4]), atol=2e-4, rtol=2e-4)
    with pytest.raises(BadInput, match=rope["rope_type"]):
        target.sequence([1] * (limit + 1))


def test_models_whose_state_is_not_attention_are_refused_by_name() -> None:
    from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig

    mamba = MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50, state_size=4)
    bloom = BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=50)
    for config in (mamba, bloom):
        with pytest.raises(BadInput, match=config.model_type):
            HFTarget(AutoModelForCausalLM.from_config(config))


def test_attention_that_differs_from_the_models_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.targets import attention

    honest = attention._attend

    def off(*args: Any) -> Any:
        return honest(*args) * 1.5

    monkeypatch.setattr(attention, "_attend", off)
    with pytest.raises(BadInput, match="differ from its own"):
        HFTarget(tiny_model("llama"))
