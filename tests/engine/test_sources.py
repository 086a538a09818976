"""Who drafted each token: noted for requests that ask for it, down to the part of a combination."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from outpace.acceptance.default import default_rule
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.merged import Merge
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import TARGET, Generation, Request
from outpace.methods.combination.cascade import Cascade
from outpace.methods.registry import Context, build
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget, random_table

TABLE = random_table(6, 1)
PROMPT = (1, 2, 1, 2, 1)


def decoded(method: Method, *, sources: bool = True, temperature: float = 0.0, length: int = 12) -> Generation:
    decoder = Decoder(TableTarget(6, TABLE))
    params = SamplingParams(temperature=temperature, seed=3)
    found = decoder.submit(Request(PROMPT, method, params, length, trace=True, sources=sources))
    decoder.run()
    return found


def built(name: str, **settings: object) -> Method:
    return build(name, Context(TableTarget(6, TABLE)), settings)


GREEDY = tuple(decoded(built("none"), sources=False, length=40).tokens)


class Knows(Drafter[DraftState]):
    """Drafts the next ``count`` tokens of the greedy answer, of which the first ``right`` are right."""

    def __init__(self, count: int, right: int | None = None) -> None:
        self.count, self.right = count, count if right is None else right

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        at = len(state.sequence.tokens) - state.sequence.prompt_length
        tokens = [
            one if index < self.right else (one + 1) % 6 for index, one in enumerate(GREEDY[at : at + self.count])
        ]
        return TokenTree.chain(tokens[: budget.depth])


def names(drafter: Drafter[Any], length: int = 8) -> list[tuple[str, int]]:
    method = Method("mine", drafter, default_rule(drafter.proposal), Fixed(4))
    found = decoded(method, length=length)
    assert tuple(found.tokens) == GREEDY[:length]
    return [(one.name, one.round) for one in found.sources]


def test_a_round_gives_draft_tokens_and_one_of_the_target() -> None:
    assert names(Knows(2, 1), 5) == [("mine", 1), (TARGET, 1), ("mine", 2), (TARGET, 2), (TARGET, 3)]


def test_of_united_trees_each_token_has_the_first_part_that_drafted_it() -> None:
    short, long = Knows(1), Knows(3)
    assert names(Merge([short, long], ["short", "long"]), 4) == [("short", 1), ("long", 1), ("long", 1), (TARGET, 1)]
    assert {one for one, _ in names(Merge([long, short], ["long", "short"]))} == {"long", TARGET}


def test_parts_of_parts_are_named() -> None:
    inner = Cascade([Knows(0), Knows(2)], ["nothing", "inner"], 0.5)
    whole = Merge([Knows(1), inner], ["short", "cascade"])
    assert names(whole, 4)[:3] == [("short", 1), ("inner", 1), (TARGET, 1)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "method", [built("none"), built("pld"), built("merge", parts=("sam", "recycling")), built("cascade"), built("auto")]
)
def test_sources_agree_with_the_rounds(method: Method, temperature: float) -> None:
    found = decoded(method, temperature=temperature, length=60)
    expected: Seq[tuple[bool, int]] = [
        (at < len(one.path), number) for number, one in enumerate(found.rounds, 1) for at, _ in enumerate(one.committed)
    ]
    assert [(one.name != TARGET, one.round) for one in found.sources] == expected
    assert len(found.sources) == len(found.tokens) == 60
    drafted = {one.name for one in found.sources} - {TARGET}
    parts = {"merge": {"sam", "recycling"}, "cascade": {"sam", "recycling"}, "auto": {"sam"}, "none": set[str]()}
    assert drafted <= parts.get(method.name, {method.name})
    assert bool(drafted) == (method.name != "none")


def test_nothing_is_noted_for_requests_that_do_not_ask() -> None:
    assert decoded(built("pld"), sources=False).sources == []
