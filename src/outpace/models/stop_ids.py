"""Which tokens end an answer, collected from all of a model's files that name any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.files import read_json
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


_DEFAULT_EOS = {"llama": 2, "mistral": 2, "gemma": 1, "gemma2": 1, "gemma3_text": 1, "phi3": 32000}
"""The EOS id of a model type whose config.json names none, as transformers has it."""


def stop_ids(model: Any, tokenizer: HFTokenizer, vocab_size: int) -> frozenset[int]:
    """The stop ids of a transformers model. Raises BadInput as :func:`stop_ids_of` does."""
    config = model.config
    holders = (getattr(model, "generation_config", None), config, config.get_text_config())
    return stop_ids_of([{"eos_token_id": getattr(one, "eos_token_id", None)} for one in holders], tokenizer, vocab_size)


def stop_ids_of(holders: Sequence[Mapping[str, Any]], tokenizer: HFTokenizer, vocab_size: int) -> frozenset[int]:
    """EOS ids of the model's configurations and of the tokenizer, and end-of-turn tokens.

    ``holders``: the generation configuration, the configuration and such, of which ``eos_token_id`` is read. An
    end-of-turn token counts when it is a special token of the vocabulary and the chat template writes it. Raises
    BadInput for an EOS id that is no whole number.
    """
    inner, template = tokenizer.inner, tokenizer.template
    found = set(_ids(getattr(inner, "eos_token_id", None)))
    for holder in holders:
        found.update(_ids(holder.get("eos_token_id")))
    special = {str(token): index for index, token in inner.added_tokens_decoder.items() if token.special}
    found.update(special[token] for token in _END_OF_TURN if token in special and token in template)
    return frozenset(token for token in found if 0 <= token < vocab_size)


def configurations(folder: Path) -> list[dict[str, Any]]:
    """What a folder's config.json and generation_config.json say, for :func:`stop_ids_of`.

    A config.json without an EOS id means its model type's default. Raises BadInput for a file that cannot be read.
    """
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    eos = _DEFAULT_EOS.get(kind) if isinstance(kind, str) else None
    generation = folder / "generation_config.json"
    return [{"eos_token_id": eos} | config, *([read_json(generation)] if generation.exists() else [])]


def _ids(value: Any) -> list[int]:
    found = list(value) if isinstance(value, list | tuple | set) else [] if value is None else [value]
    wrong = next((token for token in found if not isinstance(token, int)), None)
    if wrong is not None:
        raise BadInput(f"the model's eos_token_id is unusable: {wrong!r} is no whole number; correct its configuration")
    return found
