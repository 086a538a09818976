"""load: from a name to a Model, whatever the weights lie in."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.model import Model
from outpace.models.base import ChatTokenizer
from outpace.models.hub_access import hub_answers
from outpace.models.quiet import quiet
from outpace.models.source import Source, resolve
from outpace.models.transformers_files import model_from_files, tokenizer_from_files
from outpace.models.transformers_objects import check_objects

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from outpace.models.tokenizers import HFTokenizer
    from outpace.targets.base import Target
    from outpace.targets.choice import TargetKind
    from outpace.targets.dense.decoder_spec import DecoderSpec


def load(
    name: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    target: TargetKind = "auto",
    kv_dtype: str = "auto",
    fixed_costs: bool = False,
) -> Model:
    """Load a model, or take over one that transformers has loaded.

    name: ``smollm2`` (embedded), a folder of safetensors, a GGUF file, a hub id, or a causal language model that
        transformers has loaded, with its ``tokenizer`` (:func:`load_from`).
    tokenizer: a folder, a hub id or a transformers tokenizer, instead of the model's own.
    dtype: float32, bfloat16, float16, int8, int4 (a GGUF file's own blocks) or auto (what the weights are stored in).
        None takes int4 for a GGUF file on a CPU, otherwise the fastest of float32, bfloat16 and float16 on the device.
    device: cpu, cuda, ...; None takes the first GPU, or the CPU.
    target: "auto" takes the fast target if it supports the model, and ``model.info["note"]`` says why where it does
        not; "generic" runs the model through transformers.
    kv_dtype: how keys and values of the context are kept: "auto" in 16 bits (32 in float32), "int8" in 8 bits, which
        takes about half the memory and rounds more. For the fast target on a CPU, in bfloat16, int8 and int4.
    fixed_costs: choose draft lengths by nominal costs and read no clock, so that a seed repeats a sampled answer on any
        machine. By default costs are measured once and kept (:mod:`outpace.targets.cost_table`), and a seed repeats
        an answer on this machine.

    Returns a :class:`Model`. Raises BadInput, in one line, for anything that cannot be loaded.

    >>> import outpace
    >>> model = outpace.load("smollm2")                                            # doctest: +SKIP
    >>> model = outpace.load("qwen2.5-1.5b-q4_k_m.gguf", device="cpu")             # doctest: +SKIP
    >>> model = outpace.load(hf_model, hf_tokenizer)                               # doctest: +SKIP
    """
    if not isinstance(name, str | os.PathLike):
        check_objects(name, tokenizer, dtype=dtype, device=device)
        return load_from(name, tokenizer, target=target, kv_dtype=kv_dtype, fixed_costs=fixed_costs)
    source = resolve(name)
    from outpace.models.placement import QUANTISED, check_kv_dtype, choose_device, choose_dtype, dtype_name

    began = time.perf_counter()
    where = choose_device(device)
    fast = where.type == "cpu" and target == "auto"
    if dtype is None and source.kind == "gguf" and fast and _in_blocks(source.path):
        dtype = "int4"  # the file as it is: the exact weights, and the quickest
    precision = choose_dtype(dtype, where)
    quantised = str(dtype) if dtype in QUANTISED else None
    check_kv_dtype(kv_dtype, quantised or ("" if dtype == "auto" else dtype_name(precision)), where)
    label, as_stored = os.fspath(name), dtype == "auto" and source.kind != "gguf"
    model = None
    if fast:
        model = _plain(source, label, quantised, None if as_stored else precision, kv_dtype, tokenizer, fixed_costs)
    if model is None:
        model = _through_transformers(
            *(source, label, quantised, "auto" if as_stored else precision, where, tokenizer),
            *(target, kv_dtype, fixed_costs),
        )
    model.info |= {"source": source.kind, "location": source.location}
    model.info["load_seconds"] = time.perf_counter() - began
    return model


def _plain(
    source: Source,
    label: str,
    quantised: str | None,
    dtype: torch.dtype | None,
    kv_dtype: str,
    tokenizer: Any,
    fixed_costs: bool,
) -> Model | None:
    """The model on the fast target, without transformers; None where that takes transformers."""
    from outpace.models.gguf_cache import converted
    from outpace.models.placement import dtype_name
    from outpace.plain_loading import load_plain

    if source.kind == "hub" or (quantised == "int4" and source.kind != "gguf"):
        return None
    if source.kind == "gguf" and quantised != "int4":
        assert dtype is not None
        source = Source("folder", str(converted(source.path, dtype)))
    wanted = quantised or ("auto" if dtype is None else dtype_name(dtype))
    found = load_plain(
        source, wanted, dtype, kv_dtype, lambda folder: tokenizer_from_files(str(folder), tokenizer, True)
    )
    if found is None:
        return None
    info = {"architecture": found.architecture, "parameters": found.parameters, "note": "", "device": "cpu"}
    return _model_of(label, found.target, found.tokenizer, found.eos_ids, info, found.weights, fixed_costs)


def _through_transformers(
    source: Source,
    label: str,
    quantised: str | None,
    precision: Any,
    where: torch.device,
    tokenizer: Any,
    kind: TargetKind,
    kv_dtype: str,
    fixed_costs: bool,
) -> Model:
    from outpace.models.gguf_cache import converted

    with quiet():
        if source.kind == "gguf":
            place, local = str(converted(source.path, precision)), True
        else:
            place, local = source.location, source.kind == "folder" or not hub_answers()
        inner = model_from_files(source, place, precision, where, local)
        words = tokenizer_from_files(place, tokenizer, local)
        gguf = source.path if source.kind == "gguf" else None
        model = _wrapped(inner, words, label, quantised, gguf, kind, kv_dtype, fixed_costs)
    model.target.origin = partial(_again, source, place, precision, where, local)
    return model


def load_tokenizer(name: str | os.PathLike[str], *, tokenizer: Any = None) -> ChatTokenizer:
    """The tokenizer of what ``load`` would load, without the weights. Raises BadInput as ``load`` does."""
    from outpace.models.gguf_cache import converted_before
    from outpace.models.gguf_convert import read_tokenizer
    from outpace.models.gguf_header import read_header
    from outpace.models.tokenizers import HFTokenizer

    source = resolve(name)
    place = source.location
    if source.kind == "gguf" and tokenizer is None:
        entry = converted_before(source.path)
        if entry is None:
            with quiet():
                return HFTokenizer(read_tokenizer(read_header(source.path)))
        place = str(entry)
    local = source.kind != "hub" or not hub_answers()
    return tokenizer_from_files(place, tokenizer, local)


def load_from(
    model: Any,
    tokenizer: Any,
    *,
    name: str | None = None,
    target: TargetKind = "auto",
    kv_dtype: str = "auto",
    fixed_costs: bool = False,
) -> Model:
    """Wrap a transformers causal LM and its tokenizer that are loaded already. The model is put in evaluation mode.

    The fast target packs a copy of the weights; "generic" uses the model as it is and follows changes of it.
    ``kv_dtype``, ``fixed_costs``: as for :func:`load`.
    Raises BadInput when the model's state is not one that outpace can keep.
    """
    return _wrapped(model, tokenizer, name, None, None, target, kv_dtype, fixed_costs)


def _wrapped(
    model: Any,
    tokenizer: Any,
    name: str | None,
    precision: str | None,
    gguf: Path | None,
    kind: TargetKind,
    kv_dtype: str,
    fixed_costs: bool,
) -> Model:
    from outpace.models.placement import check_dtype, check_kv_dtype, dtype_name
    from outpace.models.stop_ids import stop_ids
    from outpace.models.tokenizers import HFTokenizer
    from outpace.targets.choice import choose_target
    from outpace.targets.cost_table import digest

    words = tokenizer if isinstance(tokenizer, HFTokenizer) else HFTokenizer(tokenizer)
    weight = model.get_input_embeddings().weight
    check_dtype(weight.dtype, weight.device)
    check_kv_dtype(kv_dtype, precision or dtype_name(weight.dtype), weight.device)
    with quiet():
        target, note = choose_target(model.eval(), precision=precision, gguf=gguf, kind=kind, kv_dtype=kv_dtype)
    label = name or getattr(model.config, "name_or_path", "") or type(model).__name__
    info = {
        "architecture": type(model).__name__,
        "parameters": int(model.num_parameters()),
        "note": note,
        "device": str(weight.device),
    }
    eos_ids = stop_ids(model, words, target.vocab_size)
    return _model_of(label, target, words, eos_ids, info, digest(model.named_parameters()), fixed_costs)


def _model_of(
    label: str,
    target: Target,
    words: HFTokenizer,
    eos_ids: frozenset[int],
    info: dict[str, Any],
    weights: str,
    fixed_costs: bool,
) -> Model:
    """``info``: what is known of the model; its target's part is added. ``weights``: what identifies them."""
    import torch

    from outpace.targets.cost_table import table_of
    from outpace.targets.costs import FixedCosts, ForwardCosts

    if fixed_costs:
        target.costs = FixedCosts()
    else:
        device = torch.device(info["device"])
        table = table_of(weights, kind=type(target).__name__, precision=target.arithmetic, device=device)
        target.costs = ForwardCosts(target, table)
    info |= {
        "dtype": target.dtype,
        "kv_dtype": target.kv_dtype,
        "kv_bytes_per_token": target.kv_bytes_per_token,
        "target": type(target).__name__,
        "layers": target.num_layers,
        "vocabulary": target.vocab_size,
        "context_length": target.context_length,
        "source": "object",
    }
    return Model(label, target, words, eos_ids, info)


def _again(*what: Any) -> DecoderSpec | None:
    """The spec of what ``model_from_files`` loads, loaded once more."""
    from outpace.targets.dense.transformers_weights import spec_if_known

    with quiet():
        return spec_if_known(model_from_files(*what))


def _in_blocks(path: Path) -> bool:
    """Whether a GGUF file's matrices are in blocks that the fast target keeps."""
    from outpace.models.gguf_header import read_header
    from outpace.targets.dense.quant_blocks import KINDS

    entries = read_header(path).tensors.values()
    return any(len(entry.shape) == 2 and entry.kind_name in KINDS for entry in entries)
