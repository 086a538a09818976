"""Rotary scaling in GGUF files, which transformers' converter leaves out.

llama.cpp stores Llama 3's scaling as one factor for every frequency (the tensor ``rope_freqs.weight``) and linear or
YaRN scaling as metadata. A model converted without them is right for short prompts and wrong for long ones, so what
cannot be carried over exactly is refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outpace.core.errors import BadInput
from outpace.models.gguf_header import GGUFHeader

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of every published Llama 3.x; only ``factor`` differs between them (8 or 32)."""


def rope_parameters(header: GGUFHeader, theta: float) -> dict[str, Any] | None:
    """What to add to a configuration's rope parameters (None: nothing), for a rotary base of ``theta``.

    Raises BadInput for scaling of another kind.
    """
    if "rope_freqs.weight" in header.tensors:
        factors = header.float32("rope_freqs.weight")
        if not np.all(np.isfinite(factors) & (factors > 0)):
            raise _refusal(header, "rope_freqs")
        if np.all(factors == 1):
            return None
        guess = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
        if np.allclose(factors, _llama3_factors(guess, theta, 2 * len(factors)), rtol=1e-3):
            return guess
        raise _refusal(header, "rope_freqs")
    kind = header.model.rope_scaling
    if any(name.startswith("rope_factors") for name in header.tensors):
        raise _refusal(header, "longrope")
    if kind == "none":
        return None
    factor, original = header.model.rope_factor, header.model.rope_original_length
    if kind == "linear" and factor > 0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor > 0 and original:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise _refusal(header, kind)


def _refusal(header: GGUFHeader, kind: str) -> BadInput:
    return BadInput(
        f"'{header.path}' has rotary scaling ({kind}) that cannot be converted exactly; "
        "load the model's safetensors instead"
    )


def _llama3_factors(rope: dict[str, Any], theta: float, width: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Inverse of the multipliers that transformers' llama3 scaling applies to the frequencies."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    factors: np.ndarray[Any, np.dtype[np.float64]] = 1 / ((1 - smooth) / factor + smooth)
    return factors
