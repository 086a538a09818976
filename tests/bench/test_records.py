"""Several requests at once: every place stays taken, time is divided, nothing stays open in the target."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.acceptance.greedy import Greedy
from outpace.bench.records import Record, answer_together
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.metrics import PHASES
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.none import NoDraft
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget
from support import Releasing

NONE = Method("none", NoDraft(), Greedy(), Fixed(0))
LENGTHS = [9, 4, 12, 6, 3, 8]


class Watched(Releasing):
    """Notes how many sequences each forward scores; fails at forward ``fail_at``."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(16, seed=3, context_length=200)
        self.sizes: list[int] = []
        self.fail_at = fail_at

    def score(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.sizes.append(len(batch))
        if len(self.sizes) == self.fail_at:
            raise RuntimeError("the kernel failed")
        return super().score(batch, *args, **kwargs)


def requests(lengths: list[int]) -> list[Request]:
    greedy = SamplingParams(temperature=0)
    return [
        Request(prompt=(1, 2, number), method=NONE, params=greedy, max_new_tokens=length)
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("at_once", [1, 2, 4, 9])
def test_every_forward_has_as_many_requests_as_were_asked_for(at_once: int) -> None:
    target = Watched()
    found = answer_together(target, requests(LENGTHS), at_once)
    assert [len(answer.tokens) for answer in found] == LENGTHS, "in the order of the requests, each counted once"
    assert set(target.sizes) == {at_once}
    assert not target.held


def test_answers_are_those_of_requests_alone() -> None:
    together = answer_together(Watched(), requests(LENGTHS), 3)
    alone = [answer_together(Watched(), [one])[0] for one in requests(LENGTHS)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_each_request_has_its_share_of_the_time() -> None:
    for answer in answer_together(Watched(), requests(LENGTHS), 2):
        metrics = answer.metrics
        assert 0 < metrics.first_token_seconds <= metrics.seconds
        assert answer.ttft >= metrics.first_token_seconds * 0.5  # what a user waits is not divided by two
        assert 0 < sum(metrics.phase_seconds[phase] for phase in PHASES) <= metrics.seconds * (1 + 1e-9)


class Stumbling:
    """A processor that fails after two tokens where the prompt ends with ``number``."""

    def __init__(self, number: int) -> None:
        self.number = number

    def begin(self, prompt: Any) -> int:
        return 0 if prompt[-1] == self.number else -100

    def advance(self, state: int, token: int) -> int:
        return state + 1

    def process(self, state: int, logits: Any) -> Any:
        if state == 2:
            raise ValueError("no such rule")
        return logits.clone()


@pytest.mark.parametrize("at_once", [1, 2, 6])
def test_a_request_that_fails_alone_costs_the_others_nothing_where_its_error_is_kept(at_once: int) -> None:
    target = Watched()
    params = SamplingParams(temperature=0, processors=(Stumbling(3),))
    asked = [replace(one, params=params) for one in requests(LENGTHS)]
    found = answer_together(target, asked, at_once, keep_failed=True)
    assert [at for at, one in enumerate(found) if one.error is not None] == [3]
    assert "no such rule" in (found[3].error or "")
    assert [len(one.tokens) for one in found if one.error is None] == [9, 4, 12, 3, 8]
    assert not target.held
    with pytest.raises(BadInput, match="no such rule"):
        answer_together(target, asked, at_once)


@pytest.mark.parametrize("fail_at", [1, 3, 7])
def test_nothing_stays_open_when_a_forward_fails(fail_at: int) -> None:
    target = Watched(fail_at)
    with pytest.raises(RuntimeError, match="the kernel failed"):
        answer_together(target, requests(LENGTHS), 2)
    assert not target.held


class Certain(Drafter[DraftState]):
    """Drafts what a target that counts says."""

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        last = state.sequence.tokens[-1]
        return TokenTree.chain([(last + 1 + more) % 16 for more in range(budget.depth)])


def test_tokens_of_the_first_round_are_not_free() -> None:
    """Their time is that to the first token, in which the prompt is read."""
    target = TableTarget(16, lambda path: torch.nn.functional.one_hot(torch.tensor((path[-1] + 1) % 16), 16) * 9.0)
    method = Method("certain", Certain(), Greedy(), Fixed(4))
    [found] = answer_together(target, [Request((1,), method, SamplingParams(), 13)])
    record = Record("one", "chat", answers=[found])
    assert found.tokens == tuple(token % 16 for token in range(2, 15))
    assert (found.metrics.first_tokens, record.decode_rate[0]) == (5, 8)
    [short] = answer_together(target, [Request((1,), method, SamplingParams(), 3)])
    assert Record("one", "chat", answers=[short]).decode_rate == (0, 0.0)
    [plain] = answer_together(target, [Request((1,), NONE, SamplingParams(), 13)])
    assert Record("one", "chat", answers=[plain]).decode_rate[0] == 12
