"""Whose turn it is to use the machine's threads: torch's, or those of the compiled kernels.

The kernels have threads of their own, as many as torch is set to. Between two of their forwards a round does small
things in torch: a maximum over a row of logits, a few rows side by side. Where torch uses several threads for such a
thing, they spin for a while after it, on cores that the next forward needs: a product of 0.03 ms then takes a whole
millisecond (LOG.md). So torch keeps to one thread in rounds beside the kernels, but for models that it runs itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_RESTING = threading.local()
"""``threads``: what torch is set to when it is not at rest, in threads of the process where it is."""


def threads() -> int:
    """How many threads a forward is to use."""
    return _asked() or torch.get_num_threads()


def _asked() -> int:
    return int(getattr(_RESTING, "threads", 0))


@contextmanager
def torch_at_rest() -> Iterator[None]:
    """Torch keeps to one thread; :func:`threads` says what it was set to."""
    if _asked():
        yield
        return
    before = _RESTING.threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _RESTING.threads = 0


@contextmanager
def torch_at_work() -> Iterator[None]:
    """For a model that torch runs: it has all threads, whoever else is at rest."""
    asked = _asked()
    if not asked:
        yield
        return
    torch.set_num_threads(asked)
    try:
        yield
    finally:
        torch.set_num_threads(1)
