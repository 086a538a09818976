"""The Python front door: generate and stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Logprob, Request
from outpace.methods.named_weights import DraftModels, Heads
from outpace.methods.registry import Context, build
from outpace.model import Model
from outpace.models.base import Message

Prompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. ``tokens`` are the new ids without EOS; ``metrics`` as in docs/metrics.md."""

    text: str
    tokens: list[int]
    finish_reason: str
    metrics: dict[str, Any]
    logprobs: list[Logprob]

    def __str__(self) -> str:
        return self.text


def prompt_ids(model: Model, prompt: Prompt, raw: bool = False) -> list[int]:
    """Token ids of a prompt: a text is one user turn unless ``raw``; a list of messages is a conversation."""
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt) if raw else model.tokenizer.chat([{"role": "user", "content": prompt}])
    return model.tokenizer.chat(prompt)


def request(
    model: Model,
    prompt: Prompt,
    *,
    method: str | Method = "auto",
    settings: Mapping[str, Any] | None = None,
    rule: str | None = None,
    draft_model: DraftModels = None,
    datastore: str | Path | None = None,
    head: Heads = None,
    namespace: str = "",
    raw: bool = False,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    references: Sequence[str] = (),
    ignore_eos: bool = False,
    trace: bool = False,
    params: SamplingParams | None = None,
    **sampling: Any,
) -> Request:
    """A Request from what a person would write. ``sampling`` are fields of SamplingParams, instead of ``params``'s.

    ``namespace``: what the method learns is kept under this name, for later requests of the same model and method that
    give it too; without one nothing outlives a request.
    """
    if isinstance(method, str) and namespace:
        context = model.context(draft_model=draft_model, datastore=datastore, head=head)
        method = _remembered(model, context, method, settings, rule, datastore)
    return Request(
        prompt=tuple(prompt_ids(model, prompt, raw)),
        method=model.method(method, settings, rule=rule, draft_model=draft_model, datastore=datastore, head=head),
        params=replace(params or SamplingParams(), **sampling),
        max_new_tokens=max_new_tokens,
        stop_ids=frozenset() if ignore_eos else model.eos_ids,
        stop_strings=tuple(stop),
        references=tuple(tuple(model.tokenizer.encode(text)) for text in references),
        namespace=namespace,
        trace=trace,
    )


def _remembered(
    model: Model,
    context: Context,
    method: str,
    settings: Mapping[str, Any] | None,
    rule: str | None,
    datastore: str | Path | None,
) -> Method:
    """The method as it was built for an earlier request: what namespaces have learned is kept in it."""
    store = None if datastore is None else (str(datastore), _changed(datastore))
    weights = tuple((one.kind, one.name, one.key) for one in context.bindings.named)
    key = (method, repr(sorted((settings or {}).items())), rule, store, weights)
    known = model.learned.get(key)
    if known is None:
        # The context keeps the draft models, so that their ids stay theirs.
        known = context, build(method, context, settings, rule)
        model.learned.put(key, known)
    return known[1]


def _changed(file: str | Path) -> int | None:
    path = Path(file)
    return path.stat().st_mtime_ns if path.exists() else None  # what is not there is refused in words, later


def result(generation: Generation) -> Result:
    """The public face of a finished generation. Raises the error that ended it, if one did."""
    generation.raise_error()
    return Result(
        text=generation.text,
        tokens=list(generation.tokens),
        finish_reason=generation.finish_reason or "",
        metrics=generation.metrics.figures(),
        logprobs=list(generation.logprobs),
    )


def generate(model: Model, prompt: Prompt, **options: Any) -> Result:
    """Generate an answer. Options are those of :func:`request`: method, temperature, max_new_tokens, stop, ..."""
    decoder = Decoder(model.target, model.tokenizer)
    generation = decoder.submit(request(model, prompt, **options))
    decoder.run()
    return result(generation)


def stream(model: Model, prompt: Prompt, **options: Any) -> Iterator[str]:
    """Like :func:`generate`, yielding text as it is decoded."""
    decoder = Decoder(model.target, model.tokenizer)
    generation = decoder.submit(request(model, prompt, **options))
    yield from decoder.stream(generation)
    generation.raise_error()
