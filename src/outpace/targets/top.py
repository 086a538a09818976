"""The likeliest tokens of scored rows, for drafters that learn from the target's whole distribution.

On one thread, since waking others would take longer; by the compiled kernels where they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.targets.dense import binding

_COLUMNS = 256


def top(logits: Tensor, k: int) -> Iterable[tuple[list[float], list[int]]]:
    """Values and ids of the ``k`` largest logits of every row of (n, V), largest first; all where V is smaller."""
    k = min(k, logits.shape[-1])
    if _by_kernels(logits):
        return zip(*binding.top(logits, k), strict=True)
    return _top(logits, k)


def top_and_totals(
    logits: Tensor, k: int, inverse_temperature: float = 1.0
) -> Iterable[tuple[list[float], list[int], float]]:
    """As :func:`top`, and with each row the log of the sum of the exponentials of ``inverse_temperature`` * logits,
    which turns logits into probabilities at that temperature."""
    if _by_kernels(logits):
        sums = np.empty(len(logits), np.float32)
        best = binding.top(logits, min(k, logits.shape[-1]), inverse_temperature, sums)
        return zip(*best, sums.tolist(), strict=True)
    totals = _log_totals(logits if inverse_temperature == 1.0 else logits * inverse_temperature)
    return ((*pair, total) for pair, total in zip(top(logits, k), totals, strict=True))


def _by_kernels(logits: Tensor) -> bool:
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
    return plain and binding.loaded()


def _log_totals(logits: Tensor) -> list[float]:
    if logits.device.type != "cpu":
        found: list[float] = logits.float().logsumexp(-1).tolist()
        return found
    rows = logits.float().numpy()
    peaks = rows.max(-1, initial=-np.inf, keepdims=True)
    peaks[~np.isfinite(peaks)] = 0.0
    with np.errstate(divide="ignore"):
        totals: list[float] = (np.log(np.exp(rows - peaks).sum(-1)) + peaks[:, 0]).tolist()
    return totals


def _top(logits: Tensor, k: int) -> Iterator[tuple[list[float], list[int]]]:
    if logits.device.type != "cpu":
        best = logits.float().topk(k, dim=-1)
        yield from zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return
    for row in logits.float().numpy():
        values, ids = _at_least_kth(row, k)
        order = np.argsort(-values, kind="stable")[:k]
        yield values[order].tolist(), ids[order].tolist()


def _at_least_kth(row: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """Few values of a row with their places, the ``k`` largest among them.

    Laid out in columns, at least k values reach the k-th largest of the columns' maxima, all of them in k columns.
    """
    whole = len(row) - len(row) % _COLUMNS
    if whole < 2 * _COLUMNS or k >= _COLUMNS:
        return row, np.arange(len(row))
    columns = row[:whole].reshape(-1, _COLUMNS)
    maxima = columns.max(0)
    held = np.argpartition(maxima, _COLUMNS - k)[-k:]
    block = columns[:, held]
    at, which = np.nonzero(block >= maxima[held].min())
    values, ids = block[at, which], at * _COLUMNS + held[which]
    if whole == len(row):
        return values, ids
    return np.concatenate([values, row[whole:]]), np.concatenate([ids, np.arange(whole, len(row))])
