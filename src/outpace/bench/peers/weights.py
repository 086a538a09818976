"""One model as the different libraries want it: a folder of safetensors, a GGUF file, and the precision of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.bench.peers.gguf_formats import kinds
from outpace.core.errors import BadInput
from outpace.core.names import unknown
from outpace.models.source import resolve

FLOATS = ("bfloat16", "float16", "float32")
DTYPES = (*FLOATS, "int8", "int4")


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a model is. ``folder`` may be a hub id; ``gguf`` is None where there is no such file."""

    name: str
    folder: str
    gguf: str | None
    gguf_kind: str
    local: bool


def precisions(names: Sequence[str] | None, model: str) -> tuple[list[str], list[str]]:
    """The dtypes to run outpace in, and a line for each that this CPU lacks. Raises BadInput for what is no dtype.

    By default bfloat16 and the smallest that keeps the file's own precision.
    """
    if names is None:
        names = ["bfloat16", "int4" if resolve(model).kind == "gguf" else "int8"]
    chosen, notes = [], []
    for name in names:
        if name not in DTYPES:
            raise unknown("dtype", name, DTYPES)
        if name in FLOATS and not _computes_in(name):
            notes.append(f"this CPU does not compute in {name}: float32 instead")
            name = "float32"  # noqa: PLW2901
        chosen.append(name)
    if not chosen:
        raise BadInput(f"name at least one dtype: {', '.join(DTYPES)}")
    return list(dict.fromkeys(chosen)), notes


def float_of(dtypes: Sequence[str]) -> tuple[str, list[str]]:
    """The dtype for libraries that take a folder: our first that is a float, else bfloat16 where it computes."""
    found, notes = precisions([name for name in dtypes if name in FLOATS] or ["bfloat16"], "")
    return found[0], notes


def _computes_in(name: str) -> bool:
    import torch

    from outpace.models.placement import check_dtype, fast_bfloat16

    if name == "bfloat16":
        return fast_bfloat16()
    try:
        check_dtype(getattr(torch, name), torch.device("cpu"))
    except BadInput:
        return False
    return True


def find(name: str, dtype: str) -> Weights:
    """Find a model, and convert a GGUF file to ``dtype`` unless that was done before."""
    source = resolve(name)
    if source.kind != "gguf":
        return Weights(name, source.location, None, "", source.kind == "folder")
    import torch

    from outpace.models.gguf_cache import converted
    from outpace.models.quiet import quiet

    with quiet():
        folder = converted(source.path, getattr(torch, dtype))
    return Weights(name, str(folder), source.location, kinds(source.path), True)
