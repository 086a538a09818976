"""From a GGUF file to what transformers loads at once: safetensors, configuration and tokenizer files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.models.gguf_header import GGUFHeader, block_of
from outpace.models.gguf_rope import rope_parameters
from outpace.models.quiet import explained, one_line
from outpace.models.weights_check import Stored, check_loaded, check_size, count

if TYPE_CHECKING:
    import torch

CONVERTER = 1
"""Raised whenever the same file would be converted differently, so that older conversions are not used again."""

# Vocabularies whose merges were learned with every digit apart, by llama.cpp's name of the pre-tokenizer. Without the
# split, white space before a number is cut in another place than in training.
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})

COMPUTED = ("rope_", "attn_rot_embd")
"""Beginnings of names of tensors that are no weights: frequencies of rotary embeddings."""


@contextmanager
def _metadata_read_once() -> Iterator[None]:
    """Let transformers read a file's metadata once, and quicker: it does so for each part that it converts.

    A vocabulary is some hundred thousand strings, each of which gguf's reader cuts out of a slow kind of array.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # the library has no types
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            types, at = gguf.GGUFValueType, int(orig_offs) + 12
            if raw_type != types.ARRAY or self.byte_order != "I" or self._get(orig_offs, np.uint32)[0] != types.STRING:
                return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
            count = self._get(orig_offs + 4, np.uint64)
            parts = [self._get(orig_offs, np.uint32), count]
            data = self.data
            for _ in range(int(count[0])):
                length = data[at : at + 8].view(np.uint64)
                end = at + 8 + int(length[0])
                parts += (length, data[at + 8 : end])
                at = end
            found = [types.ARRAY, types.STRING] if count[0] else [types.ARRAY]
            return at - int(orig_offs), parts, list(range(3, len(parts), 2)), found

    from transformers import modeling_gguf_pytorch_utils as converter

    their_reader, parse = gguf.GGUFReader, converter.load_gguf_checkpoint
    parsed = cache(parse)

    def parsed_once(path: Any, return_tensors: bool = False, **more: Any) -> Any:
        return parse(path, return_tensors, **more) if return_tensors else deepcopy(parsed(str(path)))

    gguf.GGUFReader, converter.load_gguf_checkpoint = cache(Reader), parsed_once
    try:
        yield
    finally:
        gguf.GGUFReader, converter.load_gguf_checkpoint = their_reader, parse


@_metadata_read_once()
def read(header: GGUFHeader, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model, dense and in ``dtype``, and its tokenizer.

    Raises BadInput when the file cannot be converted, and unless every weight of the model is one of the file's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    def refusal(why: str) -> BadInput:
        return BadInput(f"the weights in GGUF file '{header.path}' {why}; download it again")

    with explained(f"cannot convert '{header.path}' (architecture {header.architecture})"), _naming_tensors():
        config = AutoConfig.from_pretrained(**_place(header))
        check_size(config, Stored(len(header.tensors), header.parameters), refusal)
        model, report = AutoModelForCausalLM.from_pretrained(
            **_place(header), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **_dense()
        )
    check_loaded(model, report, refusal)
    _check_heads(model.config, header)
    _check_all_used(model, header)
    tokenizer = read_tokenizer(header)
    _complete(model.config, model.generation_config, header)
    return model, tokenizer


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a file says of a model apart from weights and tokenizer, as transformers has it."""

    config: Any
    generation_config: Any

    def save_pretrained(self, folder: Path) -> None:
        """Write both, as a model would."""
        self.config.save_pretrained(folder)
        self.generation_config.save_pretrained(folder)


@_metadata_read_once()
def describe(header: GGUFHeader) -> tuple[Configuration, Any]:
    """The configuration and the tokenizer alone. Raises BadInput when the file cannot be converted."""
    from transformers import AutoConfig, GenerationConfig

    with explained(f"cannot convert '{header.path}' (architecture {header.architecture})"):
        config = AutoConfig.from_pretrained(**_place(header))
        generation = GenerationConfig.from_model_config(config)
    _check_heads(config, header)
    _complete(config, generation, header)
    return Configuration(config, generation), read_tokenizer(header)


def _check_heads(config: Any, header: GGUFHeader) -> None:
    """Raise BadInput where transformers' own default for the heads of keys and values is not llama.cpp's."""
    heads, theirs = header.model.head_count, getattr(config, "num_key_value_heads", None)
    if header.model.head_count_kv is None and theirs not in (None, heads):
        key = f"{header.architecture}.attention.head_count_kv"
        raise BadInput(f"GGUF file '{header.path}' is broken: it lacks the metadata {key}; download it again")


def _check_all_used(model: Any, header: GGUFHeader) -> None:
    """Raise BadInput where the converter has left out weights of the file, such as biases that it does not expect."""
    last = header.model.block_count - header.model.extra_blocks
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    used = sum(
        prod(entry.shape)
        for name, entry in header.tensors.items()
        if not name.startswith(COMPUTED)
        and not ("lm_head.weight" in tied and name == "output.weight")
        and (block_of(name) or 0) < last
    )
    if used > (have := count(model)):
        raise BadInput(
            f"cannot convert '{header.path}' (architecture {header.architecture}): it holds {used:,} weights, and the "
            f"converter has a place for {have:,}; load the model's safetensors instead"
        )


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
    """Save both into an existing folder. ``model``: one of transformers, or a :class:`Configuration`."""
    from transformers import AutoTokenizer

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # As it will be when it is loaded: some classes rebuild the pipeline then, and outpace reads the file's.
    AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).save_pretrained(folder)


def _dense() -> dict[str, Any]:
    """The option that asks for plain weights, where transformers would otherwise keep them packed in 4 bits."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _complete(config: Any, generation: Any, header: GGUFHeader) -> None:
    """What stands in the file and the converter does not carry over: rotary scaling, further end-of-turn ids."""
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type", "default") == "default":
        rope.update(rope_parameters(header, float(rope.get("rope_theta", 10000.0))) or {})
    known = generation.eos_token_id
    ids = set(known if isinstance(known, list) else [] if known is None else [known])
    ids.update(one for one in (header.general.eos, header.general.eot, header.general.eom) if one is not None)
    generation.eos_token_id = sorted(ids) or None
    config.__dict__.pop("_model_name_or_path", None)


def _correct_splitting(tokenizer: Any, header: GGUFHeader) -> None:
    if header.general.pre not in _DIGITS_APART:
        return
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


@contextmanager
def _naming_tensors() -> Iterator[None]:
    """Let an error while tensors are converted say of which one it is.

    In place of the converter's progress bar, which does not listen to transformers' switch.
    """
    from transformers import modeling_gguf_pytorch_utils as converter

    at = ""

    def each(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        nonlocal at
        total = len(tensors) if isinstance(tensors, Sized) else None
        with stage("converting weights", total, "tensors") as shown:
            for number, tensor in enumerate(tensors, 1):
                at = f"tensor {tensor.name}"
                yield tensor
                shown.move(number)
        at = ""

    bar = getattr(converter, "tqdm", None)
    converter.tqdm = each
    try:
        yield
    except (ValueError, TypeError, RuntimeError, IndexError, KeyError) as error:
        if at:
            raise BadInput(f"cannot convert {at}: {one_line(error)}") from error
        raise
    finally:
        converter.tqdm = bar
