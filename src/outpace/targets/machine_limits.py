"""Measuring how fast this machine reads memory and computes products, the limits of a forward's speed."""

from __future__ import annotations

from outpace.core import machine
from outpace.core.errors import OutpaceError
from outpace.targets.dense.binding import product_rate, read_rate


def measure_bandwidth(megabytes: int = 256) -> float:
    """GB/s of one pass of reading over a buffer larger than the caches, with torch's current number of threads."""
    import torch

    try:
        return read_rate(torch.get_num_threads(), megabytes) / 1e9
    except OutpaceError:  # the kernels are not available
        # The maximum runs vectorised on every thread; the machine then waits for memory, not for arithmetic.
        buffer = torch.ones(megabytes * 2**20 // 4, dtype=torch.float32)
        return buffer.numel() * 4 / machine.best_time(buffer.max) / 1e9


def kernel_products(precision: str) -> float:
    """Billions of operations per second of the compiled kernels' instructions alone; 0 without kernels.

    For matrices in "float32", "bfloat16" or "int8", with torch's current number of threads.
    """
    import torch

    try:
        return product_rate(torch.get_num_threads(), precision) / 1e9
    except OutpaceError:  # the kernels are not available
        return 0.0


def measure_products(precision: str) -> float:
    """Billions of operations per second of the fastest known product: the limit that a forward is judged by.

    The larger of :func:`kernel_products` and PyTorch's own matrix product.
    """
    return max(machine.measure_matmul(precision), kernel_products(precision))
