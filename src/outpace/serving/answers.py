"""Answers as OpenAI's API writes them, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outpace.core.version import __version__
from outpace.engine.request import Generation
from outpace.models.base import ChatTokenizer
from outpace.serving.jobs import Job, Piece
from outpace.serving.tools import Call, ToolParser
from outpace.serving.usage import chat_logprobs, completion_logprobs, usage

FINGERPRINT = f"outpace-{__version__}"
Json = dict[str, Any]


class Answers(Protocol):
    """The two forms of one call's answer."""

    def whole(self) -> Json:
        """The answer, after its end."""
        ...

    def begin(self) -> Iterator[Json]:
        """Chunks before the first piece."""
        ...

    def chunks(self, piece: Piece) -> Iterator[Json]:
        """The chunks of one piece."""
        ...

    def usage_chunk(self) -> Json:
        """The last chunk, with what was used."""
        ...


@dataclass(slots=True)
class _Answers:
    """``usages``: whether chunks have a field ``usage``, which is null in all but the last."""

    job: Job
    tokenizer: ChatTokenizer
    logprobs: bool
    usages: bool

    def _object(self, kind: str, choices: Seq[Json], **more: Any) -> Json:
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.job.created,
            "model": self.job.model,
            "system_fingerprint": FINGERPRINT,
            "choices": list(choices),
            **more,
        }

    def _chunk(self, kind: str, choices: Seq[Json]) -> Json:
        return self._object(kind, choices, **({"usage": None} if self.usages else {}))


@dataclass(slots=True)
class ChatAnswers(_Answers):
    """Answers of /v1/chat/completions. ``parser``: reads calls of tools; a copy of it for each choice."""

    parser: ToolParser | None = None
    _parsers: dict[int, ToolParser] = field(default_factory=dict)
    _kind = "chat.completion.chunk"

    def whole(self) -> Json:
        choices = [self._choice(index, one) for index, one in enumerate(self.job.generations)]
        return self._object("chat.completion", choices, usage=usage(self.job), service_tier="default")

    def begin(self) -> Iterator[Json]:
        for index in range(len(self.job.requests)):
            yield self._delta(index, {"role": "assistant", "content": "", "refusal": None})

    def chunks(self, piece: Piece) -> Iterator[Json]:
        parser = self._parser(piece.index)
        text, calls = piece.text, list[Call]()
        if parser is not None:
            text = parser.push(piece.text, piece.tokens)
            if piece.finish_reason is not None:
                rest, calls = parser.finish()
                text += rest
        logprobs = chat_logprobs(self.tokenizer, piece.logprobs) if piece.logprobs else None
        if text or logprobs:
            yield self._delta(piece.index, {"content": text}, logprobs)
        for at, call in enumerate(calls):
            yield self._delta(piece.index, {"tool_calls": [{"index": at, **call.shown()}]})
        if piece.finish_reason is not None:
            yield self._delta(piece.index, {}, finish_reason=_reason(piece.finish_reason, calls))

    def usage_chunk(self) -> Json:
        return self._object(self._kind, [], usage=usage(self.job))

    def _choice(self, index: int, one: Generation) -> Json:
        content, calls = one.text, list[Call]()
        parser = self._parser(index)
        if parser is not None:
            parser.push(one.text, one.tokens)
            content, calls = parser.divided()
        message: Json = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
        if calls:
            message["tool_calls"] = [call.shown() for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.tokenizer, one.logprobs) if self.logprobs else None,
            "finish_reason": _reason(one.finish_reason, calls),
        }

    def _delta(self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk(self._kind, [choice])

    def _parser(self, index: int) -> ToolParser | None:
        if self.parser is not None and index not in self._parsers:
            self._parsers[index] = replace(self.parser, tokens=[])
        return self._parsers.get(index)


@dataclass(slots=True)
class CompletionAnswers(_Answers):
    """Answers of /v1/completions: ``n`` choices for each of the prompts, the best of ``best_of`` that were decoded.

    ``prompts``: the prompts' texts, where they are repeated before the answers.
    """

    n: int
    best_of: int
    prompts: Seq[str] | None = None
    _offsets: dict[int, int] = field(default_factory=dict)
    _kind = "text_completion"

    def whole(self) -> Json:
        choices = []
        for index, one in enumerate(self._best()):
            echoed = self._echoed(index)
            choices.append(
                {
                    "index": index,
                    "text": echoed + one.text,
                    "logprobs": completion_logprobs(self.tokenizer, one.logprobs, len(echoed))
                    if self.logprobs
                    else None,
                    "finish_reason": _reason(one.finish_reason, ()),
                }
            )
        return self._object(self._kind, choices, usage=usage(self.job))

    def begin(self) -> Iterator[Json]:
        for index in range(len(self.job.requests)):
            self._offsets[index] = len(echoed := self._echoed(index))
            if echoed:
                yield self._part(index, echoed, None, None)

    def chunks(self, piece: Piece) -> Iterator[Json]:
        if not (piece.text or piece.finish_reason or (self.logprobs and piece.logprobs)):
            return
        logprobs = None
        if self.logprobs and piece.logprobs:
            offset = self._offsets[piece.index]
            logprobs = completion_logprobs(self.tokenizer, piece.logprobs, offset)
            self._offsets[piece.index] = offset + sum(map(len, logprobs["tokens"]))
        reason = None if piece.finish_reason is None else _reason(piece.finish_reason, ())
        yield self._part(piece.index, piece.text, logprobs, reason)

    def usage_chunk(self) -> Json:
        return self._object(self._kind, [], usage=usage(self.job))

    def _part(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return self._chunk(self._kind, [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])

    def _echoed(self, index: int) -> str:
        return "" if self.prompts is None else self.prompts[index // self.n]

    def _best(self) -> list[Generation]:
        """Of each prompt's answers those with the highest mean log-probability of a token, the best first."""
        found = self.job.generations
        if self.best_of == self.n:
            return found
        groups = [found[at : at + self.best_of] for at in range(0, len(found), self.best_of)]
        return [one for group in groups for one in sorted(group, key=_mean_logprob, reverse=True)[: self.n]]


def _mean_logprob(one: Generation) -> float:
    return sum(each.logprob for each in one.logprobs) / max(1, len(one.logprobs))


def _reason(reason: str | None, calls: Seq[Call]) -> str:
    return "tool_calls" if calls else reason or "stop"
