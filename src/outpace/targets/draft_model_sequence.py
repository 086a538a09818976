"""DraftModelSequence: a draft model's own sequence of a text that is written elsewhere, in the draft model's tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.sampling import Sampler, SamplingParams
from outpace.targets.base import Sequence, Target


class DraftModelSequence:
    """``sequence`` holds the text's token ids from position ``start`` on, and the K/V of a beginning of them.

    A text that outgrows the draft model's context is read from a later start, moved on by half a context at a time: a
    function of the text's length, so that two readers of one text agree. Its K/V is computed anew then.
    """

    def __init__(self, draft: Target, kv: Any = None) -> None:
        """``kv``: of the draft model; None: empty."""
        self.draft = draft
        self.start = 0
        self.sequence = self._sequence([], draft.open() if kv is None else kv)

    def _sequence(self, tokens: list[int], kv: Any) -> Sequence:
        return Sequence(tokens, 0, kv, Sampler(SamplingParams(), (), self.draft.vocab_size))

    @property
    def run(self) -> int:
        """How many tokens of ``sequence`` have K/V."""
        return self.draft.length(self.sequence.kv)

    @property
    def lag(self) -> int:
        """How many tokens lie between the first without K/V, the root, and the last."""
        return len(self.sequence.tokens) - 1 - self.run

    def place(self, ids: Seq[int], deep: int) -> Sequence:
        """Make ``ids`` (at least one) the text, with room for trees of depth ``deep`` behind it; returns ``sequence``.

        K/V of tokens that the text no longer has is dropped; it never covers the last id. Raises BadInput where
        the tree alone fills the context.
        """
        context = self.draft.context_length
        half = max(1, context // 2)
        over = len(ids) + max(deep, context // 4) - context
        start = half * -(-over // half) if over > 0 else 0
        if start >= len(ids):
            raise BadInput(
                f"the draft is {deep} of the draft model's tokens deep, and its context has {context}; draft fewer"
            )
        if start != self.start:
            self.close()
            self.start, self.sequence = start, self._sequence(list(ids[start:]), self.draft.open())
            self.draft.prefill([self.sequence])
            return self.sequence
        run, tokens = self.run, list(ids[start:])
        same = run
        if self.sequence.tokens[:run] != tokens[:run]:
            same = next(at for at, token in enumerate(self.sequence.tokens[:run]) if [token] != tokens[at : at + 1])
        if min(same, len(tokens) - 1) < run:
            self.sequence.kv = self.draft.truncate(self.sequence.kv, min(same, len(tokens) - 1))
        self.sequence.tokens[:] = tokens
        return self.sequence

    def follow(self, ids: Seq[int]) -> None:
        """The draft model has just committed K/V: the text is ``ids`` now, and its window stays."""
        self.sequence.tokens[:] = ids[self.start :]

    def fork(self, ids: Seq[int]) -> DraftModelSequence:
        """A copy for the text ``ids``, a beginning of this one, with the K/V that there is of it."""
        same = min(self.run, max(0, len(ids) - self.start))
        twin = DraftModelSequence(self.draft, self.draft.fork(self.sequence.kv, same))
        twin.start = self.start
        twin.sequence.tokens[:] = ids[self.start :]
        return twin

    def close(self) -> None:
        """Release the K/V."""
        self.draft.close(self.sequence.kv)
