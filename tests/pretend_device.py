"""A device that is none: tensors of the CPU that say they are elsewhere, and refuse what a GPU refuses.

Operands on two devices raise RuntimeError, as on CUDA; numbers and indices from the CPU are taken, as there. So code
that forgets to move something fails here, on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_MOVES = {"copy_", "_to_copy", "lift_fresh", "_local_scalar_dense", "equal"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)


class Elsewhere(Tensor):
    """A tensor of the CPU, ``twin``, that says it is on the device."""

    twin: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.twin = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.twin!r})"

    def tolist(self) -> Any:
        return self.twin.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.overloadpacket.__name__
    if name == "_fused_sdp_choice":
        return 0  # in plain operations
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with _Mode():  # in inference mode such an operation arrives whole
            return func.decompose(*args, **kwargs)
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    there = [one for one in given if isinstance(one, Elsewhere)]
    if there and name not in _MOVES:
        first = given[0]
        for one in given:
            number = one.dim() == 0 and one is not first
            index = name in _INDEXING and isinstance(first, Elsewhere) and not one.is_floating_point()
            if not isinstance(one, Elsewhere) and not number and not index:
                raise RuntimeError(f"{func}: expected all tensors on one device, found some on {DEVICE} and cpu")
    wanted = kwargs.get("device")
    to_there = bool(there) if wanted is None else torch.device(wanted).type == NAME
    if name == "copy_":
        to_there = isinstance(args[0], Elsewhere)
    inner = tree_map_only(Elsewhere, lambda one: one.twin, (args, kwargs))
    if wanted is not None:
        inner[1]["device"] = torch.device("cpu")
        if name == "_to_copy" and to_there != bool(there):
            inner[1].setdefault("memory_format", torch.preserve_format)
    found = func(*inner[0], **inner[1])
    same = {id(one.twin): one for one in there}

    def out(one: Any) -> Any:
        if not isinstance(one, Tensor) or not to_there:
            return one
        if id(one) in same:
            return same[id(one)]
        with torch.inference_mode(False):  # what is seen from outside is a plain tensor at any time
            return Elsewhere(one)

    return tree_map(out, found)


@contextmanager
def pretending() -> Iterator[None]:
    """Tensors can be made on the device, and moved to it and back."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # numbers become tensors where the mode sees it
    try:
        with _Mode():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def moved(found: Any) -> Any:
    """A dataclass of tensors, dataclasses and lists of them, on the device."""
    if isinstance(found, Tensor):
        return Elsewhere(found.detach().clone())
    if isinstance(found, list):
        return [moved(one) for one in found]
    if isinstance(found, dict):
        return {key: moved(one) for key, one in found.items()}
    if isinstance(found, torch.device):
        return DEVICE
    if is_dataclass(found) and not isinstance(found, type):
        return replace(found, **{one.name: moved(getattr(found, one.name)) for one in fields(found)})
    return found
