"""WithGrammar: any drafter, and for requests with a grammar the guesses of :class:`GrammarDrafter` beside its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from outpace.controllers.base import Budget
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.grammar_drafter import GrammarDrafter
from outpace.drafting.merged import Merge, MergeState


class WithGrammar(Merge):
    """``drafter`` drafts alone for requests without a grammar, and united with the grammar's guesses for others."""

    def __init__(self, drafter: Drafter[Any], name: str) -> None:
        super().__init__((drafter, GrammarDrafter()), (name, "grammar"))
        self.proposal = drafter.proposal

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


def _likeliest_path(tree: TokenTree) -> TokenTree:
    """The chain down the likeliest children: what a rule for chains can judge."""
    nodes: list[int] = []
    while children := tree.children(nodes[-1] if nodes else ROOT):
        nodes.append(max(children, key=tree.path_acceptance_probs.__getitem__))
    return tree if len(nodes) == len(tree) else tree.only(nodes)
