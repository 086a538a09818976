"""A gate's training, from prompts to a folder: ``outpace train sprinter``, ``pad``, ``bild``.

gate = outpace.train(outpace.load("smollm2"), "sprinter", "gates/sprinter", max_minutes=3)
outpace.generate(model, "Why is the sky blue?", method="sprinter", settings={"gate": "gates/sprinter"})
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.machine import describe
from outpace.core.validation import known_fields, validated
from outpace.gates.draft_probe import draft_probe
from outpace.gates.gate import DraftFacts, GateConfig
from outpace.gates.gate_folder import check_new_folder, save_gate
from outpace.heads.checkpoint import facts
from outpace.methods.named_weights import DraftModels
from outpace.model import Model
from outpace.prompts.overlap import Overlap
from outpace.prompts.questions import bench_texts
from outpace.prompts.sources import source
from outpace.training.gates.prompts import given_tasks, open_prompts, task_prompts
from outpace.training.gates.registry import GateTraining
from outpace.training.gates.work import Work
from outpace.training.job_checks import check_amounts, check_lengths
from outpace.training.training_progress import Report, TrainingProgress

TOKENS = 20_000
"""Answer tokens that are decoded, by default."""
_LABELS, _HALF = 0.85, 0.45
"""Shares of the time: until when labels are collected, and of two steps the first."""


TAKES = ("prompts", "tokens", "exclude", "max_minutes", "answer_tokens")
"""The parameters of :func:`outpace.train` that a gate's training takes, beside those that every training has."""


def check_taken(kind: str, changed: Mapping[str, Any]) -> None:
    """Raise BadInput for the first option of heads, of those that were ``changed`` (as on the command line), that gates
    do not take."""
    takes = [one.replace("_", "-") for one in TAKES]
    other = next((name for name in changed if name not in takes), None)
    if other is not None:
        raise BadInput(
            f"--{other} is for heads; the training of a gate ('{kind}') takes {', '.join(f'--{one}' for one in takes)}"
        )


def train_gate(
    model: Model | Callable[[], Model],
    kind: GateTraining,
    folder: Path,
    *,
    draft_model: DraftModels | Callable[[], DraftModels],
    options: Mapping[str, Any],
    seed: int,
    report: Report,
    clock: Callable[[], float] = time.monotonic,
    prompts: Seq[str | Path] | None = None,
    tokens: int | None = None,
    exclude: Seq[str | Path] | None = None,
    max_minutes: float | None = None,
    answer_tokens: int = 512,
) -> dict[str, Any]:
    """Train a gate and write its folder; returns its provenance. Parameters as :func:`outpace.train` has them.

    Raises BadInput for options out of range, files that cannot be read, a folder that holds something, and where the
    labels do not suffice; nothing is written then.
    """
    settings = validated(kind.options, options, _refusal(kind))
    check_new_folder(folder)
    excluded = Overlap(bench_texts([Path(one) for one in exclude or ()]))
    check_amounts(tokens, 0, 0, max_minutes, None, None)
    check_lengths(1, 1, answer_tokens)
    scored = kind.checks_answers
    given = given_tasks(prompts or (), excluded, seed) if scored else None
    sources = [] if scored else [source(str(one), seed) for one in prompts or ()]
    if not isinstance(model, Model):
        model = model()
    named = draft_model() if callable(draft_model) else draft_model
    context = replace(model.context(draft_model=named), label=kind.name)
    draft = context.draft()
    began, seconds = clock(), math.inf if max_minutes is None else 60.0 * max_minutes

    def ends(share: float) -> Callable[[], bool]:
        return lambda: clock() - began >= share * seconds

    over = ends(_LABELS)
    wanted = TOKENS if tokens is None else tokens
    asked = task_prompts(given, excluded, seed) if scored else open_prompts(model, sources, excluded, seed, over)

    def told(done: int) -> None:
        report(TrainingProgress("data", min(done, wanted), wanted, "", "tokens"))

    work = Work(model, draft, asked, settings, wanted, answer_tokens, seed, ends(_HALF), over, ends(1.0), told)
    made = kind.train(work)
    drafted_with = context.taken[0]
    config = GateConfig(
        gate=kind.name,
        target=facts(model.target, model.name),
        draft=DraftFacts(name=drafted_with, fingerprint=draft_probe(draft)) if kind.reads_draft else None,
        features=made.features,
        hidden=made.hidden,
        thresholds=made.thresholds,
    )
    flags = {
        "model": Path(model.name).name,
        "prompts": [Path(one).name for one in prompts or ()],
        "tokens": tokens,
        "answer-tokens": answer_tokens,
        "max-minutes": max_minutes,
        "param": [f"{name}={value}" for name, value in options.items()],
        "seed": seed,
    }
    about = {
        "command": _command(kind.name, flags),
        "draft_model": drafted_with,
        "parameters": 0 if made.gate is None else sum(weight.numel() for weight in made.gate.parameters()),
        "seconds": round(clock() - began, 1),
        "thresholds": made.thresholds,
        "figures": made.figures,
        "seed": seed,
        "machine": describe(),
    }
    save_gate(config, made.gate, folder, about)
    return about


def _refusal(kind: GateTraining) -> Callable[[str, str], BadInput]:
    known = known_fields(kind.options)
    return lambda key, reason: BadInput(f"gate '{kind.name}', setting '{key}': {reason} (settings: {known})")


def _command(kind: str, flags: Mapping[str, Any]) -> str:
    words = ["outpace", "train", kind]
    for flag, value in flags.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            words += [f"--{flag}", f"{one:g}" if isinstance(one, float) else str(one)]
    return shlex.join(words)
