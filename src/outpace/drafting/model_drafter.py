"""DraftModel: a second, smaller target drafts chains or trees, with K/V of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass, field, replace

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.dynamic_tree_builder import DynamicTreeBuilder
from outpace.drafting.tree_builder import ChainBuilder, TreeBuilder, build_together
from outpace.targets.base import Scores, Sequence, Target

CATCH_UP = 16
"""Committed tokens that the draft model has not run go into its first forward; more of them are prefilled."""

BuilderFactory = Callable[[Sequence, Budget, Chance], TreeBuilder]
"""Starts one draft over the draft model's sequence."""


@dataclass(slots=True)
class DraftRun:
    """One sequence's part, ``index``, of the last forward of a draft."""

    scores: Scores
    index: int


@dataclass(slots=True)
class ModelDraftState(DraftState):
    """``draft_sequence`` shares tokens and sampler with ``sequence``; its K/V may lag behind by several tokens.

    ``builder`` and ``run``: this round's draft, None where none was made.
    """

    draft_sequence: Sequence
    builder: TreeBuilder | None = field(default=None, init=False)
    run: DraftRun | None = field(default=None, init=False)


def lag(model: Target, sequence: Sequence) -> int:
    """Committed tokens between the model's root (the first without K/V) and the last one."""
    return len(sequence.tokens) - 1 - model.length(sequence.kv)


def catch_up(model: Target, sequences: Seq[Sequence], builders: Seq[TreeBuilder]) -> None:
    """Prefill the sequences that are far behind; the builders' first forward runs the tokens that the others lack."""
    sharing = _same_prompts(model, sequences)
    waiting = {id(one) for one, _ in sharing}
    prefill_behind(model, [one for one in sequences if id(one) not in waiting])
    for one, first in sharing:
        rows = min(one.prompt_length, len(first.tokens) - 1, len(one.tokens) - 1)
        empty, one.kv = one.kv, model.fork(first.kv, rows)
        model.close(empty)
    prefill_behind(model, [one for one, _ in sharing])
    for sequence, builder in zip(sequences, builders, strict=True):
        builder.catch_up(sequence.tokens[len(sequence.tokens) - lag(model, sequence) :])


def _same_prompts(model: Target, sequences: Seq[Sequence]) -> list[tuple[Sequence, Sequence]]:
    """Sequences of which nothing was read yet, each with the first of those that have its prompt, which reads it for
    all: the samples of one request, say, whose K/V of the target is shared, too."""
    first: dict[tuple[str, tuple[int, ...]], Sequence] = {}
    found = []
    for one in sequences:
        if one.prompt_length > CATCH_UP and lag(model, one) > CATCH_UP and not model.length(one.kv):
            key = one.namespace, tuple(one.tokens[: one.prompt_length])
            if (other := first.setdefault(key, one)) is not one:
                found.append((one, other))
    return found


def prefill_behind(model: Target, sequences: Seq[Sequence]) -> None:
    """Read what the sequences lack of which more than :data:`CATCH_UP` tokens are committed and not read."""
    behind = [one for one in sequences if lag(model, one) > CATCH_UP]
    if behind:
        model.prefill(behind)


def commit_runs(model: Target, runs: Iterable[tuple[DraftRun, list[int]]]) -> None:
    """Commit a path of each run: the K/V of its nodes and of the root before them."""
    paths: dict[int, tuple[Scores, list[list[int] | None]]] = {}
    for run, path in runs:
        _, kept = paths.setdefault(id(run.scores), (run.scores, [None] * len(run.scores)))
        kept[run.index] = path
    for scores, kept in paths.values():
        model.commit(scores, kept)


class DraftModel(Drafter[ModelDraftState]):
    """Drafts with the target ``draft``; ``builder`` makes trees as ``proposal`` describes them, by default sampled
    chains (Leviathan et al. 2023, arXiv 2211.17192)."""

    def __init__(
        self,
        draft: Target,
        builder: BuilderFactory = ChainBuilder,
        proposal: Proposal = Proposal(sampled=True, shares_noise=True),  # noqa: B008
    ) -> None:
        self.draft = draft
        self.proposal = proposal
        self._builder = builder
        kind = getattr(builder, "func", builder)  # of a partial
        self.asks_policy = getattr(kind, "asks_policy", False)
        self.weighs_costs = getattr(kind, "weighs_costs", False)

    def begin(self, sequence: Sequence) -> ModelDraftState:
        # The prompt is prefilled with the first proposal: for all requests that join together, in one forward.
        return ModelDraftState(sequence, self._draft_sequence(sequence, self.draft.open()))

    @staticmethod
    def _draft_sequence(sequence: Sequence, kv: object) -> Sequence:
        # The sampler is shared, not copied: the committed history is the same.
        return replace(sequence, kv=kv, states=None)

    def start(self, state: ModelDraftState, budget: Budget) -> TreeBuilder:
        """A builder for one draft within ``budget``."""
        return self._builder(state.draft_sequence, budget, self.chance(state.sequence))

    def propose_batch(self, states: Seq[ModelDraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        sequences, builders, drafting = [], [], []
        for state, whole in zip(states, budgets, strict=True):
            state.builder = state.run = None
            budget = whole.limited(self.draft.context_length - len(state.sequence.tokens))
            if budget.depth > 0 and budget.max_nodes > 0 and budget.topk > 0:
                state.builder = self.start(state, budget)
                drafting.append(state)
                builders.append(state.builder)
                sequences.append(state.draft_sequence)
        catch_up(self.draft, sequences, builders)
        scores = build_together(self.draft, sequences, builders)
        for index, state in enumerate(drafting):
            assert scores is not None
            state.run = DraftRun(scores, index)
        return [TokenTree() if state.builder is None else state.builder.proposal() for state in states]

    def observe_batch(self, states: Seq[ModelDraftState], verdicts: Seq[Verdict]) -> None:
        """Commit the draft model's K/V of what it ran and the target committed; the rest is caught up next round."""
        runs = []
        for state, verdict in zip(states, verdicts, strict=True):
            if state.builder is not None:
                state.builder.learn(verdict.committed, None if state.sequence.params.greedy else verdict.target_row)
            if state.run is not None:
                # The last token stays out of the K/V.
                tokens = state.sequence.tokens[self.draft.length(state.draft_sequence.kv) + 1 : -1]
                runs.append((state.run, state.run.scores[state.run.index].tree.follow(tokens)))
            state.builder = state.run = None
        commit_runs(self.draft, runs)

    def rewind(self, state: ModelDraftState, sequence: Sequence, kept: int) -> ModelDraftState:
        """Keep the K/V of the tokens that are still there."""
        kv, same = state.draft_sequence.kv, min(kept, len(sequence.tokens) - 1)
        if self.draft.length(kv) > same:
            kv = self.draft.truncate(kv, same)
        state.sequence, state.draft_sequence = sequence, self._draft_sequence(sequence, kv)
        state.builder = state.run = None
        return state

    def end(self, state: ModelDraftState) -> None:
        self.draft.close(state.draft_sequence.kv)


def top_k_tree(draft: Target) -> DraftModel:
    """A drafter of deterministic trees: the draft model's most probable paths."""
    return DraftModel(draft, DynamicTreeBuilder, Proposal(tree=True))
