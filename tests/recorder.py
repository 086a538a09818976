"""A capture on the CPU that does what a CUDA graph does: the same operations on the same memory, and no Python.

What a stream capture does not allow raises RuntimeError, as CUDA does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from outpace.targets.dense.graphs import Work

_SYNCHRONISING = ("_local_scalar_dense", "nonzero", "item", "masked_select", "equal")


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _SYNCHRONISING:
            raise RuntimeError(f"{func} waits for the device, which a capture does not allow")
        out = func(*args, **kwargs)
        given = {storage(one) for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)}
        # Results in memory that was given are views or written in place: they follow by themselves.
        fresh = [one if isinstance(one, Tensor) and storage(one) not in given else None for one in tree_flatten(out)[0]]
        if func._schema.is_mutable or any(one is not None for one in fresh):
            self.calls.append((func, args, kwargs, fresh))
        return out


def storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass
class Recording:
    """Operations in order, their operands and the memory of their results."""

    output: tuple[Tensor, ...]
    calls: list[Any] = field(repr=False)

    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            for kept, again in zip(results, tree_flatten(func(*args, **kwargs))[0], strict=True):
                if kept is not None:
                    kept.copy_(again)


def record(work: Callable[[], tuple[Tensor, ...]]) -> Recording:
    """Capture ``work``. Its own results are thrown away: a capture records, and computes nothing."""
    with _Log() as log:
        output = work()
    for *_, results in log.calls:
        for kept in results:
            if kept is not None and kept.is_floating_point():
                kept.fill_(float("nan"))
    return Recording(output, log.calls)


class Again:
    """A capture that calls the work once more: for work that no recorder can look into, such as compiled code."""

    def __init__(self, work: Work) -> None:
        self.work, self.output = work, work()

    def replay(self) -> None:
        for kept, found in zip(self.output, self.work(), strict=True):
            kept.copy_(found)
