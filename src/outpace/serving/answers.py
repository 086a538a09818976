"""Answers as OpenAI's API writes them, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from outpace.core.version import __version__
from outpace.engine.best_of import best_of
from outpace.engine.populations.answers import Answer
from outpace.engine.request import Generation, Logprob
from outpace.models.base import ChatTokenizer
from outpace.serving.jobs import Job, Piece
from outpace.serving.tool_parser import Released, ToolParser
from outpace.serving.trace import Tracer
from outpace.serving.usage import chat_logprobs, completion_logprobs, counts, usage

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
    """``usages``: whether chunks have a field ``usage``, which is null in all but the last; with ``counting`` it has
    the number of tokens so far."""

    job: Job
    tokenizer: ChatTokenizer
    logprobs: bool
    usages: bool
    counting: bool = field(default=False, kw_only=True)
    _given: int = field(default=0, kw_only=True)
    """Tokens of the pieces so far."""
    _tracers: dict[int, Tracer] = field(default_factory=dict, kw_only=True)

    def _object(self, kind: str, choices: Seq[Json], **more: Any) -> Json:
        if (lossy := self.job.requests[0].method.lossy) is not None:
            more = {"lossy": lossy, **more}  # in every chunk: not all callers ask for the usage
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.job.created,
            "model": self.job.model,
            "system_fingerprint": FINGERPRINT,
            "choices": list(choices),
            **more,
        }

    def _trace(self, piece: Piece) -> list[Json]:
        """Entries of the field ``trace`` for a part of an answer; none where the request does not ask for them."""
        if not self.job.requests[0].sources:
            return []
        tracer = self._tracers.setdefault(piece.index, Tracer(self.tokenizer))
        return tracer.push(piece.text, piece.tokens, piece.sources, last=piece.finish_reason is not None)

    def _whole_trace(self, one: Generation | Answer) -> Json:
        """The field ``trace`` of a whole answer, if the request asks for it."""
        if not one.request.sources:
            return {}
        return {"trace": Tracer(self.tokenizer).push(one.text, one.tokens, one.sources, last=True)}

    def _chunk(self, kind: str, choices: Seq[Json]) -> Json:
        if not self.usages:
            return self._object(kind, choices)
        return self._object(kind, choices, usage=counts(self.job.prompt_tokens, self._given) if self.counting else None)


@dataclass(slots=True)
class ChatAnswers(_Answers):
    """Answers of /v1/chat/completions. ``parser``: reads calls of tools; a copy of it for each choice."""

    parser: ToolParser | None = None
    _parsers: dict[int, ToolParser] = field(default_factory=dict)
    _kind = "chat.completion.chunk"

    def whole(self) -> Json:
        choices = [self._choice(index, one) for index, one in self.job.answers]
        return self._object("chat.completion", choices, usage=usage(self.job), service_tier="default")

    def begin(self) -> Iterator[Json]:
        for index in range(len(self.job.requests)):
            yield self._delta(index, {"role": "assistant", "content": "", "refusal": None})

    def chunks(self, piece: Piece) -> Iterator[Json]:
        self._given += len(piece.tokens)
        parser = self._parser(piece.index)
        found = Released(piece.text) if parser is None else parser.push(piece.text, piece.tokens)
        if parser is not None and piece.finish_reason is not None:
            rest = parser.finish(piece.finish_reason)
            found = Released(found.content + rest.content, [*found.calls, *rest.calls])
        logprobs = chat_logprobs(self.tokenizer, piece.logprobs) if piece.logprobs else None
        trace = self._trace(piece)
        if found.content or logprobs or trace:
            yield self._delta(piece.index, {"content": found.content}, logprobs, trace=trace)
        for call in found.calls:
            yield self._delta(piece.index, {"tool_calls": [call]})
        if piece.finish_reason is not None:
            yield self._delta(piece.index, {}, finish_reason=_reason(piece.finish_reason, parser))

    def usage_chunk(self) -> Json:
        return self._object(self._kind, [], usage=usage(self.job))

    def _choice(self, index: int, one: Generation | Answer) -> Json:
        content: str | None = one.text
        parser = self._parser(index)
        if parser is not None:
            parser.push(one.text, one.tokens)
            parser.finish(one.finish_reason)
            content = parser.content or (None if parser.calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if parser is not None and parser.calls:
            message["tool_calls"] = [call.shown() for call in parser.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.tokenizer, one.logprobs) if self.logprobs else None,
            "finish_reason": _reason(one.finish_reason, parser),
            **self._whole_trace(one),
        }

    def _delta(
        self,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
        trace: Seq[Json] = (),
    ) -> Json:
        choice: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk(self._kind, [choice | ({"trace": list(trace)} if trace else {})])

    def _parser(self, index: int) -> ToolParser | None:
        if self.parser is not None and index not in self._parsers:
            self._parsers[index] = self.parser.copy()
        return self._parsers.get(index)


@dataclass(slots=True)
class CompletionAnswers(_Answers):
    """Answers of /v1/completions: ``n`` choices for each of the prompts, the best of ``best_of`` that were decoded.

    ``prompts``: the prompts' texts, where they are repeated before the answers. ``ids``: choices have the ids of their
    tokens; ``as_ids``: log-probabilities name tokens by id.
    """

    n: int
    best_of: int
    prompts: Seq[str] | None = None
    ids: bool = field(default=False, kw_only=True)
    as_ids: bool = field(default=False, kw_only=True)
    _offsets: dict[int, int] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)
    _kind = "text_completion"

    def whole(self) -> Json:
        choices = []
        for index, one in self._best():
            echoed = self._echoed(index)
            choices.append(
                {
                    "index": index,
                    "text": echoed + one.text,
                    "logprobs": self._logprobs(one.logprobs, len(echoed)) if self.logprobs else None,
                    "finish_reason": _reason(one.finish_reason),
                    **(self._ids(one.tokens, one.request.prompt) if self.ids else {}),
                    **self._whole_trace(one),
                }
            )
        return self._object(self._kind, choices, usage=usage(self.job))

    def begin(self) -> Iterator[Json]:
        for index in range(len(self.job.requests)):
            self._offsets[index] = len(echoed := self._echoed(index))
            if echoed:
                yield self._part(index, echoed, None, None)

    def chunks(self, piece: Piece) -> Iterator[Json]:
        self._given += len(piece.tokens)
        trace = self._trace(piece)
        if not (piece.text or piece.finish_reason or trace or self.ids or (self.logprobs and piece.logprobs)):
            return
        logprobs = None
        if self.logprobs and piece.logprobs:
            offset = self._offsets[piece.index]
            logprobs = self._logprobs(piece.logprobs, offset)
            self._offsets[piece.index] = offset + sum(
                len(self.tokenizer.token_text(one.token)) for one in piece.logprobs
            )
        reason = None if piece.finish_reason is None else _reason(piece.finish_reason)
        prompt = None if piece.index in self._begun else self.job.requests[piece.index].prompt
        self._begun.add(piece.index)
        ids = self._ids(piece.tokens, prompt) if self.ids else {}
        yield self._part(piece.index, piece.text, logprobs, reason, trace, ids)

    def usage_chunk(self) -> Json:
        return self._object(self._kind, [], usage=usage(self.job))

    def _logprobs(self, found: Seq[Logprob], offset: int) -> Json:
        return completion_logprobs(self.tokenizer, found, offset, as_ids=self.as_ids)

    @staticmethod
    def _ids(tokens: Seq[int], prompt: Seq[int] | None) -> Json:
        """The ids of an answer's tokens, or of a part's; those of the prompt are in the first part alone."""
        return {"token_ids": list(tokens), "prompt_token_ids": None if prompt is None else list(prompt)}

    def _part(
        self,
        index: int,
        text: str,
        logprobs: Json | None,
        reason: str | None,
        trace: Seq[Json] = (),
        ids: Json | None = None,
    ) -> Json:
        choice: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **(ids or {})}
        return self._chunk(self._kind, [choice | ({"trace": list(trace)} if trace else {})])

    def _echoed(self, index: int) -> str:
        return "" if self.prompts is None else self.prompts[index // self.n]

    def _best(self) -> Seq[tuple[int, Generation | Answer]]:
        """Of each prompt's answers those with the highest mean log-probability of a token, the best first; numbered."""
        if self.best_of == self.n:
            return self.job.answers
        found = self.job.generations
        groups = [found[at : at + self.best_of] for at in range(0, len(found), self.best_of)]
        return list(enumerate(one for group in groups for one in best_of(group, self.n)))


def _reason(reason: str | None, parser: ToolParser | None = None) -> str:
    """OpenAI's reason. An answer that was cut short within a call ends for its length: the call is not to be made."""
    called = parser is not None and bool(parser.calls) and (parser.complete or reason != "length")
    return "tool_calls" if called else reason or "stop"
