"""A smaller language model drafts: speculative decoding as it began.

``draft-model`` (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): any model with the
target's vocabulary drafts ``length`` tokens one after the other; the target scores them in one forward. At temperature
0 the draft is the draft model's argmax, above it a sample from the draft model's distribution under the request's own
sampling parameters, handed over with the row it was drawn from.

With ``width`` above 1 the draft is a tree: the ``nodes`` most probable paths under the draft model with at most
``width`` children a node (as SpecInfer, Miao et al. 2024, arXiv 2305.09781, expands by top-k). It is selected by
probability, so every draft token of it is deterministic, at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from outpace.acceptance.base import Verdict
from outpace.chance import Chance
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.drafters.base import Drafter, Proposal
from outpace.drafters.growth import ChainGrowth, Growth, TreeGrowth, grow_together
from outpace.errors import BadInput
from outpace.method import Context, Parts, register
from outpace.targets.base import Scores, Sequence, Target, TreeScores
from outpace.tree import ROOT, TokenTree

CATCH_UP = 16
"""Committed tokens that the draft model has not seen ride along in its first forward, unless there are more."""


@dataclass(slots=True)
class _Twin:
    """The draft model's side of one request. ``sequence`` shares tokens and sampler with the request's own; its K/V
    may lag behind by more than a token. ``scores[index]`` is this round's last draft forward."""

    sequence: Sequence
    scores: Scores | None = None
    index: int = 0


Grow = Callable[[Sequence, Budget, Chance], Growth]
"""Starts one draft: what shape it takes and how it is drawn."""


class DraftModel(Drafter):
    """Drafts with another target; ``growth`` makes the trees that ``proposal`` describes: sampled chains by default."""

    def __init__(
        self,
        draft: Target,
        growth: Grow = ChainGrowth,
        proposal: Proposal = Proposal(sampled=True),  # noqa: B008
    ) -> None:
        self.draft = draft
        self.proposal = proposal
        self._growth = growth
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
        growths: dict[int, Growth] = {}
        for index, (sequence, budget) in enumerate(zip(sequences, budgets, strict=True)):
            twin = self._twins[sequence]
            twin.scores = None
            budget = budget.limited(self.draft.context_length - len(sequence.tokens))  # noqa: PLW2901
            if budget.depth > 0 and budget.nodes > 0 and budget.width > 0:
                growths[index] = self._growth(twin.sequence, budget, self.chance(sequence))
        self._grow([self._twins[sequences[index]] for index in growths], list(growths.values()))
        for index, growth in growths.items():
            proposals[index] = growth.proposal()
        return proposals

    def _grow(self, twins: Seq[_Twin], growths: Seq[Growth]) -> None:
        """Run the draft model over all trees, a level at a time, until every tree is full or not worth going on."""
        behind = [one.sequence for one in twins if self._lag(one) > CATCH_UP]
        if behind:
            self.draft.prefill(behind)
        for twin, growth in zip(twins, growths, strict=True):
            growth.catch_up(twin.sequence.tokens[len(twin.sequence.tokens) - self._lag(twin) :])
        scores = grow_together(self.draft, [twin.sequence for twin in twins], growths)
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
    return DraftModel(draft, TreeGrowth, Proposal(tree=True))


def draft_of(context: Context) -> Target:
    """The draft model that the caller named. Raises BadInput for another vocabulary."""
    draft = context.draft()
    if draft.vocab_size != context.target.vocab_size:
        raise BadInput(
            f"the draft model has {draft.vocab_size} tokens and the target {context.target.vocab_size}; "
            "choose a draft model with the target's vocabulary"
        )
    return draft


class DraftModelSettings(BaseModel):
    """Settings of ``draft-model``."""

    model_config = ConfigDict(extra="forbid")

    length: int = Field(4, ge=0, le=128, description="draft tokens on a path (gamma)")
    width: int = Field(1, ge=1, le=64, description="children of a node; 1 samples a chain, more select a tree")
    nodes: int = Field(16, ge=1, le=512, description="nodes of the whole tree")
    confidence: float = Field(
        0.0, ge=0.0, le=1.0, description="stop before the next draw when the draft model's largest probability is lower"
    )


@register(
    "draft-model",
    family="draft-model",
    paper="Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
    summary="A smaller model with the same vocabulary drafts a chain (true q) or a top-k tree.",
    pays="Where a model ten times quicker often agrees, free prose included. Not beside a small target: drafts cost.",
    aliases=("leviathan", "sps"),
    tiny={"length": 2},
)
def build(context: Context, settings: DraftModelSettings) -> Parts:
    """A draft model, as the caller named it."""
    draft = draft_of(context)
    tree = settings.width > 1
    controller = Fixed(settings.length, settings.width, settings.nodes, settings.confidence)
    return Parts(top_k_tree(draft) if tree else DraftModel(draft), controller)
