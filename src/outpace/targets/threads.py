"""Sharing the machine's cores between torch's threads and those of the compiled kernels.

The kernels have threads of their own, as many as torch is set to. Between two of their forwards a round does small
things in torch, such as a maximum over a row of logits. Where torch uses several threads for it, they spin for a while
afterwards, on cores that the next forward needs: a product of 0.03 ms then takes a whole millisecond (LOG.md). So torch
uses one thread in rounds beside the kernels, except for models that it runs itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_RESTING = threading.local()
"""``threads``: how many torch uses outside :func:`torch_at_rest`; set in Python threads that are inside."""


def threads() -> int:
    """How many threads a forward uses."""
    import torch

    asked: int = getattr(_RESTING, "threads", 0)
    return asked or torch.get_num_threads()


def _asked() -> int:
    return int(getattr(_RESTING, "threads", 0))


@contextmanager
def torch_at_rest() -> Iterator[None]:
    """Torch uses one thread inside; :func:`threads` still gives what it was set to."""
    import torch

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
    """Torch uses all threads inside, also within :func:`torch_at_rest`: for a model that torch runs."""
    import torch

    asked = _asked()
    if not asked:
        yield
        return
    torch.set_num_threads(asked)
    try:
        yield
    finally:
        torch.set_num_threads(1)
