"""Rotary embeddings of models that are read from files: rotations from the parameters in their configuration.

Su et al. 2021 (arXiv 2104.09864); linear position interpolation, Chen et al. 2023 (arXiv 2306.15595); Llama 3's scaling
by wavelength. The order of the operations in float32 is that of transformers, so that angles are equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.targets.dense.decoder_spec import Rotation


def rotation(parameters: Mapping[str, Any], head_size: int) -> Rotation:
    """Of ``parameters`` as :func:`outpace.models.plain_config.plain_config` leaves them: default, linear or llama3."""
    return partial(_turned, parameters, head_size)


def _turned(parameters: Mapping[str, Any], head_size: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None].float() * _speeds(parameters, head_size, positions.device)
    return angles.cos(), angles.sin()


def _speeds(parameters: Mapping[str, Any], head_size: int, device: torch.device) -> Tensor:
    theta = float(parameters["rope_theta"])
    pairs = torch.arange(0, head_size, 2, dtype=torch.float, device=device)
    speeds: Tensor = 1.0 / (theta ** (pairs / head_size))
    if parameters["rope_type"] == "linear":
        return speeds / float(parameters["factor"])
    return _by_wavelength(speeds, parameters) if parameters["rope_type"] == "llama3" else speeds


def _by_wavelength(speeds: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are slowed by ``factor``, short ones are kept, and those between are blended."""
    factor, length = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelengths = 2 * math.pi / speeds
    longest, shortest = length / low, length / high
    slowed = torch.where(wavelengths > longest, speeds / factor, speeds)
    kept = (length / wavelengths - low) / (high - low)
    blended = (1 - kept) * slowed / factor + kept * slowed
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, slowed)
