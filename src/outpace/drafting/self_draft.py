"""Self-speculative drafting: the target drafts for itself, through a part of itself.

What these drafters share. The committed K/V is the request's own, read and never written: a drafter of this kind keeps
none. A draft pass runs a :class:`~outpace.targets.base.SubGraph` level by level; the verifying forward takes it up
where it first left the full model (:meth:`SelfDraft.reusable_forward`), so that layers below are run once for both.

A draft goes on while the sub-graph is sure enough of the token before; how sure is enough adapts: see
:class:`DraftExit`. The row that it is unsure of is paid for, so that a token is still drawn from it; what it stops is
the next forward, before the next draw.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.tree_builder import ChainBuilder, build_together
from outpace.targets.base import Scores, Sequence, SubGraph, Target, TreeScores


@dataclass(slots=True)
class DraftExit:
    """The confidence below which drafting stops, adapted (Zhang et al. 2023, arXiv 2309.08168, section 3.4).

    After each round the acceptance rate is averaged, AR <- b1 AR + (1 - b1) accepted / drafted, and the threshold moves
    towards itself plus or minus ``step``, g <- b2 g + (1 - b2) (g +- step): up while AR is at most ``wanted``, down
    while it is above. A round without a draft says nothing.
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
    """A chain that ends with the first token that the model is less sure of than ``budget.confidence``."""

    def grow(self, logits: Tensor) -> bool:
        distribution, node = self._distribution(logits), len(self._drafted) - 1
        if distribution.dead_end(node) or not self.budget.wants(self._depth + 1):
            return False
        confidence = self._confidence(distribution, node)  # of the row, whatever is drawn from it
        self._draw(distribution, node)
        return self.budget.wants(self._depth + 1, confidence) and self._run_last()


@dataclass(slots=True)
class Pass:
    """The last draft of one request: ``tree`` as proposed when it had ``at`` tokens, part ``index`` of ``scores``."""

    at: int
    tree: TokenTree
    scores: Scores
    index: int
    first_difference: int


@dataclass(slots=True)
class Own:
    """What every self-drafter keeps of one request."""

    last: Pass | None = field(default=None, init=False)


S = TypeVar("S", bound=Own)


class SelfDraft(Drafter, Generic[S]):
    """Drafts chains through sub-graphs of ``target``, which is the requests' own."""

    proposal = Proposal(sampled=True)
    needs_target_internals = True

    def __init__(self, target: Target) -> None:
        self.target = target
        self._own: dict[Sequence, S] = {}

    @abstractmethod
    def opened(self, sequence: Sequence) -> S:
        """What to keep of a request that joins."""

    @abstractmethod
    def plan(self, sequence: Sequence, budget: Budget) -> tuple[SubGraph, Budget]:
        """The part of the target that drafts this round, and how far. Must depend on counts, never on clocks."""

    def learn(self, sequence: Sequence, scores: TreeScores, verdict: Verdict, drafted: Pass | None) -> None:
        """A round was judged; ``drafted`` is what was proposed in it, if anything was."""

    def begin(self, sequence: Sequence) -> None:
        self._own[sequence] = self.opened(sequence)

    def end(self, sequence: Sequence) -> None:
        self._own.pop(sequence, None)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        groups: dict[Hashable, tuple[SubGraph, list[tuple[Sequence, ConfidentChainBuilder]]]] = {}
        builders: list[ConfidentChainBuilder | None] = []
        for sequence, whole in zip(sequences, budgets, strict=True):
            self._own[sequence].last = None
            graph, budget = self.plan(sequence, whole)
            builders.append(None)
            if budget.depth > 0 and budget.nodes > 0:
                builder = builders[-1] = ConfidentChainBuilder(sequence, budget, self.chance(sequence))
                key = graph.start, graph.stop, graph.skip_attention, graph.skip_mlp
                groups.setdefault(key, (graph, []))[1].append((sequence, builder))
        for graph, members in groups.values():
            self._run(graph, members)
        return [TokenTree() if builder is None else builder.proposal() for builder in builders]

    def _run(self, graph: SubGraph, members: Seq[tuple[Sequence, ConfidentChainBuilder]]) -> None:
        boundary = graph.first_difference(self.target.num_layers)
        lower = [
            layer for layer in self.aux_hidden_state_layers if layer <= boundary
        ]  # the verifying forward will want them too
        scores = build_together(self.target, [one for one, _ in members], [one for _, one in members], graph, lower)
        assert scores is not None
        for index, (sequence, builder) in enumerate(members):
            self._own[sequence].last = Pass(len(sequence.tokens), builder.proposal(), scores, index, boundary)

    def reusable_forward(self, sequences: Seq[Sequence]) -> Scores | None:
        passes = [self._current(sequence) for sequence in sequences]
        first = passes[0] if passes else None
        if first is None or not first.first_difference or len(first.scores) != len(passes):
            return None
        together = all(
            one is not None and one.scores is first.scores and one.index == i for i, one in enumerate(passes)
        )
        return first.scores if together else None

    def _current(self, sequence: Sequence) -> Pass | None:
        last = self._own[sequence].last
        return last if last is not None and last.at == len(sequence.tokens) else None

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence, part, verdict in zip(sequences, scores, verdicts, strict=True):
            own = self._own[sequence]
            drafted, own.last = own.last, None  # a pass holds K/V of its rows
            self.learn(sequence, part, verdict, drafted)


def accepted(drafted: Pass, sequence: Sequence) -> int:
    """How many of the drafted tokens stand in the sequence now, whoever else drafted beside."""
    ours, committed = drafted.tree.tokens, sequence.tokens[drafted.at :]
    most = min(len(ours), len(committed))
    return next((count for count in range(most) if ours[count] != committed[count]), most)


def stopping(budget: Budget, threshold: float) -> Budget:
    """The budget with a threshold at least as high."""
    return replace(budget, confidence=max(budget.confidence, threshold))


@dataclass(slots=True)
class Adapting(Own):
    """A request and its own threshold."""

    exit: DraftExit = field(default_factory=DraftExit)


class ExitSettings(BaseModel):
    """How far a self-drafting method goes."""

    model_config = ConfigDict(extra="forbid")

    length: int = Field(8, ge=0, le=64, description="most draft tokens a round")
    confidence: float = Field(
        0.6, ge=0.0, le=1.0, description="end a draft with the first token whose largest probability is lower"
    )
    wanted: float = Field(0.9, ge=0.0, le=1.0, description="acceptance rate that the threshold is steered to")
    step: float = Field(0.01, ge=0.0, le=1.0, description="how far a round moves the threshold; 0 keeps it")
