"""generate and agenerate: functions of a model, and its methods of the same names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Unpack, overload

from outpace.api.batch_progress import BatchProgress
from outpace.api.options import GenerateOptions, with_options
from outpace.api.prompt_forms import Batch, Other, Prompt, SinglePrompt
from outpace.api.requests import Asked, LoadedModel, ask
from outpace.api.result import Result
from outpace.core.errors import BadInput
from outpace.engine.request import Generation
from outpace.engine.shared_decoder import SharedDecoder, Ticket


@overload
def generate(
    model: LoadedModel,
    prompt: SinglePrompt,
    *,
    n: None = None,
    progress: bool | None = None,
    **options: Unpack[GenerateOptions],
) -> Result: ...
@overload
def generate(
    model: LoadedModel,
    prompt: SinglePrompt,
    *,
    n: int,
    progress: bool | None = None,
    **options: Unpack[GenerateOptions],
) -> list[Result]: ...
@overload
def generate(
    model: LoadedModel,
    prompt: Batch,
    *,
    n: None = None,
    progress: bool | None = None,
    **options: Unpack[GenerateOptions],
) -> list[Result]: ...
@overload
def generate(
    model: LoadedModel, prompt: Batch, *, n: int, progress: bool | None = None, **options: Unpack[GenerateOptions]
) -> list[list[Result]]: ...
@overload
def generate(
    model: LoadedModel,
    prompt: Other,
    *,
    n: int | None = None,
    progress: bool | None = None,
    **options: Unpack[GenerateOptions],
) -> Any: ...
@with_options
def generate(
    model: LoadedModel, prompt: Prompt, *, n: int | None = None, progress: bool | None = None, **options: Any
) -> Any:
    """Generate the answer to a prompt, or the answers to a batch of prompts.

    model: what :func:`outpace.load` returned.
    prompt: a text, a list of messages, token ids (a list, or a tensor with one dimension); or a batch: a list of any of
        these, a tensor with two dimensions, or what a tokenizer returned for several texts. All forms are listed in
        :mod:`outpace.api.prompt_forms`.
    n: samples of each prompt, with the seeds seed, seed + 1, ...; None gives one Result instead of a list. Above 1 it
        needs a temperature. With ``num_beams`` the n best beams, at most that many. Also called num_return_sequences.
    progress: show a bar on standard error; None shows one at a terminal, for a batch that takes longer than a second.

    Returns a :class:`Result`; for a batch a list of them, in its order. With ``n`` there is a list of n in place of
    each Result. Prompts of a batch are decoded side by side, at most ``model.shared.limits.max_batch`` (8) at once. May
    be called from several threads.

    Raises BadInput, in one line, for options and prompts that cannot be honoured, before anything is decoded, and
    when a logits processor fails.

    >>> import outpace
    >>> model = outpace.load("smollm2")                                                # doctest: +SKIP
    >>> print(model.generate("Why is the sky blue?", max_new_tokens=64))               # doctest: +SKIP
    >>> answers = model.generate(["Name a colour.", "Name a fruit."], temperature=0.7) # doctest: +SKIP
    """
    asked = ask(model, prompt, _samples(n, options), options)
    with BatchProgress(len(asked.requests), progress) as bar:
        return asked.shaped(_finished(model.shared, asked, bar), model.tokenizer)


@overload
async def agenerate(
    model: LoadedModel,
    prompt: SinglePrompt,
    *,
    n: None = None,
    progress: bool | None = None,
    **options: Unpack[GenerateOptions],
) -> Result: ...
@overload
async def agenerate(
    model: LoadedModel,
    prompt: SinglePrompt,
    *,
    n: int,
    progress: bool | None = None,
    **options: Unpack[GenerateOptions],
) -> list[Result]: ...
@overload
async def agenerate(
    model: LoadedModel,
    prompt: Batch,
    *,
    n: None = None,
    progress: bool | None = None,
    **options: Unpack[GenerateOptions],
) -> list[Result]: ...
@overload
async def agenerate(
    model: LoadedModel, prompt: Batch, *, n: int, progress: bool | None = None, **options: Unpack[GenerateOptions]
) -> list[list[Result]]: ...
@overload
async def agenerate(
    model: LoadedModel,
    prompt: Other,
    *,
    n: int | None = None,
    progress: bool | None = None,
    **options: Unpack[GenerateOptions],
) -> Any: ...
@with_options
async def agenerate(
    model: LoadedModel, prompt: Prompt, *, n: int | None = None, progress: bool | None = None, **options: Any
) -> Any:
    """Like :func:`generate`, for asyncio: the event loop is free while the model decodes.

    model, prompt, n, progress: as for :func:`generate`. Calls that run at the same time share the model's forwards, as
    a batch does, from one event loop or several. Cancelling the task takes its requests out of the batch. Raises
    BadInput as :func:`generate` does.

    >>> import asyncio, outpace
    >>> async def both(model: outpace.Model) -> None:
    ...     print(await asyncio.gather(model.agenerate("Name a colour."), model.agenerate("Name a fruit.")))
    >>> asyncio.run(both(outpace.load("smollm2")))  # doctest: +SKIP
    """
    asked = await asyncio.to_thread(ask, model, prompt, _samples(n, options), options)
    with BatchProgress(len(asked.requests), progress) as bar:
        return asked.shaped(await _finished_async(model.shared, asked, bar), model.tokenizer)


def _samples(n: int | None, options: dict[str, Any]) -> int | None:
    """``n``, also under the name that transformers has for it."""
    other = options.pop("num_return_sequences", None)
    if n is not None and other is not None:
        raise BadInput("n and num_return_sequences are the same option; give one of them")
    return other if n is None else n


def _finished(decoder: SharedDecoder, asked: Asked, bar: BatchProgress) -> list[Generation]:
    """Run the requests, wait for all, and return them in order. The first error cancels the others."""
    ended = SimpleQueue[int]()
    with _running(decoder, asked, ended.put) as tickets:
        for _ in tickets:
            _check(asked, tickets, ended.get())
            bar.advance()
    return [ticket.finished() for ticket in tickets]


async def _finished_async(decoder: SharedDecoder, asked: Asked, bar: BatchProgress) -> list[Generation]:
    """As :func:`_finished`, awaited."""
    ended: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    with _running(decoder, asked, lambda at: loop.call_soon_threadsafe(ended.put_nowait, at)) as tickets:
        for _ in tickets:
            _check(asked, tickets, await ended.get())
            bar.advance()
    return [ticket.finished() for ticket in tickets]


@contextmanager
def _running(decoder: SharedDecoder, asked: Asked, ended: Callable[[int], object]) -> Iterator[list[Ticket]]:
    """The requests under way; an error inside cancels those that are left.

    ``ended`` is called on the decoding thread with the index of each request that has ended.
    """

    def told(at: int, ticket: Ticket, piece: str | None) -> None:
        if piece is None:
            ended(at)

    tickets = decoder.submit([(one, partial(told, at)) for at, one in enumerate(asked.requests)])
    try:
        yield tickets
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise


def _check(asked: Asked, tickets: list[Ticket], at: int) -> None:
    try:
        tickets[at].finished()
    except BadInput as error:
        raise asked.named(at, error) from error.__cause__
