"""WithGrammar: any drafter, and for requests with a grammar the guesses of :class:`GrammarDrafter` beside its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.grammar_drafter import GrammarDrafter
from outpace.drafting.merged import NO_DRAFT, Merge, MergeState, contributed
from outpace.targets.base import Sequence


@dataclass(slots=True, kw_only=True)
class _State(MergeState):
    """``scored``: rounds in which each part's draft was in the tree that the target scored, by its name."""

    scored: Counter[str] = field(default_factory=Counter)


class WithGrammar(Merge):
    """``drafter`` drafts alone for requests without a grammar, and united with the grammar's guesses for others."""

    def __init__(self, drafter: Drafter[Any], name: str) -> None:
        super().__init__((drafter, GrammarDrafter()), (name, "grammar"))
        self.proposal = drafter.proposal

    def opened(self, sequence: Sequence, parts: list[Any]) -> MergeState:
        return _State(sequence, parts)

    def unite(self, trees: Seq[TokenTree], budget: Budget, *, greedy: bool) -> TokenTree:
        whole = super().unite(trees, budget, greedy=greedy)
        return whole if self.proposal.tree else _likeliest_path(whole)

    def propose_batch(self, states: Seq[MergeState], budgets: Seq[Budget]) -> list[TokenTree]:
        if any(state.sequence.sampler.grammar is not None for state in states):
            return super().propose_batch(states, budgets)
        trees = self.parts[0].propose_batch([state.parts[0] for state in states], budgets)
        for state, tree in zip(states, trees, strict=True):
            state.united, state.drafts = tree, (tree,)
        return trees

    def observe_batch(self, states: Seq[MergeState], verdicts: Seq[Verdict]) -> None:
        if all(state.sequence.sampler.grammar is None for state in states):
            self.parts[0].observe_batch([state.parts[0] for state in states], verdicts)
            for state in states:
                state.united, state.drafts = NO_DRAFT, ()
            return
        for state, verdict in zip(states, verdicts, strict=True):
            assert isinstance(state, _State)
            for name, tree in zip(self.names, state.drafts, strict=False):  # none where this drafter was not asked
                state.scored[name] += contributed(tree, verdict.scores.tree)
        super().observe_batch(states, verdicts)

    def rested(self, states: Seq[MergeState], verdicts: Seq[Verdict]) -> None:
        if any(state.sequence.sampler.grammar is not None for state in states):
            self.observe_batch(states, verdicts)
        else:
            self.parts[0].rested([state.parts[0] for state in states], verdicts)

    def drafting(self, state: MergeState) -> dict[str, int]:
        """Of a request with a grammar: nothing is counted of others."""
        assert isinstance(state, _State)
        return {name: state.scored[name] for name in self.names}


def _likeliest_path(tree: TokenTree) -> TokenTree:
    """The chain down the likeliest children: what a rule for chains can judge."""
    nodes: list[int] = []
    while children := tree.children(nodes[-1] if nodes else ROOT):
        nodes.append(max(children, key=tree.path_acceptance_probs.__getitem__))
    return tree if len(nodes) == len(tree) else tree.only(nodes)
