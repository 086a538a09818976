"""Self-speculative drafting: the target drafts for itself, through a part of itself.

The committed K/V is the request's own, read and never written: a drafter of this kind keeps none. A draft pass runs a
:class:`~outpace.targets.base.SubGraph` level by level; the verifying forward takes it up where it first left the full
model (:meth:`SelfDraft.reusable_forward`), so that the layers below are run once for both.

A chain goes on while the sub-graph's largest probability reaches a threshold, which the method sets. A token
is still drawn from the first row below it, since that row has been run; the forward after it is saved. So the decision
never depends on what was drawn.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.tree_builder import ChainBuilder, TreeBuilder, build_together
from outpace.targets.base import Scores, Target
from outpace.targets.sub_graph import SubGraph

if TYPE_CHECKING:
    from torch import Tensor


class ConfidentChainBuilder(ChainBuilder):
    """A chain that ends with the first token whose row has a largest probability below ``budget.confidence``."""

    def grow(self, logits: Tensor) -> bool:
        distribution, node = self._distribution(logits), len(self._drafted) - 1
        if distribution.dead_end(node) or not self.budget.wants(self._depth + 1):
            return False
        confidence = self._confidence(distribution, node)  # of the row, whatever is drawn from it
        last = len(self._chain) - 1
        goes_on = self._policy_draws(distribution, node, last, last - 1, self._depth + 1)
        self._draw(distribution, node)
        return goes_on and self.budget.wants(self._depth + 1, confidence) and self._run_last()


@dataclass(slots=True)
class DraftPass:
    """The last draft of one request: ``tree`` as proposed when it had ``at`` tokens, part ``index`` of ``scores``."""

    at: int
    tree: TokenTree
    scores: Scores
    index: int
    first_difference: int


@dataclass(slots=True)
class SelfDraftState(DraftState):
    """What every self-drafter keeps of one request: this round's draft pass, if there was one."""

    last: DraftPass | None = field(default=None, init=False)


S = TypeVar("S", bound=SelfDraftState)


class SelfDraft(Drafter[S]):
    """Drafts through sub-graphs of ``target``, which is the requests' own: chains, where nothing else is said."""

    proposal = Proposal(sampled=True, shares_noise=True)
    needs_target_internals = True
    asks_policy = True

    def __init__(self, target: Target) -> None:
        self.target = target

    @abstractmethod
    def plan(self, state: S, budget: Budget) -> tuple[SubGraph, Budget]:
        """The part of the target that drafts this round, and how far. Must depend on counts, never on clocks."""

    def builder(self, state: S, budget: Budget) -> TreeBuilder:
        """Starts one draft. The first nodes of its proposal must be those that it has run, in their order."""
        return ConfidentChainBuilder(state.sequence, budget, self.chance(state.sequence))

    def learn(self, state: S, verdict: Verdict, drafted: DraftPass | None) -> None:
        """A round was judged; ``drafted`` is what was proposed in it, if anything was."""

    def propose_batch(self, states: Seq[S], budgets: Seq[Budget]) -> list[TokenTree]:
        groups: dict[Hashable, tuple[SubGraph, list[tuple[S, TreeBuilder]]]] = {}
        builders: list[TreeBuilder | None] = []
        for state, whole in zip(states, budgets, strict=True):
            state.last = None
            graph, budget = self.plan(state, whole)
            builders.append(None)
            if budget.depth > 0 and budget.max_nodes > 0:
                builder = builders[-1] = self.builder(state, budget)
                key = graph.start, graph.stop, graph.skip_attention, graph.skip_mlp
                groups.setdefault(key, (graph, []))[1].append((state, builder))
        for graph, members in groups.values():
            self._run(graph, members)
        return [TokenTree() if builder is None else builder.proposal() for builder in builders]

    def _run(self, graph: SubGraph, members: Seq[tuple[S, TreeBuilder]]) -> None:
        boundary = graph.first_difference(self.target.num_layers)
        # The verifying forward will be asked for these too.
        lower = [layer for layer in self.aux_hidden_state_layers if layer <= boundary]
        sequences, builders = [state.sequence for state, _ in members], [builder for _, builder in members]
        scores = build_together(self.target, sequences, builders, graph, lower)
        assert scores is not None
        for index, (state, builder) in enumerate(members):
            state.last = DraftPass(len(state.sequence.tokens), builder.proposal(), scores, index, boundary)

    def reusable_forward(self, states: Seq[S]) -> Scores | None:
        passes = [self._current(state) for state in states]
        first = passes[0] if passes else None
        if first is None or not first.first_difference or len(first.scores) != len(passes):
            return None
        together = all(
            one is not None and one.scores is first.scores and one.index == i for i, one in enumerate(passes)
        )
        return first.scores if together else None

    @staticmethod
    def _current(state: S) -> DraftPass | None:
        last = state.last
        return last if last is not None and last.at == len(state.sequence.tokens) else None

    def observe(self, state: S, verdict: Verdict) -> None:
        drafted, state.last = state.last, None  # a pass holds K/V of its rows
        self.learn(state, verdict, drafted)


def stopping(budget: Budget, threshold: float) -> Budget:
    """The budget with a confidence of at least ``threshold``."""
    return replace(budget, confidence=max(budget.confidence, threshold))
