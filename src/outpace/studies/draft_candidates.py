"""The draft models that ``configspec`` compares, read from text: NAME, NAME:DTYPE or NAME:DTYPE=SHAPE."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outpace.core.errors import BadInput
from outpace.methods.named_weights import DRAFT_LM
from outpace.simulate.model_shape import SHAPES, ModelShape, find_shape

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
"""Of a weight, by precision."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft model: what it is called, its precision, and what its time is computed from; None: it is measured. Its
    ``bits`` are assumed until it is loaded."""

    name: str
    dtype: str | None
    bits: int
    shape: ModelShape | None


def candidates(texts: Seq[str], *, measured: bool = False) -> list[Candidate]:
    """Draft models from text. Raises BadInput for precisions and shapes that do not exist, and for two that are one.

    ``measured``: models are timed on this machine, and need no shape.
    """
    found = []
    for text in texts:
        model, _, shape = text.partition("=")
        name, _, dtype = model.rpartition(":") if ":" in model else (model, "", "")
        if dtype and dtype not in BITS:
            raise BadInput(f"draft model '{text}': precisions are {', '.join(BITS)}, not '{dtype}'")
        if measured and shape:
            raise BadInput(f"device=measured times draft model '{model}' itself; leave out its shape")
        own = "smollm2-draft-lm" if name == DRAFT_LM else name
        sizes = None if measured and name != DRAFT_LM else shape_of(own, shape, f"drafts={model}=SHAPE")
        found.append(Candidate(name, dtype or None, BITS.get(dtype, 16), sizes))
    return distinct(found)


def shape_of(model: str, given: str | None, setting: str) -> ModelShape:
    """The shape that was given, or the model's own. Raises BadInput where that is not known, naming the setting."""
    if given:
        return find_shape(given)
    try:
        return find_shape(model)
    except BadInput:
        raise BadInput(
            f"the sizes of '{model}' are not among the presets; give them with --setting {setting}, a preset "
            f"({', '.join(SHAPES)}) or the path of a config.json"
        ) from None


def distinct(found: list[Candidate]) -> list[Candidate]:
    """Raises BadInput for two that are one."""
    keys = [(one.name, one.bits) for one in found]
    if len(set(keys)) < len(keys):
        raise BadInput("a draft model is named twice in one precision")
    return found
