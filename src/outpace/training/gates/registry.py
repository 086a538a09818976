"""Kinds of gates, declared in one file each, found by name.

@gate("sprinter", options=Options, reads_draft=True, figures={"labels": "{} labels"})
def train(work: Work) -> MadeGate: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from pydantic import BaseModel

from outpace.core.names import normalised
from outpace.core.plugins import import_all
from outpace.training.gates.work import MadeGate, Work

Train = Callable[[Work], MadeGate]


def _no_remark(thresholds: Mapping[str, float]) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class GateTraining:
    """A kind of gate. ``name``: of the kind, and of the method that uses it.

    options: settings of its training.
    train: raises BadInput where what it learns from does not suffice.
    reads_draft: whether the gate is for one draft model alone.
    checks_answers: whether its prompts are tasks with a right answer.
    figures: how those of its provenance are said, in order; what is None is left out.
    remark: of its thresholds; None: there is none to make.
    """

    name: str
    options: type[BaseModel]
    train: Train
    reads_draft: bool
    checks_answers: bool = False
    figures: Mapping[str, str] = field(default_factory=dict)
    remark: Callable[[Mapping[str, float]], str | None] = _no_remark


_KINDS: dict[str, GateTraining] = {}


def gate(
    name: str,
    *,
    options: type[BaseModel],
    reads_draft: bool,
    checks_answers: bool = False,
    figures: Mapping[str, str],
    remark: Callable[[Mapping[str, float]], str | None] = _no_remark,
) -> Callable[[Train], Train]:
    """Declares that the function trains a kind of gate; what is given: see :class:`GateTraining`."""

    def declared(train: Train) -> Train:
        _KINDS[name] = GateTraining(name, options, train, reads_draft, checks_answers, figures, remark)
        return train

    return declared


@cache
def gate_trainings() -> Mapping[str, GateTraining]:
    """All kinds, by name."""
    import_all("outpace.training.gates.kinds")
    return dict(sorted(_KINDS.items()))


def find_gate(named: str) -> GateTraining | None:
    """The kind of gate of this name; None: there is none."""
    return next((one for one in gate_trainings().values() if normalised(one.name) == normalised(named)), None)
