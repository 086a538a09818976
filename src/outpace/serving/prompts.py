"""Prompts of /v1/completions: a text, token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.core.errors import BadInput
from outpace.models.base import ChatTokenizer
from outpace.serving.errors import ApiError

MOST_PROMPTS = 128


def completion_prompts(
    tokenizer: ChatTokenizer, given: str | Seq[str] | Seq[int] | Seq[Seq[int]], *, echo: bool
) -> tuple[list[list[int]], list[str]]:
    """Token ids of every prompt; and their texts, where they are to be repeated."""
    several: list[str | list[int]]
    if isinstance(given, str):
        several = [given]
    elif given and all(isinstance(one, int) for one in given):
        several = [[int(one) for one in given if isinstance(one, int)]]
    else:
        several = [one if isinstance(one, str) else list(one) for one in given if not isinstance(one, int)]
    if not several or len(several) > MOST_PROMPTS:
        raise ApiError(f"'prompt' must hold 1 to {MOST_PROMPTS} prompts, not {len(several)}", param="prompt")
    ids = []
    for at, one in enumerate(several):
        try:
            ids.append(tokenizer.encode(one) if isinstance(one, str) else one)
        except BadInput as error:
            raise ApiError(f"prompt {at + 1}: {error}", param="prompt") from error
        if not ids[-1]:
            raise ApiError(f"prompt {at + 1} is empty; give at least one token", param="prompt")
    texts = [one if isinstance(one, str) else tokenizer.decode(one) for one in several] if echo else []
    return ids, texts
