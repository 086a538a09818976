"""Batches as transformers lays them out: ids and mask, prompts padded on the left and answers on the right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import BadInput, shown
from outpace.integrations.transformers.generation_settings import Settings


def input_rows(inputs: Any, input_ids: Any, settings: Settings, model: Any) -> Tensor:
    """The prompts' ids (rows, length); the beginning-of-sequence token where none are given. Raises BadInput."""
    if inputs is not None and input_ids is not None:
        raise BadInput("inputs and input_ids are the same argument; give one of them")
    ids = input_ids if inputs is None else inputs
    if ids is None:
        if not settings.ids("bos_token_id"):
            raise BadInput("there are no input_ids, and the model has no bos_token_id to begin with; give input_ids")
        return torch.tensor([settings.ids("bos_token_id")[:1]], device=model.device)
    if not isinstance(ids, Tensor):
        raise BadInput(f'input_ids must be a tensor (the tokenizer\'s return_tensors="pt"), not {shown(ids)}')
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool or not ids.numel():
        raise BadInput(f"input_ids must be whole numbers (rows, length), not {ids.dtype} {tuple(ids.shape)}")
    return ids


def attention_rows(given: Any, ids: Tensor, settings: Settings) -> Tensor:
    """Which input ids belong to the prompts, (rows, length) of 0 and 1: padding may stand before them alone."""
    if given is None:
        pad, eos = settings.ids("pad_token_id")[:1], settings.ids("eos_token_id")
        inferred = bool(pad) and pad[0] not in eos
        mask = ids.ne(pad[0]).long() if inferred else torch.ones_like(ids)
    elif isinstance(given, Tensor) and given.shape == ids.shape:
        mask = given.ne(0).long()
    else:
        shape = tuple(given.shape) if isinstance(given, Tensor) else shown(given)
        raise BadInput(f"attention_mask must be a tensor of the shape of input_ids, {tuple(ids.shape)}, not {shape}")
    if not bool(mask[:, -1].all()) or bool((mask.diff(dim=1) < 0).any()):
        raise BadInput("padding must be on the left (the tokenizer's padding_side='left'), and no prompt empty")
    return mask


def padded(ids: Tensor, rows: list[list[int]], pad: int | None) -> Tensor:
    """Input ids with the new ones behind them, to the length of the longest."""
    longest = max(map(len, rows))
    if pad is None and any(len(row) < longest for row in rows):
        raise BadInput("rows of different length need a pad_token_id; give one")
    new = [[*row, *([pad] * (longest - len(row)))] for row in rows]
    return torch.cat([ids, torch.tensor(new, dtype=ids.dtype, device=ids.device)], dim=1)
