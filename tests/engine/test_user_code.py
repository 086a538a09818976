"""A user's processor or tokenizer that misbehaves ends its own request in words; the requests beside it go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Seq
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from certify_cases import Case, cases
from outpace.acceptance.traversal import Traversal
from outpace.api.result import result
from outpace.certify.exact import tiny_context
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.text import Tokenizer
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods.registry import build
from outpace.targets.table import TableTarget, random_table
from support import (
    BYTES,
    Q,
    Releasing,
    autoregressive_distribution,
    both,
    certain_tree,
    distance,
    method,
    sampled_chain,
    whole_law,
)

VOCAB = 5


class Counting:
    """Changes nothing, and counts the tokens of the answer."""

    def begin(self, prompt: Seq[int]) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def process(self, state: int, logits: Tensor) -> Tensor:
        return logits.clone()


Answer = Callable[[Tensor], Any]


def _raise(logits: Tensor) -> Tensor:
    raise KeyError("no such\nstate")


PROCESS: dict[str, tuple[Answer, str]] = {
    "raises": (_raise, r"raised KeyError in process: 'no such\\nstate'"),
    "None": (lambda logits: None, "returned NoneType"),
    "an array": (lambda logits: logits.numpy(), "returned ndarray"),
    "short": (lambda logits: logits[1:], rf"shape \({VOCAB - 1},\).*\({VOCAB},\)"),
    "long": (lambda logits: torch.cat([logits, logits]), rf"shape \({2 * VOCAB},\)"),
    "a matrix": (lambda logits: logits[None], rf"shape \(1, {VOCAB}\)"),
    "doubles": (lambda logits: logits.double(), "torch.float64"),
    "whole numbers": (lambda logits: logits.long(), "torch.int64"),
    "NaN": (lambda logits: logits * torch.nan, "NaN"),
    "infinite": (lambda logits: logits + torch.inf, "infinite"),
    "nothing": (lambda logits: torch.full_like(logits, -torch.inf), "bans every token"),
    "sparse": (lambda logits: logits.to_sparse(), "sparse"),
}


class Misbehaving(Counting):
    """Misbehaves once ``at`` tokens have come."""

    def __init__(self, how: str, at: int) -> None:
        self.how, self.at = how, at

    def advance(self, state: int, token: int) -> int:
        if self.how == "advance" and state + 1 == self.at:
            raise RuntimeError("stuck")
        return state + 1

    def process(self, state: int, logits: Tensor) -> Tensor:
        if self.how != "advance" and state == self.at:
            return PROCESS[self.how][0](logits)  # type: ignore[no-any-return]
        return logits.clone()


WORDS = {how: words for how, (_, words) in PROCESS.items()} | {"advance": "raised RuntimeError in advance: stuck"}


def decoded(requests: Seq[Request], tokenizer: Tokenizer | None = None, seed: int = 3) -> list[Generation]:
    """The requests as one batch; nothing of them stays open."""
    target = Releasing(VOCAB, seed=seed)
    decoder = Decoder(target, tokenizer)
    running = [decoder.submit(request) for request in requests]
    decoder.run()
    assert not target.held
    return running


def toys() -> dict[str, Method]:
    """Drafters whose trees are judged deep below the root, by rules that look at one node and at all."""
    q = Q(random_table(VOCAB, 9, sharpness=0.3))
    return {
        "none": method(None),
        "chain": method(sampled_chain(q), length=4),
        "tree": method(both(sampled_chain(q), certain_tree(1, VOCAB)), length=3),
        "leaves first": method(both(sampled_chain(q), certain_tree(1, VOCAB)), rule=Traversal(), length=3),
    }


# Before a first token nothing advances.
@pytest.mark.parametrize(("how", "at"), [one for one in product(WORDS, (0, 1, 4)) if one != ("advance", 0)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafting", toys())
def test_a_processor_ends_its_own_request(how: str, at: int, temperature: float, drafting: str) -> None:
    params = SamplingParams(temperature, seed=7, processors=(Counting(),), logprobs=True, top_logprobs=2)
    good = Request((1, 2), toys()[drafting], params, max_new_tokens=9)
    bad = dataclasses.replace(params, processors=(Counting(), Misbehaving(how, at)))
    requests = [good, dataclasses.replace(good, params=bad), dataclasses.replace(good, prompt=(3,))]
    before, failed, after = decoded(requests)
    for one in (before, after):
        [alone] = decoded([one.request])
        assert (one.finish_reason, one.tokens, one.logprobs) == ("length", alone.tokens, alone.logprobs)
    assert failed.finish_reason == "error"
    assert len(failed.tokens) == at, "what came before the failure stays"
    if temperature == 0.0 or drafting != "leaves first":  # a rule that begins at the leaves looks at what stands there
        assert failed.tokens == before.tokens[:at]
    assert [entry.token for entry in failed.logprobs] == failed.tokens
    with pytest.raises(BadInput, match=WORDS[how]) as caught:
        result(failed)
    assert "logits processor 'Misbehaving' (2nd of 2)" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.label)
def test_under_every_method_the_others_go_on(case: Case) -> None:
    """Drafters read the processed distribution at the nodes of their own drafts: there it fails, too."""
    for how in ("raises", "None", "nothing", "advance"):
        for temperature in (0.0, 1.0):
            context = tiny_context(VOCAB, 0)
            made = build(case.name, context, case.settings, case.rule)
            params = SamplingParams(temperature, seed=5, processors=(Counting(),))
            good = Request((0, 1), made, params, max_new_tokens=6)
            bad = dataclasses.replace(params, processors=(Misbehaving(how, 2),))
            decoder = Decoder(context.target)
            running = [decoder.submit(one) for one in (good, dataclasses.replace(good, params=bad), good)]
            decoder.run()
            assert [one.finish_reason for one in running] == ["length", "error", "length"]
            with pytest.raises(BadInput, match=WORDS[how]):
                result(running[1])
            if temperature == 0.0:
                assert running[0].tokens == running[2].tokens
                assert running[1].tokens == running[0].tokens[:2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_fails_behind_a_rejected_draft_token_is_no_error(temperature: float) -> None:
    """Autoregressive decoding would never have asked there."""

    class Strict(Counting):
        """Allows the answer 1 2 1 2 ... alone, and knows no other."""

        def advance(self, state: int, token: int) -> int:
            if token != 1 + state % 2:
                raise ValueError(f"token {token} is not allowed")
            return state + 1

        def process(self, state: int, logits: Tensor) -> Tensor:
            row = torch.full_like(logits, -torch.inf)
            row[1 + state % 2] = 0.0
            return row

    params = SamplingParams(temperature, processors=(Strict(),))
    for made in toys().values():
        [generation] = decoded([Request((0,), made, params, max_new_tokens=6)])
        assert (generation.finish_reason, generation.tokens) == ("length", [1, 2, 1, 2, 1, 2])


def test_what_comes_before_a_failure_has_autoregressive_decodings_distribution() -> None:
    table, params = random_table(3, 4), SamplingParams(1.0, processors=(Misbehaving("nothing", 2),))
    q = Q(random_table(3, 9, sharpness=1.0))
    made = method(both(sampled_chain(q), certain_tree(1, 3, nodes=2)), rule=Traversal(), length=3)
    found = whole_law(TableTarget(3, table), [Request((0, 1), made, params, max_new_tokens=4)])
    expected = autoregressive_distribution(table, SamplingParams(1.0), (0, 1), 2)
    assert distance({tokens: weight for (tokens,), weight in found.items()}, expected) < 1e-6


def test_what_fails_behind_the_last_token_is_no_error() -> None:
    params = SamplingParams(processors=(Misbehaving("advance", 4),))
    for made in toys().values():
        [generation] = decoded([Request((0,), made, params, max_new_tokens=4)])
        assert (generation.finish_reason, len(generation.tokens)) == ("length", 4)


def test_a_processor_that_cannot_begin_is_refused_and_holds_nothing() -> None:
    class Late(Counting):
        def begin(self, prompt: Seq[int]) -> int:
            raise OSError("no grammar\nthere")

    target = Releasing(VOCAB, seed=3)
    decoder = Decoder(target)
    beside = decoder.submit(Request((1,), method(None), max_new_tokens=3))
    with pytest.raises(BadInput, match="logits processor 'Late' raised OSError in begin: no grammar there"):
        decoder.submit(Request((1,), method(None), SamplingParams(processors=(Late(),)), max_new_tokens=3))
    decoder.run()
    assert len(beside.tokens) == 3
    assert not target.held


def test_a_request_that_fails_is_not_kept() -> None:
    """Its K/V would be that of an answer that nobody has."""
    params = SamplingParams(processors=(Misbehaving("raises", 2),))
    decoded([Request((1,), method(None), params, max_new_tokens=9, keep=True)])


def test_ctrl_c_in_a_processor_is_no_error_of_the_request() -> None:
    class Pressed(Counting):
        def process(self, state: int, logits: Tensor) -> Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoded([Request((1,), method(None), SamplingParams(processors=(Pressed(),)))])


class Torn:
    """A tokenizer that cannot decode token 2."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def decode(self, ids: Seq[int]) -> str:
        return self.answer() if 2 in ids else BYTES.decode([65 + token for token in ids])


def _broken() -> str:
    raise LookupError("token 2\nis unknown")


@pytest.mark.parametrize(
    ("answer", "words"), [(_broken, "raised LookupError: token 2 is unknown"), (lambda: None, "returned NoneType")]
)
def test_a_tokenizer_that_cannot_decode_ends_the_requests_whose_text_it_lacks(
    answer: Callable[[], Any], words: str
) -> None:
    bias = {token: 50.0 if token == 1 else 0.0 for token in range(VOCAB)}
    good = Request((1,), method(None), SamplingParams(logit_bias=bias), max_new_tokens=4)
    bad = dataclasses.replace(good, params=SamplingParams(logit_bias={2: 50.0}))
    before, failed, after = decoded([good, bad, good], Torn(answer))
    assert before.text == after.text == "BBBB"
    assert (failed.finish_reason, failed.text) == ("error", "")
    with pytest.raises(BadInput, match=f"the tokenizer cannot decode the answer: it {words}"):
        result(failed)
