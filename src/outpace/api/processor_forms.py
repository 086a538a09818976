"""Logits processors of other libraries as outpace's protocol: states are the token ids so far.

Speculation asks for the distribution after tokens that may be rejected, in any order and more than once. So a processor
that was written to be called once per step is called more often here, with the ids that it is asked about: it must be a
function of what it is given. One that counts its own calls, or remembers earlier ones, cannot be honoured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import BadInput, shown
from outpace.core.processors import LogitsProcessor

_TRANSFORMERS = ("input_ids", "scores")
_PROTOCOL = ("begin", "advance", "process")


@dataclass(frozen=True, slots=True)
class _Ids:
    """The ids so far as the state of a function of them."""

    function: Callable[..., Any]
    label: str

    def begin(self, prompt: Sequence[int]) -> tuple[int, ...]:
        return tuple(prompt)

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)


@dataclass(frozen=True, slots=True)
class TransformersProcessor(_Ids):
    """A LogitsProcessor of transformers: called with ids (1, L) and scores (1, V).

    ``padding``: ids that stand before the prompt in what it is shown, as in a padded batch.
    """

    padding: tuple[int, ...] = ()

    def process(self, state: tuple[int, ...], logits: Tensor) -> Any:
        ids = torch.tensor([(*self.padding, *state)], dtype=torch.long, device=logits.device)
        scores = self.function(ids, logits.clone()[None])  # some write into what they are given
        return scores[0] if isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == 1 else scores


@dataclass(frozen=True, slots=True)
class IdsProcessor(_Ids):
    """A function of the ids of prompt and answer (a list) and the logits (V,)."""

    def process(self, state: tuple[int, ...], logits: Tensor) -> Any:
        return self.function(list(state), logits.clone())


@dataclass(frozen=True, slots=True)
class PromptAndAnswerProcessor:
    """A function of the prompt's ids, the answer's ids (lists) and the logits (V,)."""

    function: Callable[..., Any]
    label: str

    def begin(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(prompt), ()

    def advance(
        self, state: tuple[tuple[int, ...], tuple[int, ...]], token: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return state[0], (*state[1], token)

    def process(self, state: tuple[tuple[int, ...], tuple[int, ...]], logits: Tensor) -> Any:
        return self.function(list(state[0]), list(state[1]), logits.clone())


def read_processors(given: Any, padding: tuple[int, ...] = ()) -> tuple[LogitsProcessor, ...]:
    """One processor or a list of them (also a LogitsProcessorList) as outpace's protocol.

    A processor is one of: an object with ``begin``, ``advance`` and ``process``; one of transformers, or any callable
    whose parameters are named ``input_ids`` and ``scores``; a callable ``(ids, logits) -> logits`` of the ids of prompt
    and answer; a callable ``(prompt_ids, answer_ids, logits) -> logits``. Raises BadInput for anything else.
    ``padding``: see :class:`TransformersProcessor`.
    """
    if not isinstance(given, list | tuple):
        return (_read(given, "processors", padding),)
    found: list[LogitsProcessor] = []
    for at, one in enumerate(given):
        if isinstance(one, list | tuple):  # a LogitsProcessorList among others
            found += read_processors(one, padding)
        else:
            found.append(_read(one, f"processors[{at}]", padding))
    return tuple(found)


def _read(given: Any, name: str, padding: tuple[int, ...]) -> LogitsProcessor:
    if isinstance(given, type):
        raise BadInput(f"{name} is the class {given.__name__}; give an object of it: {given.__name__}(...)")
    if all(callable(getattr(given, part, None)) for part in _PROTOCOL):
        return given  # type: ignore[no-any-return]
    if not callable(given):
        raise BadInput(
            f"{name} must be a logits processor (begin, advance, process), one of transformers, or a function "
            f"(token ids, logits) -> logits, not {shown(given)}"
        )
    label = getattr(given, "__name__", type(given).__name__)
    names = _parameters(given)
    if names is None or tuple(names[:2]) == _TRANSFORMERS:
        return TransformersProcessor(given, label, padding)
    if len(names) == 2:
        return IdsProcessor(given, label)
    if len(names) == 3:
        return PromptAndAnswerProcessor(given, label)
    raise BadInput(
        f"{name} ({label}) takes {len(names)} arguments; a logits processor takes (token ids, logits), or "
        "(prompt ids, answer ids, logits)"
    )


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    """Names of the arguments that it must be given, or None where Python cannot tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        one.name
        for one in found
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
    ]
