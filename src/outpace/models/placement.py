"""Choosing the device that a model computes on, and the number format."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.core.errors import BadInput
from outpace.core.names import unknown
from outpace.models.quiet import one_line

if TYPE_CHECKING:
    import torch

NAMES = ("float32", "bfloat16", "float16")
QUANTISED = ("int8", "int4")
"""Precisions that packed weights have and torch's dtypes do not."""
KV_DTYPES = ("auto", "int8")
"""How K/V can be kept: "auto" in 32 bits in float32 and in 16 bits in other precisions."""
_FAST_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is how ARM names it


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU as Linux names them; empty where the system does not tell."""
    return frozenset(_cpu_says("flags", "Features").split())


def cpu_vendor() -> str:
    """Who made this CPU, as x86 processors name themselves (``GenuineIntel``); empty where the system does not tell."""
    return _cpu_says("vendor_id")


def _cpu_says(*names: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line for line in lines if line.startswith(names)).partition(":")[2].strip()
    except (OSError, StopIteration):
        return ""


@cache
def fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16, AMX, ARM BF16)."""
    if flags := cpu_flags():
        return not _FAST_BF16.isdisjoint(flags)
    import torch

    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(supported() for supported in asked if supported)


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the first GPU, or the CPU. Raises BadInput when it is not available."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise BadInput(f"device '{device}' is not available; this machine has: {', '.join(there)}") from error
    if chosen.type == "meta":
        raise BadInput("device 'meta' holds no numbers; use cpu or cuda")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype asked for, or the device's quickest. Raises BadInput when it is none, or the device lacks it.

    For a quantised precision it is the dtype that the weights are read in before they are packed.
    """
    import torch

    if dtype in QUANTISED:
        if device.type != "cpu":
            raise BadInput(f"{dtype} is computed on CPUs only; use bfloat16 on {device}")
        return torch.bfloat16
    if dtype is None or dtype == "auto":
        return _default(device)
    if isinstance(dtype, torch.dtype):
        chosen, name = dtype, dtype_name(dtype)
    else:
        name = str(dtype)
        if name not in NAMES:
            raise unknown("dtype", name, ("auto", *NAMES, *QUANTISED))
        chosen = getattr(torch, name)
    if not chosen.is_floating_point or chosen.itemsize < 2:
        raise BadInput(f"outpace does not compute in {name}; use one of auto, {', '.join(NAMES)}")
    check_dtype(chosen, device)
    return chosen


def check_kv_dtype(kv_dtype: str, precision: str, device: torch.device) -> None:
    """Raise BadInput for K/V that is not kept so, or not where this precision is computed."""
    if kv_dtype not in KV_DTYPES:
        raise unknown("kv_dtype", kv_dtype, KV_DTYPES)
    if kv_dtype == "auto":
        return
    if device.type != "cpu":
        raise BadInput(f"K/V in {kv_dtype} is kept on CPUs only; use kv_dtype auto on {device}")
    check_kv_precision(kv_dtype, precision)


def check_kv_precision(kv_dtype: str, precision: str) -> None:
    """Raise BadInput for K/V in ``kv_dtype``, another than "auto", where the model computes in float32."""
    if precision == "float32":
        raise BadInput(f"float32 keeps its K/V in float32; for kv_dtype {kv_dtype} use bfloat16, int8 or int4")


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise BadInput when the device has no arithmetic for this dtype. Found by trying."""
    import torch

    try:
        one = torch.ones(2, 2, dtype=dtype, device=device)
        torch.nn.functional.silu((one @ one).softmax(-1)).rsqrt()
    except (RuntimeError, TypeError) as error:
        raise BadInput(f"{device} does not compute in {dtype_name(dtype)} ({one_line(error)}); use float32") from error


def training_dtype(device: torch.device) -> torch.dtype:
    """What heads are multiplied in while they are trained: bfloat16, or float32 on processors that are slow in it."""
    import torch

    return torch.float32 if device.type == "cpu" and not fast_bfloat16() else torch.bfloat16


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _default(device: torch.device) -> torch.dtype:
    import torch

    if device.type == "cuda":
        # Emulated bfloat16 on older GPUs is slower than their native half precision.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if device.type == "cpu" and fast_bfloat16() else torch.float32
