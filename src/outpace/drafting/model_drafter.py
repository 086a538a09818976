"""DraftModel: another target drafts chains or trees, with K/V of its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.proposal import Proposal
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.tree_builder import ChainBuilder, LikeliestTreeBuilder, TreeBuilder, build_together
from outpace.targets.base import Scores, Sequence, Target, TreeScores

CATCH_UP = 16
"""Committed tokens that the draft model has not seen ride along in its first forward, unless there are more."""


@dataclass(slots=True)
class _Twin:
    """The draft model's side of one request. ``sequence`` shares tokens and sampler with the request's own; its K/V
    may lag behind by more than a token. ``scores[index]`` is this round's last draft forward."""

    sequence: Sequence
    scores: Scores | None = None
    index: int = 0


Grow = Callable[[Sequence, Budget, Chance], TreeBuilder]
"""Starts one draft: what shape it takes and how it is drawn."""


class DraftModel(Drafter):
    """Drafts with another target; ``builder`` makes the trees that ``proposal`` describes: sampled chains by
    default."""

    def __init__(
        self,
        draft: Target,
        builder: Grow = ChainBuilder,
        proposal: Proposal = Proposal(sampled=True),  # noqa: B008
    ) -> None:
        self.draft = draft
        self.proposal = proposal
        self._builder = builder
        self._twins: dict[Sequence, _Twin] = {}

    def begin(self, sequence: Sequence) -> None:
        # The prompt is prefilled with the first proposal: for all requests that join together, in one go.
        self._twins[sequence] = self._twin(sequence, self.draft.open())

    @staticmethod
    def _twin(sequence: Sequence, kv: object) -> _Twin:
        # The sampler is shared, not copied: it knows the committed history, which is the same history.
        return _Twin(Sequence(sequence.tokens, sequence.prompt_length, kv, sequence.sampler, sequence.chance))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        proposals = [TokenTree() for _ in sequences]
        builders: dict[int, TreeBuilder] = {}
        for index, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True)):
            twin = self._twins[sequence]
            twin.scores = None
            budget = budget.limited(self.draft.context_length - len(sequence.tokens))  # noqa: PLW2901
            if budget.depth > 0 and budget.nodes > 0 and budget.width > 0:
                builders[index] = self._builder(twin.sequence, budget, self.chance(sequence))
        self._grow([self._twins[sequences[index]] for index in builders], list(builders.values()))
        for index, builder in builders.items():
            proposals[index] = builder.proposal()
        return proposals

    def _grow(self, twins: Seq[_Twin], builders: Seq[TreeBuilder]) -> None:
        """Run the draft model over all trees, a level at a time, until every tree is full or not worth going on."""
        behind = [one.sequence for one in twins if self._lag(one) > CATCH_UP]
        if behind:
            self.draft.prefill(behind)
        for twin, builder in zip(twins, builders, strict=True):
            builder.catch_up(twin.sequence.tokens[len(twin.sequence.tokens) - self._lag(twin) :])
        scores = build_together(self.draft, [twin.sequence for twin in twins], builders)
        for index, twin in enumerate(twins):
            twin.scores, twin.index = scores, index

    def _lag(self, twin: _Twin) -> int:
        """How many committed tokens lie between the draft model's root and the last one."""
        return len(twin.sequence.tokens) - 1 - self.draft.length(twin.sequence.kv)

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        """Keep the draft model's K/V of what it ran and the target committed; the rest is caught up next round."""
        paths: dict[int, tuple[Scores, list[list[int] | None]]] = {}
        for sequence in sequences:
            twin = self._twins[sequence]
            if twin.scores is None:
                continue
            _, kept = paths.setdefault(id(twin.scores), (twin.scores, [None] * len(twin.scores)))
            kept[twin.index] = self._run_path(twin)
            twin.scores = None
        for drafted, kept in paths.values():
            self.draft.commit(drafted, kept)

    def _run_path(self, twin: _Twin) -> list[int]:
        """The nodes of the draft model's tree that spell the committed tokens after its root, but the last of these."""
        assert twin.scores is not None
        tree = twin.scores[twin.index].tree
        tokens = twin.sequence.tokens
        path: list[int] = []
        node = ROOT
        for token in tokens[self.draft.length(twin.sequence.kv) + 1 : -1]:
            child = tree.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        kv = self._twins[sequence].sequence.kv
        same = min(self.draft.length(kv), len(twin.tokens) - 1)
        self._twins[twin] = self._twin(twin, self.draft.fork(kv, same))

    def rewind(self, sequence: Sequence, kept: int) -> None:
        twin = self._twins[sequence]
        same = min(kept, len(sequence.tokens) - 1)
        if self.draft.length(twin.sequence.kv) > same:
            twin.sequence.kv = self.draft.truncate(twin.sequence.kv, same)
        # Tokens are shared with the request's own sequence; the sampler was replaced there.
        twin.sequence.sampler = sequence.sampler

    def end(self, sequence: Sequence) -> None:
        twin = self._twins.pop(sequence, None)
        if twin is not None:
            self.draft.close(twin.sequence.kv)


def top_k_tree(draft: Target) -> DraftModel:
    """A drafter of deterministic trees: the draft model's likeliest paths."""
    return DraftModel(draft, LikeliestTreeBuilder, Proposal(tree=True))
