"""What benchmark scripts share: the model's own answers to prompts, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import outpace
from outpace.core.errors import BadInput
from outpace.engine.known_answers import KnownAnswer, known_answers
from outpace.engine.request import Request
from outpace.methods.registry import build
from outpace.prompts.prompt import Prompt

_TOGETHER = 8


def answered(
    model: outpace.Model,
    prompts: Sequence[Prompt],
    tokens: int,
    layers: Iterable[int] = (),
    stop_ids: frozenset[int] = frozenset(),
) -> list[KnownAnswer]:
    """The greedy answers, of ``tokens`` at most, with the hidden states of ``layers``. Close them."""
    plain, wanted = build("none", model.context()), set(layers)
    texts = [tuple(model.tokenizer.chat(one.messages)) for one in prompts]
    requests = [Request(text, plain, max_new_tokens=tokens, stop_ids=stop_ids) for text in texts]
    found: list[KnownAnswer] = []
    for at in range(0, len(requests), _TOGETHER):
        found += known_answers(model.target, requests[at : at + _TOGETHER], wanted)
    return found


def exit_status(work: Callable[[], None]) -> int:
    """Of a script that does ``work``: 2, and one line that says why, where the input is bad."""
    try:
        work()
    except (BadInput, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
