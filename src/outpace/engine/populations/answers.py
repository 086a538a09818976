"""Answers of a group: its best hypotheses, as a request of one sequence has its answer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outpace.core.text import TextStream, Tokenizer
from outpace.engine.populations.base import Hypothesis
from outpace.engine.request import Generation, Logprob, Request, TokenSource


@dataclass(frozen=True, slots=True)
class Answer:
    """One hypothesis: ``tokens`` without a stop token, ``text`` without a stop string. Log-probabilities of its tokens
    and their sources are not recorded."""

    request: Request
    hypothesis: Hypothesis
    tokens: list[int]
    text: str
    logprobs: Seq[Logprob] = ()
    sources: Seq[TokenSource] = ()

    @property
    def finish_reason(self) -> str:
        """Why it ended."""
        return self.hypothesis.finish_reason


def answers(one: Generation, tokenizer: Tokenizer | None, most: int | None = None) -> list[Answer]:
    """The first ``most`` hypotheses of a group that has ended (None: all), its answer first. Fewer where there are."""
    return [_answer(one.request, found, tokenizer) for found in one.hypotheses[:most]]


def answer_tokens(request: Request, found: Hypothesis) -> list[int]:
    """A hypothesis without a stop token."""
    tokens = list(found.tokens)
    if tokens[-1] in request.stop_ids:
        tokens.pop()
    return tokens


def _answer(request: Request, found: Hypothesis, tokenizer: Tokenizer | None) -> Answer:
    tokens = answer_tokens(request, found)
    if tokenizer is None:
        return Answer(request, found, tokens, "")
    stream = TextStream(tokenizer, request.stop_strings)
    for token in tokens:
        stream.push(token)
    stream.finish()
    return Answer(request, found, tokens, stream.text)
