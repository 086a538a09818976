"""TextDrafter: a draft model's text, tokenised again in the target's vocabulary (string-level exact match)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.model_drafter import DraftRun, catch_up, commit_runs
from outpace.drafting.tree_builder import TreeBuilder, build_together
from outpace.models.base import ChatTokenizer
from outpace.targets.base import Sequence, Target
from outpace.targets.draft_model_sequence import DraftModelSequence
from outpace.vocabulary.shared import exact
from outpace.vocabulary.text_translation import Reader, Reading, written


class TextBuilder(TreeBuilder):
    """The draft model's greedy chain, at most ``budget.depth`` tokens, and the bytes ``text`` that it spells.

    A special token ends it: ``ending``, the draft model's id.
    """

    def __init__(self, sequence: Sequence, budget: Budget, theirs: ChatTokenizer) -> None:
        super().__init__(sequence, budget, sequence.chance.at(len(sequence.tokens), "draft"))
        self._theirs = theirs
        self.text = b""
        self.ending: int | None = None

    def grow(self, logits: Tensor) -> bool:
        row = logits[-1, : len(self._theirs)]
        token = int(row.argmax())
        if self.budget.confidence > 0.0 and float(row.softmax(-1)[token]) < self.budget.confidence:
            return False
        text = self._theirs.token_bytes(token)
        if text is None:
            self.ending = token
            return False
        self.text += text
        self._depth += 1
        if self._depth < self.budget.depth:
            self._run_after(len(self._drafted) - 1, token)
        return self._depth < self.budget.depth

    def proposal(self) -> TokenTree:
        raise NotImplementedError("the text is proposed in the target's tokens")


@dataclass(slots=True)
class TextDraftState(DraftState):
    """``reading``: the text in the draft model's tokens. ``follower``: the draft model's sequence over them."""

    reading: Reading
    follower: DraftModelSequence
    builder: TextBuilder | None = None
    run: DraftRun | None = None


class TextDrafter(Drafter[TextDraftState]):
    """String-level exact match (Timor et al. 2025, arXiv 2502.05202): at most ``steps`` greedy tokens of ``draft``
    (None: as many as the target may draft), tokenised again by ``ours``."""

    def __init__(self, draft: Target, theirs: ChatTokenizer, ours: ChatTokenizer, steps: int | None) -> None:
        self.draft, self.steps = draft, steps
        self._ours, self._theirs = ours, theirs
        self._reader = Reader(theirs)
        self._encode = exact(ours)
        special = (token for token in range(len(ours)) if ours.token_bytes(token) is None)
        self._special = {ours.token_text(token): token for token in special}

    def begin(self, sequence: Sequence) -> TextDraftState:
        return TextDraftState(sequence, Reading(self._ours, self._reader), DraftModelSequence(self.draft))

    def propose_batch(self, states: Seq[TextDraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        drafting, builders = [], []
        for state, budget in zip(states, budgets, strict=True):
            state.builder = state.run = None
            self._read(state)
            if min(budget.depth, budget.max_nodes) > 0 and state.reading.ids:
                steps = budget.depth if self.steps is None else self.steps
                sequence = state.follower.place(state.reading.ids, steps)
                state.builder = TextBuilder(sequence, Budget(steps, confidence=budget.confidence), self._theirs)
                drafting.append(state)
                builders.append(state.builder)
        sequences = [state.follower.sequence for state in drafting]
        catch_up(self.draft, sequences, builders)
        scores = build_together(self.draft, sequences, builders)
        for index, state in enumerate(drafting):
            assert scores is not None
            state.run = DraftRun(scores, index)
        return [
            TokenTree()
            if state.builder is None
            else self._tree(state, state.builder, min(budget.depth, budget.max_nodes))
            for state, budget in zip(states, budgets, strict=True)
        ]

    @staticmethod
    def _read(state: TextDraftState) -> None:
        """Read what was committed since."""
        state.reading.extend(state.sequence.tokens[state.reading.read :])

    def _tree(self, state: TextDraftState, drafted: TextBuilder, most: int) -> TokenTree:
        """The drafted text in at most ``most`` of the target's tokens.

        Where the last token holds the beginning of a character, the text must begin with those bytes.
        """
        held = state.reading.held
        if not drafted.text.startswith(held):
            return TokenTree()
        tokens = written(self._ours, self._encode, state.sequence.tokens, drafted.text[len(held) :])
        if drafted.ending is not None:
            ending = self._special.get(self._theirs.token_text(drafted.ending))
            tokens += [] if ending is None else [ending]
        return TokenTree.chain(tokens[:most])

    def observe_batch(self, states: Seq[TextDraftState], verdicts: Seq[Verdict]) -> None:
        """Commit the draft model's K/V of what it ran and, read as text, was committed."""
        runs, kept = [], []
        for state in states:
            self._read(state)
            if state.run is not None and (path := self._path(state, state.run)) is not None:
                runs.append((state.run, path))
                kept.append(state)
            state.builder = state.run = None
        commit_runs(self.draft, runs)
        for state in kept:
            state.follower.follow(state.reading.ids)

    @staticmethod
    def _path(state: TextDraftState, run: DraftRun) -> list[int] | None:
        """The nodes of the run that spell the text after its root, but the last token of it. None where the text up to
        the root is tokenised otherwise than before."""
        follower = state.follower
        now, root = state.reading.ids[follower.start :], follower.run + 1
        if now[:root] != follower.sequence.tokens[:root] or len(now) == root:
            return None
        return run.scores[run.index].tree.follow(now[root:-1])

    def end(self, state: TextDraftState) -> None:
        state.follower.close()
