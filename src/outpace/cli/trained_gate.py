"""What ``outpace train`` says of a gate."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.markup import escape

from outpace.cli.output import out

if TYPE_CHECKING:
    from outpace.training.job import TrainedHead

_WORDS = {
    "answers": "{} answers",
    "tasks": "{} tasks",
    "right": "{} answered right",
    "drafts": "{} drafts",
    "held_out_drafts": "{} held out",
    "mismatches": "{} rejected draft tokens",
    "labels": "{} labels",
    "auc": "AUC {}",
    "standing": "{:.0%} of the held-out ones stand",
    "error": "{:.1%} of these wrongly",
    "missed": "{:.0%} of the pivots stand",
    "tokens_per_round": "{} tokens per round",
    "excess_nll": "{} nats of excess per token",
    "expected_speedup": "{}x expected",
    "expected_speedup_lossless": "{}x with rollback 0",
}
"""Figures of a gate's provenance that are shown, in this order; those of held-out prompts among them."""


def show_gate(made: TrainedHead, model: str) -> None:
    """Thresholds, figures, and the command that uses the gate."""
    console, about = out(), made.provenance
    thresholds = ", ".join(f"{name} {value:.3g}" for name, value in about["thresholds"].items())
    size, minutes = f"{about['parameters']:,} parameters", f"{about['seconds'] / 60:.1f} minutes"
    console.print(f"[bold cyan]{made.kind}[/]  {thresholds}; {size}, {minutes}", soft_wrap=True)
    figures = about["figures"]
    said = [words.format(figures[name]) for name, words in _WORDS.items() if figures.get(name) is not None]
    console.print(f"  {', '.join(said)}", soft_wrap=True)
    if made.kind == "sprinter" and about["thresholds"]["threshold"] >= 1.0:
        console.print("  [yellow]no token would stand[/]: give a larger --param error=SHARE, or more data")
    name = "" if model == "smollm2" else f"--model {shlex.quote(model)} "
    gate = shlex.quote(f"{made.kind}.gate={made.folder}")
    command = f"outpace generate '...' {name}--method {made.method} --param {gate}"
    console.print(f"  [dim]to use it: {escape(command)}", soft_wrap=True)
