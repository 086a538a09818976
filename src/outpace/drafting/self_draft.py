"""Self-speculative drafting: the target drafts for itself, through a part of itself.

The committed K/V is the request's own, read and never written: a drafter of this kind keeps none. A draft pass runs a
:class:`~outpace.targets.base.SubGraph` level by level; the verifying forward takes it up where it first left the full
model (:meth:`SelfDraft.reusable_forward`), so that the layers below are run once for both.

A draft goes on while the sub-graph's largest probability reaches a threshold, which :class:`DraftExit` adapts. A token
is still drawn from the first row below it, since that row has been run; the forward after it is saved. So the decision
never depends on what was drawn.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pydantic import Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.core.validation import StrictModel
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.tree_builder import ChainBuilder, build_together
from outpace.targets.base import Scores, SubGraph, Target


@dataclass(slots=True)
class DraftExit:
    """The confidence below which drafting stops, adapted (Zhang et al. 2023, arXiv 2309.08168, section 3.4).

    After each round the acceptance rate is averaged, AR <- b1 AR + (1 - b1) accepted / drafted, and the threshold moves
    towards itself plus or minus ``step``, g <- b2 g + (1 - b2) (g +- step): up while AR is at most ``wanted``, down
    while it is above. A round without a draft changes nothing.
    """

    threshold: float = 0.6
    wanted: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    threshold_memory: float = 0.9
    rate: float = 1.0

    def learn(self, accepted: int, drafted: int) -> None:
        """One round's draft tokens."""
        if not drafted:
            return
        self.rate = self.rate_memory * self.rate + (1.0 - self.rate_memory) * accepted / drafted
        moved = self.threshold + (self.step if self.rate <= self.wanted else -self.step)
        kept = self.threshold_memory
        self.threshold = min(1.0, max(0.0, kept * self.threshold + (1.0 - kept) * moved))


class ConfidentChainBuilder(ChainBuilder):
    """A chain that ends with the first token whose row has a largest probability below ``budget.confidence``."""

    def grow(self, logits: Tensor) -> bool:
        distribution, node = self._distribution(logits), len(self._drafted) - 1
        if distribution.dead_end(node) or not self.budget.wants(self._depth + 1):
            return False
        confidence = self._confidence(distribution, node)  # of the row, whatever is drawn from it
        self._draw(distribution, node)
        return self.budget.wants(self._depth + 1, confidence) and self._run_last()


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
    """Drafts chains through sub-graphs of ``target``, which is the requests' own."""

    proposal = Proposal(sampled=True, shares_noise=True)
    needs_target_internals = True

    def __init__(self, target: Target) -> None:
        self.target = target

    @abstractmethod
    def plan(self, state: S, budget: Budget) -> tuple[SubGraph, Budget]:
        """The part of the target that drafts this round, and how far. Must depend on counts, never on clocks."""

    def learn(self, state: S, verdict: Verdict, drafted: DraftPass | None) -> None:
        """A round was judged; ``drafted`` is what was proposed in it, if anything was."""

    def propose_batch(self, states: Seq[S], budgets: Seq[Budget]) -> list[TokenTree]:
        groups: dict[Hashable, tuple[SubGraph, list[tuple[S, ConfidentChainBuilder]]]] = {}
        builders: list[ConfidentChainBuilder | None] = []
        for state, whole in zip(states, budgets, strict=True):
            state.last = None
            graph, budget = self.plan(state, whole)
            builders.append(None)
            if budget.depth > 0 and budget.max_nodes > 0:
                builder = builders[-1] = ConfidentChainBuilder(state.sequence, budget, self.chance(state.sequence))
                key = graph.start, graph.stop, graph.skip_attention, graph.skip_mlp
                groups.setdefault(key, (graph, []))[1].append((state, builder))
        for graph, members in groups.values():
            self._run(graph, members)
        return [TokenTree() if builder is None else builder.proposal() for builder in builders]

    def _run(self, graph: SubGraph, members: Seq[tuple[S, ConfidentChainBuilder]]) -> None:
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


@dataclass(slots=True)
class AdaptiveState(SelfDraftState):
    """A request with a threshold of its own."""

    exit: DraftExit


A = TypeVar("A", bound=AdaptiveState)


class AdaptiveSelfDraft(SelfDraft[A]):
    """Drafts through one sub-graph a request, until the request's threshold ends the draft."""

    @abstractmethod
    def sub_graph(self, state: A) -> SubGraph:
        """The part of the target that drafts this round."""

    def plan(self, state: A, budget: Budget) -> tuple[SubGraph, Budget]:
        return self.sub_graph(state), stopping(budget, state.exit.threshold)

    def learn(self, state: A, verdict: Verdict, drafted: DraftPass | None) -> None:
        if drafted is not None:
            state.exit.learn(len(drafted.tree.follow(verdict.committed)), len(drafted.tree))


class ExitSettings(StrictModel):
    """How far a self-drafting method goes."""

    num_draft_tokens: int = Field(8, ge=0, le=64, description="most draft tokens a round")
    confidence: float = Field(
        0.6, ge=0.0, le=1.0, description="end a draft with the first token whose largest probability is lower"
    )
    wanted: float = Field(0.9, ge=0.0, le=1.0, description="acceptance rate that the threshold is steered to")
    step: float = Field(0.01, ge=0.0, le=1.0, description="how far a round moves the threshold; 0 keeps it")
