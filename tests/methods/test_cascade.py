"""A cascade: the first part that is confident drafts, and what was sampled never decides who does."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.acceptance.default import default_rule
from outpace.certify.exact import certify_exact, tiny_context
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.controllers.fixed import Fixed
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.model_drafter import DraftModel
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.combination.cascade import Cascade
from outpace.methods.registry import Context, build
from outpace.targets.base import Scores, Sequence, Target
from outpace.targets.table import TableTarget
from test_combined import FEW, Witness


def drafted(confidence: float, *path_acceptance_probs: float) -> list[int]:
    """Which of several parts, each with another token, drafts."""
    parts = [
        Witness(token, path_acceptance_prob=path_acceptance_prob)
        for token, path_acceptance_prob in enumerate(path_acceptance_probs)
    ]
    cascade = Cascade(parts, [str(part.token) for part in parts], confidence)
    return cascade.propose_batch([cascade.begin(TableTarget(9).sequence([0]))], [Budget(1)])[0].tokens


def test_the_first_confident_part_drafts() -> None:
    assert drafted(0.5, 0.4, 0.6, 0.9) == [1]
    assert drafted(0.0, 0.4, 0.6, 0.9) == [0]
    assert drafted(0.7, 0.4, 0.6, 0.9) == [2]
    assert drafted(0.95, 0.4, 0.6, 0.9) == [2], "the last part has nobody behind it"
    assert drafted(0.5, 0.5) == [0]


def test_only_those_left_over_are_asked_again() -> None:
    class Odd(Witness):
        def propose_batch(self, states: Any, budgets: Any) -> list[TokenTree]:
            trees = super().propose_batch(states, budgets)
            return [
                tree if state.sequence.tokens[-1] % 2 else TokenTree()
                for state, tree in zip(states, trees, strict=True)
            ]

    one, two = Odd(7), Witness(8)
    sequences = [TableTarget(9).sequence([last]) for last in range(4)]
    cascade = Cascade([one, two], ["one", "two"], 0.5)
    trees = cascade.propose_batch([cascade.begin(sequence) for sequence in sequences], [Budget(1)] * 4)
    assert [tree.tokens for tree in trees] == [[8], [7], [8], [7]]
    assert two.seen == ["begin"] * 4 + [("propose", [1, 1])]


def test_only_the_drafting_parts_pass_is_handed_to_the_target() -> None:
    class Passing(Witness):
        def reusable_forward(self, states: Any) -> Scores | None:
            return Scores([], self.token)

    cascade = Cascade([Passing(0, path_acceptance_prob=0.1), Passing(1)], ["a", "b"], 0.5)
    state = cascade.begin(TableTarget(9).sequence([0]))
    assert cascade.reusable_forward([state]) is None
    cascade.propose_batch([state], [Budget(1)])
    start = cascade.reusable_forward([state])
    assert start is not None and start.forward_state == 1
    cascade.propose_batch([state], [Budget(0)])
    assert cascade.reusable_forward([state]) is None


# ---------------------------------------------------------------------------------------------------------- law

COMBINATIONS: list[dict[str, Any]] = [
    {
        "parts": ("pld", "draft-model"),
        "settings": {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 2}},
    },
    {"parts": ("draft-model", "pld"), "settings": {"draft-model": {"num_draft_tokens": 2, "confidence": 0.5}}},
    {
        "parts": ("sam", "rsd"),
        "settings": {"rsd": {"branching": (2,)}, "sam": {"num_draft_tokens": 2}},
        "confidence": 0.6,
    },
    {"parts": ("rsd", "sampled-tree"), "settings": {"rsd": {"branching": (2,)}}},
]


@pytest.mark.parametrize("settings", COMBINATIONS, ids=lambda one: "+".join(one["parts"]))
def test_exact_with_parts_of_every_kind(settings: dict[str, Any]) -> None:
    certificate = certify_exact("cascade", lambda context: build("cascade", context, settings), FEW)
    assert certificate.lossless, certificate.verdict


class Choosy(Cascade):
    """The planted bug: a sampled draft is taken only when it is likely."""

    def _confident(self, part: Any, tree: TokenTree, sequence: Sequence) -> bool:
        return tree.tokens[0] == 0


def test_choosing_by_what_was_sampled_is_caught() -> None:
    def make(kind: type[Cascade]) -> Any:
        def method(context: Context) -> Method:
            drafts: list[Target] = [context.draft(), context.draft()]
            cascade = kind([DraftModel(draft) for draft in drafts], ["a", "b"], 0.5)
            controller = CombinedController([Fixed(1), Fixed(1)])
            return Method("toy", cascade, default_rule(cascade.proposal), controller)

        return method

    assert certify_exact("cascade", make(Cascade), FEW[:1]).lossless
    assert certify_exact("choosy", make(Choosy), FEW[:1]).lossless is False


def test_confidence_comes_from_what_became_of_earlier_drafts() -> None:
    """On text that never repeats itself the way the automaton expects, the cascade turns to its second part."""
    context = tiny_context(6, 11)
    settings = {
        "parts": ("pld", "draft-model"),
        "settings": {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 1}},
    }
    lengths = {}
    for confidence in (0.0, 0.9):
        method = build("cascade", context, {**settings, "confidence": confidence})
        decoder = Decoder(context.target)
        request = Request((0, 1, 0, 2, 0, 3), method, SamplingParams(temperature=1.0), max_new_tokens=40, trace=True)
        generation = decoder.submit(request)
        decoder.run()
        lengths[confidence] = [len(one.tree) for one in generation.rounds]
    assert max(lengths[0.0]) == 2, "without a threshold copying drafts wherever it can"
    assert max(lengths[0.9]) == 1, "with a high one it never does"
