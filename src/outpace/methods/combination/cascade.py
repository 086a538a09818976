"""A cascade of drafters: the first that is confident drafts.

``cascade`` asks its parts in order, the sharp and narrow ones first: a long match of the suffix automaton where there
is one, a table of successors for the rest. Retrieval with a fallback to another drafter is how SAM decoding (Hu et al.
2024, arXiv 2411.10666) works; here any methods will do.

A deterministic draft is confident when its likeliest first token is: its probability is how often such a token was
accepted. A sampled draft is taken whenever there is one: were it left out for what was sampled, what is sampled in the
end would not have the distribution that the rule tests it with.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from pydantic import Field

from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.combination import CombinedState, OneAtATime
from outpace.methods.combination.parts import CombinationSettings, build_parts
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence


class Cascade(OneAtATime[CombinedState]):
    """Parts in order; ``confidence`` in [0, 1] is asked of all but the last, which drafts what it has."""

    def __init__(self, parts: Seq[Drafter[Any]], names: Seq[str], confidence: float) -> None:
        super().__init__(parts, names)
        self.confidence = confidence

    def opened(self, sequence: Sequence, parts: list[Any]) -> CombinedState:
        return CombinedState(sequence, parts)

    def propose_batch(self, states: Seq[CombinedState], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = [TokenTree() for _ in states]
        left = list(range(len(states)))
        for state in states:
            state.drafting = None
        for index, part in enumerate(self.parts):
            asked = self.ask(index, [states[at] for at in left], [budgets[at] for at in left])
            last, waiting = index == len(self.parts) - 1, []
            for at, tree in zip(left, asked, strict=True):
                if len(tree) and (last or self._confident(part, tree, states[at].sequence)):
                    trees[at] = tree
                    states[at].drafting = index
                    states[at].rounds[self.names[index]] += 1
                else:
                    waiting.append(at)
            left = waiting
            if not left:
                break
        return trees

    def _confident(self, part: Drafter[Any], tree: TokenTree, sequence: Sequence) -> bool:
        if part.proposal.sampled and not sequence.params.greedy:
            return True
        return max(tree.path_acceptance_probs) >= self.confidence


class CascadeSettings(CombinationSettings):
    """Settings of ``cascade``."""

    parts: tuple[str, ...] = Field(
        ("sam", "recycling"),
        min_length=1,
        max_length=16,
        description="names of methods, in the order in which they are asked",
    )
    confidence: float = Field(
        0.15,
        ge=0.0,
        le=1.0,
        description="a deterministic draft is used if the acceptance rate of its first token is at least this",
    )


@register(
    "cascade",
    family="combination",
    paper="Hu et al. 2024, arXiv 2411.10666",
    summary="Asks several drafters in order; the first one that is confident drafts.",
    when_to_use="A precise part that drafts rarely, followed by one that always drafts. Not for parts that "
    "predict the same tokens.",
    tiny={
        "parts": ("pld", "draft-model"),
        "settings": {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 2}},
        "confidence": 0.3,
    },
)
def build(context: Context, settings: CascadeSettings) -> Parts:
    """A cascade of the parts."""
    built = build_parts(context, settings)
    drafter = Cascade(built.drafters, built.names, settings.confidence)
    return Parts(drafter, CombinedController(built.controllers))
