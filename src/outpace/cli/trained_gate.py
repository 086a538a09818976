"""What ``outpace train`` says of a gate."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.markup import escape

from outpace.cli.output import out

if TYPE_CHECKING:
    from outpace.training.job import TrainedHead


def show_gate(made: TrainedHead, model: str) -> None:
    """Thresholds, figures, and the command that uses the gate."""
    from outpace.training.gates.registry import gate_trainings

    console, about, kind = out(), made.provenance, gate_trainings()[made.kind]
    thresholds = ", ".join(f"{name} {value:.3g}" for name, value in about["thresholds"].items())
    size, minutes = f"{about['parameters']:,} parameters", f"{about['seconds'] / 60:.1f} minutes"
    console.print(f"[bold cyan]{made.kind}[/]  {thresholds}; {size}, {minutes}", soft_wrap=True)
    figures = about["figures"]
    said = [words.format(figures[name]) for name, words in kind.figures.items() if figures.get(name) is not None]
    console.print(f"  {', '.join(said)}", soft_wrap=True)
    if (remark := kind.remark(about["thresholds"])) is not None:
        console.print(f"  [yellow]{escape(remark)}[/]", soft_wrap=True)
    name = "" if model == "smollm2" else f"--model {shlex.quote(model)} "
    gate = shlex.quote(f"{made.kind}.gate={made.folder}")
    command = f"outpace generate '...' {name}--method {made.method} --param {gate}"
    console.print(f"  [dim]to use it: {escape(command)}", soft_wrap=True)
