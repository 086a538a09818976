"""Choosing the target that runs a model: the fast one of its device where there is one, else the generic one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from outpace.core.errors import BadInput
from outpace.models.placement import dtype_name
from outpace.targets.base import Target
from outpace.targets.check_notes import is_noted, note
from outpace.targets.dense.architectures import UnsupportedArchitecture
from outpace.targets.dense.binding import features
from outpace.targets.dense.decoder_spec import DecoderSpec
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.kernel_build import NotAvailable
from outpace.targets.dense.packing import PRECISIONS
from outpace.targets.dense.self_check import layer_disagreement
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from outpace.targets.hf_support import disagreement

_TOLERANCE_OF_PARTS = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.1, "int4": 0.1}
"""Root mean square of each part's difference, in that of what the part adds."""

_TOLERANCE_OF_KV = {"int8": 0.6}
"""In place of both others: K/V in 8 bits rounds keys with a large constant part, as biases make them, that much."""

TargetKind = Literal["auto", "generic"]

# Root mean square, in standard deviations of the logits: far above each precision's rounding, far below the effect of
# a wrong part.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1, "int8": 0.3, "int4": 0.3}


def choose_target(
    model: Any,
    *,
    precision: str | None = None,
    gguf: Path | None = None,
    kind: TargetKind = "auto",
    kv_dtype: str = "auto",
) -> tuple[Target, str]:
    """A target for a transformers causal LM, and why it is not the fast one ("" where it is, or was not asked for).

    ``precision``: one of ``dense.packing.PRECISIONS``; None takes the model's dtype. ``gguf``: the file that the
    model was read from. A precision that is not available falls back to the model's dtype, and the note says so.
    Raises BadInput for models that no target takes, and for a ``kv_dtype`` that is not the fast target's to keep.
    """
    dtype = dtype_name(model.dtype)
    wanted = precision or dtype
    if kind == "generic":
        _check_kv(kv_dtype, "the generic target was asked for")
        return HFTarget(model), _fallback(wanted, dtype, "the generic target was asked for")
    try:
        return _fast(model, wanted, gguf, kv_dtype), ""
    except torch.OutOfMemoryError:
        why = "the device has no room for the fast target's weights beside the model's own"
    except (UnsupportedArchitecture, NotAvailable, BadInput) as error:
        why = str(error)
    _check_kv(kv_dtype, why)
    return HFTarget(model), _fallback(wanted, dtype, why) or f"on the generic target: {why}"


def check_parts(target: DenseTarget, spec: DecoderSpec, weights: str) -> None:
    """Compare a target that was packed from ``spec`` with plain PyTorch, the first time on this machine.

    For models that are loaded without transformers. ``weights``: what identifies them. Raises UnsupportedArchitecture
    where a part differs.
    """
    if is_noted(weights, target.arithmetic):
        return
    difference = layer_disagreement(target, spec)
    if not difference < _TOLERANCE_OF_KV.get(target.kv_dtype, _TOLERANCE_OF_PARTS[target.dtype]):
        raise UnsupportedArchitecture(
            f"a part of its scores differs from plain PyTorch by {difference:.2g}{_without_tiles()}"
        )
    note(weights, target.arithmetic)


def _without_tiles() -> str:
    """What to try where matrix tiles are used and scores are wrong."""
    return "; set OUTPACE_TILES=0 to compute without matrix tiles" if "tiles" in features().split() else ""


def _fallback(wanted: str, dtype: str, why: str) -> str:
    return "" if wanted == dtype else f"{wanted} falls back to {dtype}: {why}"


def _check_kv(kv_dtype: str, why: str) -> None:
    if kv_dtype != "auto":
        raise BadInput(f"kv_dtype {kv_dtype} is not available for this model, use auto: {why}")


def _fast(model: Any, precision: str, gguf: Path | None, kv_dtype: str) -> Target:
    spec = read_decoder_spec(model)
    on_cuda = spec.device.type == "cuda"
    if on_cuda:
        _check_kv(kv_dtype, f"the model is on {spec.device}")
    target = _on_cuda(spec, precision) if on_cuda else _on_cpu(spec, precision, gguf, kv_dtype)
    for _ in range(3 if on_cuda else 1):  # on CUDA: run as it is, captured, and replayed
        difference = disagreement(target, model)
        if not difference < _TOLERANCE_OF_KV.get(target.kv_dtype, _TOLERANCE[precision]):
            raise UnsupportedArchitecture(
                f"its scores differ from the model's own by {difference:.2g} standard deviations"
                f"{'' if on_cuda else _without_tiles()}"
            )
    return target


def _on_cpu(spec: DecoderSpec, precision: str, gguf: Path | None, kv_dtype: str) -> Target:
    if precision not in PRECISIONS:
        raise UnsupportedArchitecture(f"the fast target does not compute in {precision}")
    return DenseTarget(spec, precision, gguf=gguf, kv_dtype=kv_dtype)


def _on_cuda(spec: DecoderSpec, precision: str) -> Target:
    if precision not in ("float32", "bfloat16", "float16"):
        raise UnsupportedArchitecture(f"the fast target does not compute in {precision} on {spec.device}")
    return GraphTarget(spec, getattr(torch, precision))
