"""Which tokens end an answer, collected from all of a model's files that name any."""

from __future__ import annotations

from typing import Any

from outpace.core.errors import BadInput
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

    An end-of-turn token counts when it is a special token of the vocabulary and the chat template writes it. Raises
    BadInput for an EOS id that is no whole number.
    """
    inner, template = tokenizer.inner, tokenizer.template
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, model.config.get_text_config(), inner):
        found.update(_ids(getattr(holder, "eos_token_id", None)))
    special = {str(token): index for index, token in inner.added_tokens_decoder.items() if token.special}
    found.update(special[token] for token in _END_OF_TURN if token in special and token in template)
    return frozenset(token for token in found if 0 <= token < vocab_size)


def _ids(value: Any) -> list[int]:
    found = list(value) if isinstance(value, list | tuple | set) else [] if value is None else [value]
    wrong = next((token for token in found if not isinstance(token, int)), None)
    if wrong is not None:
        raise BadInput(f"the model's eos_token_id is unusable: {wrong!r} is no whole number; correct its configuration")
    return found
