"""Beam search: transformers' own, token for token in float32; preempted, beside others, ended by texts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

import outpace
from dense_support import config, model_of
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.populations.beam_options import BeamOptions
from outpace.engine.request import Generation, Request
from outpace.methods.registry import Context, build
from outpace.model import Model
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import spec_if_known
from outpace.targets.hf import HFTarget
from outpace.targets.table import TableTarget
from support import NeverTwice, Pieces, Releasing

PROMPT = (5, 9, 17, 3, 21, 8)


def beams(target: Target, prompt: Seq[int], options: BeamOptions, **about: Any) -> Generation:
    decoder = Decoder(target)
    method = build("none", Context(target))
    about.setdefault("params", SamplingParams())
    generation = decoder.submit(Request(tuple(prompt), method, beams=options, **about))
    decoder.run()
    generation.raise_error()
    return generation


def theirs(
    model: Any, prompt: Seq[int], options: BeamOptions, most: int, stops: Seq[int], **about: Any
) -> list[tuple[tuple[int, ...], float]]:
    """The hypotheses of transformers' beam search, and their scores."""
    ids = torch.tensor([list(prompt)])
    model.generation_config.eos_token_id = list(stops) or None
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=options.num_beams,
            num_return_sequences=options.num_beams,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            max_new_tokens=most,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **about,
        )
    out = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        ends = [at for at, token in enumerate(row) if token in stops]
        out.append((tuple(row[: ends[0] + 1] if ends else row), score))
    return out


def same(mine: Generation, other: list[tuple[tuple[int, ...], float]]) -> None:
    assert [one.tokens for one in mine.hypotheses] == [tokens for tokens, _ in other]
    # transformers adds log-probabilities up in float32: of a sum of hundreds the last digits are a millionth of it.
    theirs = [score for _, score in other]
    assert [one.score for one in mine.hypotheses] == pytest.approx(theirs, rel=2e-6, abs=2e-4)


