"""Which class transformers chooses for a folder's tokenizer, and whether it takes ``tokenizer.json`` as it is.

The class follows from ``tokenizer_class`` and the model's type. The generic class takes ``tokenizer.json`` as it is;
others rebuild the pipeline in their own code and keep only the file's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

GENERIC = "TokenizersBackend"
_GENERIC_NAMES = frozenset((GENERIC, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend"))
CLASS_OF_TYPE: dict[str, str | None] = {
    "llama": None,
    "mistral": GENERIC,
    "phi3": GENERIC,
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
}
"""The class that transformers has for a model type; None: the one that the folder names."""
OWN_CLASS_WINS = frozenset(("qwen2", "phi3"))
"""Types for which transformers takes that class whatever the folder names."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a class of transformers builds around a byte-level vocabulary, and its default special tokens."""

    normalizer: Any
    pre_tokenizer: Any
    defaults: Mapping[str, str]


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END = "<|endoftext|>"
REBUILT = {
    "GPT2Tokenizer": Pipeline(None, _BYTE_LEVEL, {"unk_token": _END, "bos_token": _END, "eos_token": _END}),
    "Qwen2Tokenizer": Pipeline(
        {"type": "NFC"},
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _QWEN_WORDS}, "behavior": "Isolated", "invert": False},
                _BYTE_LEVEL | {"use_regex": False},
            ],
        },
        {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    ),
}


class NotPlain(Exception):
    """This folder's tokenizer is one that only transformers reads as it should be read."""


def chosen_class(model: Mapping[str, Any], config: Mapping[str, Any], backend: Tokenizer) -> str:
    """The class that transformers would take: the generic one, or one of ``REBUILT``."""
    kind = model.get("model_type")
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    if kind not in CLASS_OF_TYPE or not isinstance(declared, str):
        raise NotPlain
    declared, own = declared.removesuffix("Fast"), CLASS_OF_TYPE[kind]
    llama_in_name = declared == "LlamaTokenizer" and kind not in OWN_CLASS_WINS and _is_byte_level(backend)
    if llama_in_name or own == GENERIC:
        chosen = GENERIC
    else:
        chosen = own if own is not None and kind in OWN_CLASS_WINS else declared
    if chosen in _GENERIC_NAMES:
        return GENERIC
    if chosen not in REBUILT:
        raise NotPlain
    return chosen


def _is_byte_level(backend: Tokenizer) -> bool:
    return any('"ByteLevel"' in json.dumps(_state(part)) for part in (backend.pre_tokenizer, backend.decoder))


def check_rebuilt(pipeline: Pipeline, backend: Tokenizer, added: Mapping[str, tuple[int, AddedToken]]) -> None:
    """Raise where a class that builds its own pipeline would make another tokenizer than the file's."""
    model = backend.model
    size = backend.get_vocab_size(with_added_tokens=False)
    beyond = sorted(index for index, _ in added.values() if index >= size)
    alike = (
        type(model).__name__ == "BPE"
        and not model.dropout
        and model.unk_token is None
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and not (model.fuse_unk or model.byte_fallback or model.ignore_merges)
        and _state(backend.normalizer) == pipeline.normalizer
        and _without_offsets(_state(backend.pre_tokenizer)) == _without_offsets(pipeline.pre_tokenizer)
        and (_state(backend.decoder) or {}).get("type") == "ByteLevel"
        and beyond == list(range(size, size + len(beyond)))  # as many as are added get the next ids
    )
    if not alike:
        raise NotPlain


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _without_offsets(state: Any) -> Any:
    """A pre-tokenizer's state without ``trim_offsets``, which changes no token."""
    if isinstance(state, dict):
        return {key: _without_offsets(value) for key, value in state.items() if key != "trim_offsets"}
    return [_without_offsets(one) for one in state] if isinstance(state, list) else state
