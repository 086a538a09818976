"""Groups and their draft models: of other vocabularies and targets, beside other requests, and where they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dense_support import config, model_of
from outpace.certify.letters import LETTERS, Letters
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.populations.beam_options import BeamOptions
from outpace.engine.request import Generation, Request
from outpace.methods.registry import Context, build
from outpace.model import Model
from outpace.targets.base import Target
from outpace.targets.bridged import BridgedTarget
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.table import TableTarget
from outpace.vocabulary.shared import VocabularyMap
from weights_support import with_drafts

SIZE = 5
PROMPT = (1, 2, 3, 1)
METHODS: dict[str, dict[str, Any]] = {
    "dsbd": {"num_beams": 4, "num_draft_tokens": 2, "layer_chance": 0.0, "coverage": 1.0, "max_width": 8},
    "smcsd": {"num_particles": 5, "num_draft_tokens": 2, "ess_threshold": 1.0},
}


def dense(seed: int) -> DenseTarget:
    return DenseTarget(read_decoder_spec(model_of(config(vocab_size=SIZE, num_hidden_layers=1), seed)), "float32")


DRAFTS: dict[str, Callable[[], Target]] = {
    "a table": lambda: TableTarget(SIZE, seed=5),
    "a dense target": lambda: dense(5),
}


def bridged(draft: Target) -> BridgedTarget:
    """The same draft model, as one of another vocabulary that has all of these tokens."""
    letters = Letters(LETTERS[:SIZE])
    return BridgedTarget(draft, VocabularyMap(letters, letters, SIZE, SIZE), 256)


def decoded(target: Target, method: Any, params: SamplingParams, length: int = 12, **about: Any) -> Generation:
    decoder = Decoder(target)
    one = decoder.submit(Request(PROMPT, method, params, max_new_tokens=length, **about))
    decoder.run()
    one.raise_error()
    return one


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_model_of_another_vocabulary_drafts_what_it_would_by_itself(name: str, kind: str) -> None:
    """Its K/V is gathered by ancestor, through the translation."""
    target, params = TableTarget(SIZE, seed=4), SamplingParams(temperature=0.9, seed=3)
    found = []
    for draft in (DRAFTS[kind](), bridged(DRAFTS[kind]())):
        method = build(name, with_drafts(target, draft), METHODS[name])
        one = decoded(target, method, params)
        assert one.metrics.accepted > 0
        found.append((one.hypotheses, one.metrics.drafted, one.metrics.accepted))
    (ours, *counts), (others, *same) = found
    assert [one.tokens for one in ours] == [one.tokens for one in others]
    assert [one.score for one in ours] == pytest.approx([one.score for one in others], abs=1e-4)
    assert counts == same


def test_a_dense_draft_model_changes_no_beam_of_a_dense_target() -> None:
    target = dense(4)
    plain = decoded(target, build("none", Context(target)), SamplingParams(), beams=BeamOptions(4))
    method = build("dsbd", with_drafts(target, dense(5)), METHODS["dsbd"])
    drafted = decoded(target, method, SamplingParams(), beams=BeamOptions(4))
    assert [one.tokens for one in drafted.hypotheses] == [one.tokens for one in plain.hypotheses]
    assert drafted.metrics.drafted > 0


def test_the_shipped_draft_model_changes_no_beam(smollm2: Model) -> None:
    about: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12}
    method = smollm2.method("dsbd", {"layer_chance": 0.0})
    drafted = smollm2.generate("Name three colors.", method=method, **about)
    assert drafted.metrics["drafting_rounds"] > 0
    plain = smollm2.generate("Name three colors.", **about)
    assert [one.tokens for one in drafted.population] == [one.tokens for one in plain.population]


@pytest.mark.parametrize("name", ["none", "dsbd"])
def test_at_a_low_temperature_stochastic_beams_are_those_of_beam_search(name: str) -> None:
    """Nearly all continuations then have a probability of 0 in floating point, and are beams all the same."""
    target = TableTarget(9, seed=8)
    method = build(name, with_drafts(target, TableTarget(9, seed=9)), METHODS.get(name))
    cold, greedy = (
        decoded(target, method, SamplingParams(temperature=temperature, seed=1), 6, beams=BeamOptions(4))
        for temperature in (0.001, 0.0)
    )
    assert [one.tokens for one in cold.hypotheses] == [one.tokens for one in greedy.hypotheses]


def test_truncation_leaves_out_beams_at_a_low_temperature_too() -> None:
    target = TableTarget(9, seed=8)
    method = build("none", Context(target))
    for truncated in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        params = SamplingParams(temperature=0.001, seed=1, **truncated)
        found = decoded(target, method, params, 6, beams=BeamOptions(4))
        assert len(found.hypotheses) == 1, truncated
    two = decoded(target, method, SamplingParams(temperature=0.001, seed=1, top_k=2), 1, beams=BeamOptions(4))
    assert len(two.hypotheses) == 2


# ---------------------------------------------------------------------------------------------------- failures


class FailsAt:
    """A processor that raises for answers of ``length`` tokens that begin with ``token``."""

    def __init__(self, length: int, token: int | None = None) -> None:
        self.length, self.token = length, token

    def begin(self, prompt: Any) -> tuple[int, ...]:
        return ()

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def process(self, state: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        if len(state) >= self.length and (self.token is None or state[0] == self.token):
            raise RuntimeError("the user's own error")
        return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("first", [None, "of one beam"])
def test_a_processor_that_raises_ends_beams_with_its_error(temperature: float, first: str | None) -> None:
    target = TableTarget(SIZE, seed=4)
    params = SamplingParams(temperature=temperature, seed=1)
    best = decoded(target, build("none", Context(target)), params, 4, beams=BeamOptions(3))
    token = None if first is None else best.hypotheses[0].tokens[0]
    params = SamplingParams(temperature=temperature, seed=1, processors=(FailsAt(2, token),))
    with pytest.raises(BadInput, match="the user's own error"):
        decoded(target, build("none", Context(target)), params, 4, beams=BeamOptions(3))


class NoNumbers(TableTarget):
    """A draft model whose logits become NaN after some forwards."""

    forwards = 0

    def score(self, batch: Any, *about: Any, **more: Any) -> Any:
        scores = super().score(batch, *about, **more)
        self.forwards += 1
        if self.forwards > 3:
            for one in scores.parts:
                one.logits.fill_(torch.nan)
        return scores


def test_a_draft_model_that_fails_ends_its_group_alone() -> None:
    target = TableTarget(SIZE, seed=4)
    decoder = Decoder(target)
    params = SamplingParams(temperature=1.0, seed=2)
    method = build("smcsd", with_drafts(target, NoNumbers(SIZE, seed=5)), METHODS["smcsd"])
    beside, alone = build("none", Context(target)), Decoder(TableTarget(SIZE, seed=4))
    group = decoder.submit(Request(PROMPT, method, params, max_new_tokens=12))
    other = decoder.submit(Request(PROMPT, beside, params, max_new_tokens=12))
    expected = alone.submit(Request(PROMPT, beside, params, max_new_tokens=12))
    decoder.run()
    alone.run()
    assert other.tokens == expected.tokens
    with pytest.raises(BadInput, match="the draft model's logits are NaN"):
        group.raise_error()


# ------------------------------------------------------------------------------------------------------ memory


def test_groups_that_run_at_once_must_fit_into_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from cli_support import toy
    from outpace.core import machine

    model = toy()
    model.target.kv_bytes_per_token = 1000
    about: dict[str, Any] = {"num_beams": 4, "raw": True, "max_new_tokens": 10}
    free = 5 * 12 * 1000 + 4 * 4 * model.target.vocab_size
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    assert model.generate("ab", **about).text
    with pytest.raises(BadInput, match=r"4 beams of 12 tokens, 3 times at once, need .* MiB of K/V and logits"):
        model.generate(["ab", "cd", "ef"], **about)
    monkeypatch.setattr(machine, "free_memory", lambda: 3 * free)
    assert len(model.generate(["ab", "cd", "ef"], **about)) == 3


@pytest.mark.parametrize(("name", "most"), [("n", 65_536), ("best_of", 65_536)])
def test_a_number_of_samples_without_bound_is_refused(name: str, most: int) -> None:
    from cli_support import toy

    asked: dict[str, Any] = {name: 10**9}
    with pytest.raises(BadInput, match=f"{name} must be at most {most:,}, not 1,000,000,000"):
        toy().generate("ab", raw=True, temperature=1.0, **asked)