CASES: dict[str, tuple[BeamOptions, list[int], dict[str, Any]]] = {
    "four beams": (BeamOptions(4), [2], {}),
    "three beams, long ones first": (BeamOptions(3, length_penalty=2.0), [2, 7], {}),
    "short ones first": (BeamOptions(3, length_penalty=-1.0), [2, 7], {}),
    "no penalty, never": (BeamOptions(4, 0.0, "never"), [2, 7, 11], {}),
    "long ones first, never": (BeamOptions(2, 1.5, "never"), [2, 7, 11], {}),
    "early": (BeamOptions(4, early_stopping=True), [2, 7, 11, 30], {}),
    "without an end": (BeamOptions(5), [], {}),
    "repetition penalty": (BeamOptions(3), [2], {"repetition_penalty": 1.3}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["dense", "hf"])
def test_the_hypotheses_are_those_of_transformers(kind: str, case: str) -> None:
    options, stops, about = CASES[case]
    model = model_of(config(vocab_size=64), seed=3)
    spec = spec_if_known(model)
    assert spec is not None
    target: Target = DenseTarget(spec, "float32") if kind == "dense" else HFTarget(model)
    for start in range(3):
        prompt = PROMPT[start:]
        mine = beams(
            target, prompt, options, max_new_tokens=14, stop_ids=frozenset(stops), params=SamplingParams(**about)
        )
        same(mine, theirs(model, prompt, options, 14, stops, **about))


@pytest.mark.slow
def test_the_embedded_model_gives_the_beams_of_transformers() -> None:
    generic = outpace.load("smollm2", dtype="float32", device="cpu", target="generic")
    fast = outpace.load("smollm2", dtype="float32", device="cpu")
    assert isinstance(generic.target, HFTarget)
    for text in ("Why is the sky blue?", "Name three colors."):
        prompt = fast.tokenizer.chat([{"role": "user", "content": text}])
        options = BeamOptions(4)
        expected = theirs(generic.target.model, prompt, options, 24, sorted(fast.eos_ids))
        same(beams(fast.target, prompt, options, max_new_tokens=24, stop_ids=fast.eos_ids), expected)


def test_one_beam_is_the_greedy_answer() -> None:
    target = TableTarget(12, seed=3)
    decoder = Decoder(target)
    greedy = decoder.submit(Request((1, 2, 3), build("none", Context(target)), max_new_tokens=9))
    decoder.run()
    found = beams(target, (1, 2, 3), BeamOptions(1), max_new_tokens=9)
    assert found.tokens == greedy.tokens


def test_beams_beside_other_requests_change_nothing() -> None:
    target = TableTarget(12, seed=3)
    method = build("pld", Context(target))
    alone = beams(target, (1, 2, 3), BeamOptions(3), max_new_tokens=9)
    decoder = Decoder(target)
    other = decoder.submit(Request((1, 2, 1, 2, 1), method, max_new_tokens=20))
    decoder.run()
    both = Decoder(target)
    first = both.submit(Request((1, 2, 1, 2, 1), method, max_new_tokens=20))
    group = both.submit(Request((1, 2, 3), build("none", Context(target)), max_new_tokens=9, beams=BeamOptions(3)))
    both.run()
    assert first.tokens == other.tokens
    assert group.hypotheses == alone.hypotheses


def test_a_round_scores_beams_and_other_requests_in_one_forward() -> None:
    batches: list[int] = []

    class Counting(TableTarget):
        def score(self, batch: Any, *about: Any, **more: Any) -> Any:
            batches.append(len(batch))
            return super().score(batch, *about, **more)

    target = Counting(12, seed=3)
    decoder = Decoder(target)
    method = build("none", Context(target))
    decoder.submit(Request((1, 2, 1), method, max_new_tokens=6))
    decoder.submit(Request((1, 2, 3), method, max_new_tokens=6, beams=BeamOptions(3)))
    decoder.run()
    assert batches == [2, 4, 4, 4, 4, 4]


def test_beams_that_were_preempted_go_on_where_they_stopped() -> None:
    target = TableTarget(12, seed=3)
    whole = beams(target, (1, 2, 3), BeamOptions(3), max_new_tokens=9)
    decoder = Decoder(target)
    method = build("none", Context(target))
    one = decoder.submit(Request((1, 2, 3), method, max_new_tokens=9, beams=BeamOptions(3)))
    for _ in range(4):
        decoder.step()
    decoder.preempt(one)
    assert one.group is not None
    assert not one.group.sequences
    decoder.resume(one)
    decoder.run()
    assert one.hypotheses == whole.hypotheses


def test_all_k_v_is_released_at_the_end_and_when_a_request_is_cancelled() -> None:
    target = Releasing(12, seed=3)
    beams(target, (1, 2, 3), BeamOptions(3), max_new_tokens=9)
    assert not target.held
    decoder = Decoder(target)
    one = decoder.submit(Request((1, 2, 3), build("none", Context(target)), max_new_tokens=9, beams=BeamOptions(3)))
    decoder.step()
    one.cancel()
    decoder.run()
    assert not target.held
    assert one.finish_reason == "cancelled"


def test_a_stop_string_ends_a_beam() -> None:
    target = TableTarget(3, seed=4)
    tokenizer = Pieces([b"a", b"b", b"c"])
    method = build("none", Context(target))

    def found(*stops: str) -> Generation:
        decoder = Decoder(target, tokenizer)
        one = decoder.submit(Request((1, 2), method, max_new_tokens=8, beams=BeamOptions(2), stop_strings=stops))
        decoder.run()
        return one

    free = found()
    stop = free.text[2:4]
    ended = found(stop)
    assert stop not in ended.text
    assert any(one.finish_reason == "stop" for one in ended.hypotheses)


def test_processors_see_every_beam_s_own_tokens() -> None:
    target = TableTarget(9, seed=4)
    found = beams(target, (1, 2), BeamOptions(3), max_new_tokens=6, params=SamplingParams(processors=(NeverTwice(),)))
    for one in found.hypotheses:
        assert len(set(one.tokens)) == len(one.tokens)


def test_what_no_group_can_honour_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.certify.toy_grammar import Brackets
    from outpace.core import machine

    target = TableTarget(3, seed=4)
    request = Request((1, 2), build("none", Context(target)), max_new_tokens=6, beams=BeamOptions(2))
    decoder = Decoder(target)
    for changed, said in (
        (replace(request, params=SamplingParams(constraint=Brackets())), "a grammar holds one answer"),
        (replace(request, params=SamplingParams(logprobs=True)), "log-probabilities of tokens are not recorded"),
        (replace(request, trace=True), "tree of one sequence"),
        (replace(request, keep=True), "a conversation continues one answer"),
        (replace(request, method=build("pld", Context(target))), "'pld' drafts for one sequence, not for 2 beams"),
        (replace(request, params=SamplingParams(logit_bias={t: -float("inf") for t in range(3)})), "no token can"),
    ):
        with pytest.raises(BadInput, match=said):
            one = decoder.submit(changed)
            decoder.run()
            one.raise_error()
    for penalty in (1000.0, -1000.0):
        for early in (False, "never"):
            beams = BeamOptions(2, length_penalty=penalty, early_stopping=early)
            with pytest.raises(BadInput, match=r"length_penalty .* no score that is a number; it must be between -"):
                decoder.submit(replace(request, beams=beams))
    monkeypatch.setattr(machine, "free_memory", lambda: 100)
    target.kv_bytes_per_token = 10
    with pytest.raises(BadInput, match=r"2 beams of 8 tokens need .* MiB of K/V"):
        decoder.submit(request)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"num_beams": 0}, "num_beams must be between 1"),
        ({"num_beams": 2.5}, "num_beams must be a whole number"),
        ({"num_beams": 2, "length_penalty": "x"}, "length_penalty must be a number"),
        ({"num_beams": 2, "early_stopping": "later"}, "early_stopping must be True, False"),
        ({"num_beams": 2, "early_stopping": 1}, "early_stopping must be True, False"),
    ],
)
def test_options_out_of_range_are_refused(about: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        BeamOptions(**about)


def test_a_real_model_s_beams_are_at_least_as_likely_as_its_greedy_answer(smollm2: Model) -> None:
    prompt = "Name a color."
    greedy = smollm2.generate(prompt, max_new_tokens=12, logprobs=True)
    best = smollm2.generate(prompt, max_new_tokens=12, num_beams=3, length_penalty=0.0)
    likely = sum(one.logprob for one in greedy.logprobs)
    assert best.population[0].log_weight >= likely - 0.5  # rounding of bfloat16
    assert best.text == best.population[0].text
