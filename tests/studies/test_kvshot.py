"""``kvshot``: K/V made from states are the target's own, chains are counted by hand, and the study on smollm2."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_support import Run, refused
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.known_answers import close_answers, known_answers
from outpace.engine.request import Request
from outpace.heads.base import Batch, teacher_of
from outpace.heads.checkpoint import facts
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.kinds import find_kind, plan
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.studies.kvshot import BOTH, KV, OLD, STATES, Chains, chains_of
from outpace.studies.registry import StudyContext, find_study, read_settings, run_study
from outpace.studies.reuse_drafter import Reuse, ReuseDrafter, TargetKeysValues

LAYERS = (2, 15, 27)


def drafter(model: Model, reuse: Reuse, keys_values: TargetKeysValues) -> ReuseDrafter:
    target = model.target
    config = keys_values.sized(
        plan(find_kind("eagle3"), facts(target, model.name), vocabulary=256, options={"steps": 3})
    )
    torch.manual_seed(1)
    ids = torch.arange(256)
    return ReuseDrafter(config, DraftVocabulary(ids, target.lm_head_rows(ids).float()), reuse, keys_values).float()


@pytest.fixture(scope="module")
def keys_values(smollm2_float32: Model) -> TargetKeysValues:
    return TargetKeysValues.of(smollm2_float32.target, 27)


@pytest.mark.model
def test_keys_and_values_are_those_that_attention_reads(keys_values: TargetKeysValues) -> None:
    """Written out: the norm, the projections and a rotation by pairs of halves."""
    spec, weights = keys_values.spec, keys_values.weights
    states = torch.randn(1, 5, spec.hidden, generator=torch.Generator().manual_seed(0))
    keys, values = keys_values(states, torch.tensor([[0, 1, 2, 3, 7]]))
    row = states[0, 4]
    normed = row / (row.square().mean() + spec.epsilon).sqrt() * weights.norms["norm1"].weight
    size = spec.head_size
    assert torch.allclose(values[0, 1, 4], (weights.value.weight.float() @ normed)[size : 2 * size], atol=1e-4)
    plain = (weights.key.weight.float() @ normed)[size : 2 * size]
    angle = 7.0 * keys_values.theta ** (-torch.arange(size // 2) / (size // 2))
    left, right = plain[: size // 2], plain[size // 2 :]
    turned = torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()])
    assert torch.allclose(keys[0, 1, 4], turned, atol=1e-4)


@pytest.mark.model
@pytest.mark.parametrize("reuse", ["states", "kv", "both"])
def test_drafters_read_what_they_are_fed_with_and_nothing_later(
    reuse: Reuse, smollm2_float32: Model, keys_values: TargetKeysValues
) -> None:
    model = smollm2_float32
    head = drafter(model, reuse, keys_values)
    embedding = torch.cat([model.target.embed(torch.arange(0, 300))]).float()
    generator = torch.Generator().manual_seed(3)
    count = 8
    tokens = torch.randint(0, 256, (1, count), generator=generator)
    states = {layer: torch.randn(1, count, 576, generator=generator) for layer in LAYERS}

    def outputs(states: dict[int, torch.Tensor], tokens: torch.Tensor) -> list[torch.Tensor]:
        """Of row 3, at each of three steps."""
        every = torch.ones(1, count, dtype=torch.bool)
        batch = Batch(tokens, states, every, every)
        run = head.unrolling(batch, embedding)
        wanted = torch.zeros(count, dtype=torch.bool)
        wanted[3] = True
        with torch.no_grad():
            return [run.step(wanted, batch.ahead(batch.tokens, 1 + step).flatten()) for step in range(3)]

    def changed(layer: int, row: int) -> bool:
        other = {one: rows.clone() for one, rows in states.items()}
        other[layer][0, row] += 1.0
        return any(
            not torch.equal(one, two)
            for one, two in zip(outputs(states, tokens), outputs(other, tokens), strict=True)
        )  # fmt: skip

    assert not any(changed(layer, row) for layer in LAYERS for row in (4, 7))  # what is not known yet
    assert changed(27, 3) and changed(27, 0)
    # Of the lower layers K/V alone know nothing; beside them only the state of the row itself is read.
    assert changed(2, 3) == (reuse != "kv") and changed(2, 0) == (reuse == "states")


@pytest.mark.model
def test_chains_begin_at_every_token(smollm2_float32: Model, keys_values: TargetKeysValues) -> None:
    """Whatever an untrained drafter drafts, its counts fit together."""
    model = smollm2_float32
    head = drafter(model, "states", keys_values)
    [prompt] = load_prompts(limit=1)
    ids = tuple(model.tokenizer.chat(prompt.messages))
    request = Request(ids, model.method("none"), SamplingParams(), 12, model.eos_ids)
    answers = known_answers(model.target, [request], LAYERS)
    try:
        embedding = teacher_of(model.target, head, torch.device("cpu")).embedding.float()
        found = chains_of(head, answers, embedding, 3)
        length = len(answers[0].tokens) - 1  # the last one's states are not known
        # Row t drafts token t + 2 first: as many rows as the answer has tokens.
        assert list(found.rows[0]) == [length, length - 1, length - 2]
        assert (found.alive <= found.right).all() and (found.right <= found.rows).all()
        assert found.alive[0, 0] == found.right[0, 0] and (found.alive[0, 1:] <= found.alive[0, :-1]).all()
        assert (found.sizes > 0).all()
    finally:
        close_answers(model.target, answers)


@pytest.mark.model
def test_the_study_on_the_real_model(smollm2: Model, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    topics = ("bees", "tides", "chess", "bread", "glass", "maps", "rain", "trains", "violins", "coal")
    prompts.write_text("\n".join(json.dumps({"prompt": f"Tell me three things about {one}."}) for one in topics))
    wish = {
        "train_prompts": str(prompts),
        "tokens": 80,
        "answer_tokens": 16,
        "batch_tokens": 128,
        "vocabulary": 512,
        "steps": 3,
        "max_new_tokens": 8,
    }
    about = StudyContext("smollm2", load_prompts(limit=2), lambda name, dtype: smollm2)
    one = find_study("kvshot")
    found = run_study(one, about, read_settings(one, wish))
    assert [row["fed"] for row in found.rows] == [STATES, KV, BOTH, OLD]
    assert len({row["chains"] for row in found.rows}) == 1 and found.rows[0]["chains"] > 0
    for row in found.rows:
        assert all(0.0 <= row[f"position_{at}"] <= 1.0 for at in (1, 2, 3))
        assert row["growth"] > 0
    assert len(found.result["claims"]) == 5
    with pytest.raises(BadInput, match="layer 99 does not exist"):
        run_study(one, about, read_settings(one, wish | {"layer": 99}))


def test_what_it_lacks_is_refused(cli: Run) -> None:
    refused(cli("study", "kvshot"), "K/V of this model cannot be made")  # the toy model shows no weights
    refused(cli("study", "kvshot", "--setting", "layer=99"), "layer 99 does not exist")
    refused(cli("study", "kvshot", "--setting", "steps=1"), "setting 'steps'")
    refused(cli("study", "kvshot", "--prompts", "structured"), "study decodes without grammars")


def test_figures_of_chains_by_hand() -> None:
    rows, right = np.array([[4.0, 2.0], [6.0, 6.0]]), np.array([[2.0, 1.0], [3.0, 0.0]])
    found = Chains(rows, right, np.array([[2.0, 1.0], [3.0, 0.0]]), np.array([[8.0, 8.0], [6.0, 12.0]]))
    weights = np.array([[1.0, 1.0], [2.0, 0.0]])
    assert found.acceptance(weights) == pytest.approx(np.array([[0.5, 1 / 8], [0.5, 0.5]]))
    assert found.tokens(weights) == pytest.approx([1.625, 2.0])
    assert found.growth(weights) == pytest.approx([(20 / 8) / (14 / 10), 2.0])
