"""Which tokens end an answer, collected from all of a model's files that name any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outpace.models.tokenizers import HFTokenizer

_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|return|>",
    "</s>",
)


def stop_ids(model: Any, tokenizer: HFTokenizer, vocab_size: int) -> frozenset[int]:
    """EOS ids of the generation configuration, the configuration and the tokenizer, and end-of-turn tokens.

    An end-of-turn token counts when it is a special token of the vocabulary and the chat template writes it.
    """
    inner, template = tokenizer.inner, tokenizer.template
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, model.config.get_text_config(), inner):
        found.update(_ids(getattr(holder, "eos_token_id", None)))
    special = {str(token): index for index, token in inner.added_tokens_decoder.items() if token.special}
    found.update(special[token] for token in _END_OF_TURN if token in special and token in template)
    return frozenset(token for token in found if 0 <= token < vocab_size)


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, Iterable) else [int(value)]
