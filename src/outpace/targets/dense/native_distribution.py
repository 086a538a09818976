"""Distributions of the next token by the compiled kernels, for logits that lie on the CPU.

A row is read as often as it must be: once for its largest logit and once for its sum when it is opened, once for a
residual, and a block of it for a probability or a draw; probabilities are not written down. ``native/sampling.h`` says
what each call does.

Rounding: a weight is e^(logit / temperature) in float32, relative to the largest, to within 1e-5 of itself (1e-6 where
the probability is above 1e-6 of the largest); what is below e^-87 of it counts as 0. Sums are in float64. At the edge
of top-p and min-p, where a sum or a share lies within rounding of the limit, one token more or less may be kept than
:func:`outpace.core.token_distribution.warp` keeps. A row's distribution has the same bits whatever is computed beside
it, on however many threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outpace.core.penalties import LogitChanges
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import DenseDistribution, TokenDistribution, dense_distributions, normalised
from outpace.targets.dense.kernel_build import NotAvailable, library


class _Truncation(Structure):
    _fields_ = [("temperature", c_double), ("top_k", c_int64), ("top_p", c_double), ("min_p", c_double)]


class _Logits(Structure):
    _fields_ = [("count", c_int64), ("ids", c_void_p), ("values", c_void_p)]


class _Changes(Structure):
    _fields_ = [
        ("bias", _Logits),
        ("history", _Logits),
        ("path", _Logits),
        ("repetition", c_double),
        ("presence", c_double),
        ("frequency", c_double),
        ("allowed", c_void_p),
    ]


@cache
def _calls() -> Any:
    lib = library()
    lib.outpace_distributions.restype = None
    lib.outpace_distributions.argtypes = [c_void_p, c_int64, c_void_p, c_int, c_int64, c_void_p, c_void_p, c_void_p]
    for name, result, arguments in (
        ("weighted", c_void_p, [c_void_p, c_int64]),
        ("widened", c_void_p, [c_void_p, c_void_p, c_int64]),
        ("residual", c_void_p, [c_void_p, c_void_p, c_double, c_void_p, c_int, POINTER(c_double)]),
        ("probability", c_double, [c_void_p, c_int64]),
        ("acceptance", c_double, [c_void_p, c_void_p, c_int64, c_double]),
        ("highest", c_double, [c_void_p]),
        ("drawn", c_int64, [c_void_p, c_double]),
        ("probabilities", None, [c_void_p, c_void_p]),
        ("release", None, [c_void_p]),
    ):
        call = getattr(lib, f"outpace_{name}")
        call.restype, call.argtypes = result, arguments
    return lib


@cache
def available() -> bool:
    """Whether the kernels can be loaded here; builds them where they were not built before."""
    try:
        _calls()
    except NotAvailable:
        return False
    return True


class NativeDistribution(TokenDistribution):
    """A distribution of the kernels. ``kept``: what its rows lie in."""

    __slots__ = ("_dense", "_handle", "_kept", "_lib", "size")

    def __init__(self, handle: int, size: int, kept: tuple[object, ...]) -> None:
        self._lib = _calls()
        self._handle, self.size, self._kept = handle, size, kept
        self._dense: Tensor | None = None

    def __del__(self) -> None:
        self._lib.outpace_release(self._handle)

    def __getitem__(self, token: int) -> float:
        if not 0 <= token < self.size:
            raise IndexError(f"token {token} is outside the vocabulary of {self.size}")
        found: float = self._lib.outpace_probability(self._handle, token)
        return found

    def acceptance(self, q: TokenDistribution | None, token: int, prefix: float = 1.0) -> float:
        if not isinstance(q, NativeDistribution):
            return super().acceptance(q, token, prefix)
        found: float = self._lib.outpace_acceptance(self._handle, q._handle, token, prefix)
        return found

    def draw(self, number: float) -> int:
        found: int = self._lib.outpace_drawn(self._handle, number)
        return found

    def residual(
        self, q: TokenDistribution | None, tokens: Sequence[int] = (), prefix: float = 1.0
    ) -> tuple[TokenDistribution, float]:
        if q is None:
            if not tokens:
                return self, prefix
            subtracted, kept = None, self._kept
        elif isinstance(q, NativeDistribution):
            subtracted, kept = q._handle, (*self._kept, *q._kept)
        else:
            return DenseDistribution(self.dense()).residual(q, tokens, prefix)
        total, count = c_double(), len(tokens)
        zeros = (c_int32 * count)(*tokens) if count else None
        handle = self._lib.outpace_residual(self._handle, subtracted, prefix, zeros, count, byref(total))
        return (NativeDistribution(handle, self.size, kept), total.value) if handle else (self, 0.0)

    def of_weights(self, weights: Tensor) -> TokenDistribution:
        if weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.bfloat16, torch.float16):
            row = weights.float().contiguous()
            handle = self._lib.outpace_weighted(row.data_ptr(), len(row))
            if handle:
                return NativeDistribution(handle, len(row), (row,))
        return DenseDistribution(normalised(weights))

    def widened(self, ids: Tensor, size: int) -> TokenDistribution:
        ids = ids.to(device="cpu", dtype=torch.long).contiguous()
        handle = self._lib.outpace_widened(self._handle, ids.data_ptr(), size)
        return NativeDistribution(handle, size, self._kept)

    def dense(self) -> Tensor:
        if self._dense is None:
            self._dense = torch.empty(self.size, dtype=torch.float32, device="cpu")
            self._lib.outpace_probabilities(self._handle, self._dense.data_ptr())
        return self._dense

    def highest(self) -> float:
        found: float = self._lib.outpace_highest(self._handle)
        return found


def native_distributions(
    logits: Tensor, rows: Sequence[int], params: SamplingParams, changes: Sequence[LogitChanges | None] = ()
) -> list[TokenDistribution | None]:
    """:class:`~outpace.core.token_distribution.OpenRows` by the kernels; in plain PyTorch at temperature 0 and for
    logits that are not float32 on the CPU."""
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
    if params.greedy or not plain:
        return dense_distributions(logits, rows, params, changes)
    count, size = len(rows), logits.shape[-1]
    truncation = _Truncation(params.temperature, params.top_k, params.top_p, params.min_p)
    found, numbers = (c_void_p * count)(), (c_int32 * count)(*rows)
    changed = (_Changes * count)(*map(_changes, changes)) if changes else None
    _calls().outpace_distributions(
        logits.data_ptr(), logits.stride(0), numbers, count, size, byref(truncation), changed, found
    )
    kept = (logits,)
    return [None if handle is None else NativeDistribution(handle, size, kept) for handle in found]


def _changes(given: LogitChanges | None) -> _Changes:
    """As the kernels read them, from the memory of ``given``."""
    if given is None:
        return _Changes(repetition=1.0)
    bias, history, path = given.bias, given.history.tokens, given.path
    return _Changes(
        _Logits() if bias is None else _Logits(len(bias.ids), bias.ids.ctypes.data, bias.values.ctypes.data),
        _Logits(len(history.ids), history.ids.ctypes.data, history.counts.ctypes.data),
        _Logits(len(path.ids), path.ids.ctypes.data, path.counts.ctypes.data),
        given.repetition,
        given.presence,
        given.frequency,
        None if given.allowed is None else given.allowed.ctypes.data,
    )
