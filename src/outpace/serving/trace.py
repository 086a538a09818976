"""Who drafted each token of an answer, beside the text that the token stands for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from outpace.core.text import TextStream, Tokenizer
from outpace.engine.request import TARGET, TokenSource
from outpace.methods.registry import canonical


class Tracer:
    """Divides the text of one choice, as it is released, among its tokens.

    The entries' texts, joined, are the choice's text: a token whose text is held back (it may begin a stop string, or
    is not a whole character) has its entry later, and what a stop string cuts is in none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)
        self._held: list[tuple[int, TokenSource]] = []
        """How many characters each token adds, for tokens that have no entry yet."""
        self._text = ""
        """Text that was released and is in no entry yet."""

    def push(
        self, text: str, tokens: Seq[int], sources: Seq[TokenSource], *, last: bool = False
    ) -> list[dict[str, Any]]:
        """The entries that this part of the answer completes; with ``last`` all that are left."""
        self._held += [(len(self._stream.push(token)), source) for token, source in zip(tokens, sources, strict=True)]
        self._text += text
        count = len(self._held) if last else self._complete()
        done, self._held = self._held[:count], self._held[count:]
        entries = [self._entry(size, source) for size, source in done]
        if last and entries:
            entries[-1]["text"] += self._text  # an incomplete character at the end
        return entries

    def _entry(self, size: int, source: TokenSource) -> dict[str, Any]:
        text, self._text = self._text[:size], self._text[size:]
        name = source.name if source.name == TARGET else canonical(source.name)
        return {"text": text, "source": name, "round": source.round}

    def _complete(self) -> int:
        """How many of the tokens that are held have text, or are followed by one that has, all of it released."""
        count = size = 0
        for at, (characters, _) in enumerate(self._held, 1):
            size += characters
            if size > len(self._text):
                break
            if characters:
                count = at
        return count
