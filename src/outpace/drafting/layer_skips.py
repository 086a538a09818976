"""Skips: the sublayers that a sub-graph leaves out, and the file that a search writes and a method reads.

The file is JSON. ``attention`` and ``mlp`` are the best set so far; ``trials`` are all sets that were tried, so that an
interrupted search can be continued.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.core.validation import validated
from outpace.targets.base import SubGraph, Target

FORMAT = "outpace-skips-1"
Mask = tuple[bool, ...]
"""One flag per sublayer, True where it is skipped: attention of every layer, then the MLP of every layer."""


class _Best(BaseModel):
    """The part of the file that says what to skip."""

    model_config = ConfigDict(strict=True)

    attention: list[int]
    mlp: list[int]
    layers: int


@dataclass(frozen=True, slots=True)
class Skips:
    """Layers whose attention, and whose MLP, is left out. ``layers``: how many the model has, 0 if unknown."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    layers: int = 0

    @property
    def graph(self) -> SubGraph:
        """The forward without these sublayers."""
        return SubGraph(skip_attention=frozenset(self.attention), skip_mlp=frozenset(self.mlp))

    @staticmethod
    def of(mask: Iterable[bool]) -> Skips:
        """From one flag per sublayer."""
        flags = list(mask)
        layers = len(flags) // 2
        skipped = [index for index, flag in enumerate(flags) if flag]
        return Skips(
            tuple(index for index in skipped if index < layers),
            tuple(index - layers for index in skipped if index >= layers),
            layers,
        )

    def check(self, target: Target) -> None:
        """Raise BadInput unless ``target`` has these sublayers and can leave them out."""
        count = target.num_layers
        if self.layers and self.layers != count:
            raise BadInput(f"these skips are for a model of {self.layers} layers, and this one has {count}; tune again")
        for kind, layers in (("attention", self.attention), ("MLP", self.mlp)):
            wrong = next((layer for layer in layers if not 0 <= layer < count), None)
            if wrong is not None:
                raise BadInput(
                    f"cannot skip the {kind} of layer {wrong}: the model's {count} layers are 0 to {count - 1}"
                )
        if len(set(self.attention)) == count and len(set(self.mlp)) == count:
            raise BadInput("every sublayer is skipped; leave some, or nothing but the embedding drafts")
        target.check_skips(self.graph)


def read_record(path: str | Path) -> dict[str, Any]:
    """The file of a search. Raises BadInput for a file that cannot be read or is something else."""
    try:
        record = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read skips from {path}: {error.strerror or error}") from None
    except ValueError:
        raise BadInput(f"{path} is not a file of skips: it is not JSON; write one with 'outpace tune dv'") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise BadInput(f"{path} is not a file of skips; write one with 'outpace tune dv'")
    return record


def read_skips(path: str | Path) -> Skips:
    """The best set of a search. Raises BadInput for a file that cannot be read or is something else."""

    def refusal(key: str, reason: str) -> BadInput:
        return BadInput(f"{path} is damaged, {key}: {reason}; tune again")

    best = validated(_Best, read_record(path), refusal)
    return Skips(tuple(best.attention), tuple(best.mlp), best.layers)
