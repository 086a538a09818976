"""From a GGUF file to what transformers loads at once: safetensors, configuration and tokenizer files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.models.gguf_header import GGUFHeader
from outpace.models.gguf_rope import rope_parameters
from outpace.models.quiet import explained

if TYPE_CHECKING:
    import torch

CONVERTER = 1
"""Raised whenever the same file would be converted differently, so that older conversions are not used again."""

# Vocabularies whose merges were learned with every digit apart, by llama.cpp's name of the pre-tokenizer. Without the
# split, white space before a number is cut in another place than in training.
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def read(header: GGUFHeader, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model, dense and in ``dtype``, and its tokenizer. Raises BadInput when the file cannot be converted."""
    import torch
    from transformers import AutoModelForCausalLM

    with explained(f"cannot convert '{header.path}' (architecture {header.architecture})"), _no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(**_place(header), dtype=dtype, **_dense())
    tokenizer = read_tokenizer(header)
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise BadInput(f"'{header.path}' is broken: {name} holds values that are not finite; download it again")
    _complete_config(model, header)
    return model, tokenizer


def read_tokenizer(header: GGUFHeader) -> Any:
    """The tokenizer alone. Raises BadInput when the file cannot be converted."""
    from transformers import AutoTokenizer

    with explained(f"cannot convert '{header.path}' (architecture {header.architecture})"):
        tokenizer = AutoTokenizer.from_pretrained(**_place(header))
    _correct_splitting(tokenizer, header)
    return tokenizer


def _place(header: GGUFHeader) -> dict[str, str]:
    return {"pretrained_model_name_or_path": str(header.path.parent), "gguf_file": header.path.name}


def write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save both into an existing folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dense() -> dict[str, Any]:
    """The option that asks for plain weights, where transformers would otherwise keep them packed in 4 bits."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _complete_config(model: Any, header: GGUFHeader) -> None:
    """What stands in the file and the converter does not carry over: rotary scaling, further end-of-turn ids."""
    rope = getattr(model.config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type", "default") == "default":
        rope.update(rope_parameters(header, float(rope.get("rope_theta", 10000.0))) or {})
    known = model.generation_config.eos_token_id
    ids = set(known if isinstance(known, list) else [] if known is None else [known])
    for kind in ("eos", "eot", "eom"):
        ids.update({header.metadata[key]} if (key := f"tokenizer.ggml.{kind}_token_id") in header.metadata else ())
    model.generation_config.eos_token_id = sorted(ids) or None
    model.config.__dict__.pop("_model_name_or_path", None)


def _correct_splitting(tokenizer: Any, header: GGUFHeader) -> None:
    if header.metadata.get("tokenizer.ggml.pre") not in _DIGITS_APART:
        return
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The converter's bar does not listen to transformers' switch."""
    from transformers import modeling_gguf_pytorch_utils as converter

    bar = getattr(converter, "tqdm", None)
    if bar is None:
        yield
        return
    converter.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        converter.tqdm = bar
