"""A draft may hold a stop token and go on; a grammar need not know what would follow one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from outpace.acceptance.block import Block
from outpace.acceptance.rejection import RecursiveRejection
from outpace.acceptance.traversal import Traversal
from outpace.certify.exact import tiny_context
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.none import NoDraft
from outpace.methods.registry import build
from outpace.targets.table import TableTarget, random_table
from support import CHAIN, Q, distance, method, sampled_chain, whole_law

STOP = 2


class NothingAfterStop:
    """Bans every token once the stop token has come, as grammars do."""

    def begin(self, prompt: Seq[int]) -> bool:
        return False

    def advance(self, state: bool, token: int) -> bool:
        return state or token == STOP

    def process(self, state: bool, logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf) if state else logits


def request(made: Method, temperature: float = 1.0) -> Request:
    params = SamplingParams(temperature=temperature, processors=(NothingAfterStop(),))
    return Request((0, 1), made, params, max_new_tokens=3, stop_ids=frozenset([STOP]))


@pytest.mark.parametrize("rule", [RecursiveRejection(), Block(), Traversal()], ids=lambda rule: rule.name)
def test_answers_that_stop_inside_a_draft_have_plain_decodings_law(rule: RecursiveRejection) -> None:
    target = TableTarget(3, random_table(3, 4))
    drafted = method(sampled_chain(Q(random_table(3, 9, sharpness=1.0))), CHAIN, rule=rule, length=2)
    plain = Method("none", NoDraft(), RecursiveRejection(), Fixed(0))
    expected = whole_law(target, [request(plain)])
    assert any(path[0][-1:] == (STOP,) for path in expected)
    assert distance(whole_law(target, [request(drafted)]), expected) < 1e-6


def test_a_copied_stop_token_ends_the_answer() -> None:
    follow = {1: 0, 0: STOP, STOP: 1}
    target = TableTarget(3, lambda path: 9.0 * torch.nn.functional.one_hot(torch.tensor(follow[path[-1]]), 3).float())
    made = build("pld", tiny_context(3, 0), {"length": 4})
    decoder = Decoder(target)
    prompt = (1, 0, STOP, 1, 0, STOP, 1)
    params = SamplingParams(processors=(NothingAfterStop(),))
    generation = decoder.submit(Request(prompt, made, params, max_new_tokens=9, stop_ids=frozenset([STOP])))
    decoder.run()
    assert (generation.finish_reason, generation.tokens) == ("stop", [0])
    assert generation.metrics.accepted >= 2, "the stop token was drafted"


def test_a_dead_end_that_is_none_of_a_stop_token_still_ends_in_an_error() -> None:
    decoder = Decoder(TableTarget(3, random_table(3, 4)))
    made = build("none", tiny_context(3, 0))
    params = SamplingParams(
        temperature=1.0, logit_bias={0: -torch.inf, 1: -torch.inf}, processors=(NothingAfterStop(),)
    )
    generation = decoder.submit(Request((0, 1), made, params, max_new_tokens=4))
    decoder.run()
    assert generation.finish_reason == "error" and isinstance(generation.error, BadInput)
