"""TextDrafter: a draft model's text, tokenised again in the target's vocabulary (string-level exact match)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.model_drafter import CATCH_UP
from outpace.models.base import ChatTokenizer
from outpace.targets.base import Scores, Sequence, Target, TreeScores
from outpace.targets.draft_model_sequence import DraftModelSequence
from outpace.vocabulary.shared import exact
from outpace.vocabulary.text_translation import Reader, Reading, written


@dataclass(slots=True)
class _Voice:
    """The draft model's side of one request: what it has read, and what it says in this round."""

    reading: Reading
    follower: DraftModelSequence
    run: TokenTree
    text: bytes = b""
    ending: int | None = None
    """The target's token of the special one that the draft model ended with."""
    left: int = 0
    """Draft tokens that it may still say."""
    confidence: float = 0.0
    scores: Scores | None = None
    index: int = 0


class TextDrafter(Drafter):
    """String-level exact match: up to ``steps`` greedy tokens of ``draft``, read again in the tokens of ``ours``."""

    def __init__(self, draft: Target, theirs: ChatTokenizer, ours: ChatTokenizer, steps: int) -> None:
        self.draft, self.steps = draft, steps
        self._ours, self._theirs = ours, theirs
        self._reader = Reader(theirs)
        self._encode = exact(ours)
        special = (token for token in range(len(ours)) if ours.token_bytes(token) is None)
        self._special = {ours.token_text(token): token for token in special}
        self._voices: dict[Sequence, _Voice] = {}

    def begin(self, sequence: Sequence) -> None:
        self._voices[sequence] = _Voice(Reading(self._ours, self._reader), DraftModelSequence(self.draft), TokenTree())

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        pairs = [(self._voices[one], one, budget) for one, budget in zip(sequences, budgets, strict=True)]
        self._speak([voice for voice, one, budget in pairs if self._listen(voice, one, budget)])
        return [self._tree(*pair) for pair in pairs]

    def _listen(self, voice: _Voice, sequence: Sequence, budget: Budget) -> bool:
        """Read what was committed. False where nothing is to be said, or there is nothing to go on from."""
        voice.text, voice.ending, voice.scores, voice.confidence = b"", None, None, budget.confidence
        voice.left = self.steps if min(budget.depth, budget.nodes) > 0 else 0
        voice.reading.extend(sequence.tokens[voice.reading.read :])
        if not voice.left or not voice.reading.ids:
            return False
        voice.follower.place(voice.reading.ids, self.steps)
        return True

    def _speak(self, voices: Seq[_Voice]) -> None:
        """Run the draft model over all requests, a token at a time."""
        behind = [one.follower.sequence for one in voices if one.follower.lag > CATCH_UP]
        if behind:
            self.draft.prefill(behind)
        for voice in voices:
            tokens = voice.follower.sequence.tokens
            voice.run = TokenTree.chain(tokens[len(tokens) - voice.follower.lag :])
        scores: Scores | None = None
        growing = list(voices)
        while growing:  # those that are done stay in the batch: their rows are not run again
            scores = self.draft.score([(one.follower.sequence, one.run) for one in voices], resume=scores)
            last = {id(voice): part.logits[-1] for voice, part in zip(voices, scores.parts, strict=True)}
            growing = [voice for voice in growing if self._say(voice, last[id(voice)])]
        for index, voice in enumerate(voices):
            voice.scores, voice.index = scores, index

    def _say(self, voice: _Voice, logits: Tensor) -> bool:
        """Say the likeliest token. False when that was the last."""
        logits = logits[: len(self._theirs)]
        token = int(logits.argmax())
        if voice.confidence > 0.0 and float(logits.softmax(-1)[token]) < voice.confidence:
            return False
        text = self._theirs.token_bytes(token)
        if text is None:
            voice.ending = self._special.get(self._theirs.token_text(token))
            return False
        voice.text += text
        voice.left -= 1
        if voice.left:
            voice.run.add(len(voice.run) - 1, token)
        return voice.left > 0

    def _tree(self, voice: _Voice, sequence: Sequence, budget: Budget) -> TokenTree:
        """What was said, in the target's tokens. What the target has said of a character, the draft must say first."""
        held = voice.reading.held
        if not voice.text.startswith(held):
            return TokenTree()
        tokens = written(self._ours, self._encode, sequence.tokens, voice.text[len(held) :])
        if voice.ending is not None:
            tokens.append(voice.ending)
        return TokenTree.chain(tokens[: max(0, min(budget.depth, budget.nodes))])

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        """Keep the draft model's K/V of what it ran and, read as text, was committed."""
        paths: dict[int, tuple[Scores, list[list[int] | None]]] = {}
        kept: list[_Voice] = []
        for sequence in sequences:
            voice = self._voices[sequence]
            voice.reading.extend(sequence.tokens[voice.reading.read :])
            if voice.scores is None:
                continue
            _, own = paths.setdefault(id(voice.scores), (voice.scores, [None] * len(voice.scores)))
            path = self._run_path(voice)
            voice.scores = None
            if path is not None:
                own[voice.index] = path
                kept.append(voice)
        for drafted, own in paths.values():
            self.draft.commit(drafted, own)
        for voice in kept:
            voice.follower.follow(voice.reading.ids)

    def _run_path(self, voice: _Voice) -> list[int] | None:
        """The nodes of its tree that spell what it now reads after its root, but the last of these. None where it reads
        the text up to the root otherwise than before."""
        follower, run = voice.follower, voice.follower.run
        now = voice.reading.ids[follower.start :]
        if now[: run + 1] != follower.sequence.tokens[: run + 1] or len(now) == run + 1:
            return None
        path: list[int] = []
        node = ROOT
        for token in now[run + 1 : -1]:
            child = voice.run.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def end(self, sequence: Sequence) -> None:
        if (voice := self._voices.pop(sequence, None)) is not None:
            voice.follower.close()
