"""Is the advice right? Predictions of ``outpace advise`` beside measurements of ``outpace bench`` on other prompts.

    python benchmarks/advice_check.py --out advice.jsonl --models smollm2=draft-lm MODEL.gguf=SMALL.gguf
    python benchmarks/advice_check.py --out advice.jsonl --table

Prompts of even number in their category are advised on, those of odd number are measured, all categories mixed: that is
the traffic that an advice speaks of, where a bench would decode those of one category together. A *piece* is a model at
a temperature and a batch: one advice, and one bench of the methods with the settings that it found best. Each piece is
appended to the file as a line when it is complete; pieces that are there already are left out, so that a run that was
ended goes on. ``--max-minutes`` ends after the piece in which that time is over.

Printed are, over all cells (a method in a piece), those of each batch and those of each temperature: the median error,
how many predictions are within 5 % or within the measurement's own interval, how many measurements the 90 % intervals
cover; over all pieces the regret of the recommendation: by how much the best measured method was faster, with a
bootstrap interval over pieces; and how often none was recommended, rightly and wrongly.

A measurement has an interval where its prompts run in several turns, of twice as many prompts as the batch: at batch 16
the embedded set is too small for that, and the 240 questions of Spec-Bench are enough.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import outpace
from cells import (
    CellRun,
    append_cell,
    cell_options,
    check_settings,
    digest_of,
    model_label,
    models_and_drafts,
    numbers,
    read_cells,
)
from outpace.advice.advising import advise
from outpace.advice.recommendation import WORTH
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.methods.named_weights import DRAFT_LM, DraftModels, Heads, head_folders
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts, stratified

CLOSE = 0.05
Piece = tuple[str, float, int]
"""Model, temperature, batch."""


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to advise on, and others to measure on, of the same categories."""
    seen: dict[str, int] = {}
    parts: tuple[list[Prompt], list[Prompt]] = [], []
    for prompt in prompts:
        number = seen.get(prompt.category, 0)
        seen[prompt.category] = number + 1
        parts[number % 2].append(prompt)
    return parts


def piece(
    options: argparse.Namespace, model: Model, draft: DraftModels, head: Heads, temperature: float, batch: int
) -> dict[str, Any]:
    """One advice and one bench. ``draft``: the draft model of ``draft-model``; None: that method is left out. ``head``:
    None takes the shipped one that has measured best, if any."""
    ours, others = halves(load_prompts(options.prompts))
    # An advice speaks of first turns: later ones have other contexts.
    others = [
        replace(one, category="mixed", turns=one.turns[:1]) for one in stratified(others, options.limit or len(others))
    ]
    params = SamplingParams(temperature=temperature)
    found = advise(
        model,
        ours,
        batches=(batch,),
        params=params,
        draft_model=draft,
        head=head,
        minutes=options.minutes,
        max_new_tokens=options.tokens,
    ).result
    rows = [row for row in found["candidates"] if row["method"] != "none"]
    whole = outpace.bench(
        outpace.load(model.name),  # what the advice has taught this one, a user's server does not know
        {row["method"]: row["settings"] for row in rows},
        others,
        max_new_tokens=options.tokens,
        batch_size=batch,
        params=params,
        draft_model=draft,
        head=head,
    )
    if not whole.complete:  # Ctrl-C
        raise KeyboardInterrupt
    report = whole.result
    measured = {row["method"]: row for row in report["methods"]}
    cells = [
        {
            "method": row["method"],
            "settings": row["settings"],
            "predicted": row["speedup"],
            "interval": row["interval"],
            "measured": measured[row["method"]]["speedup"],
            "ci95": measured[row["method"]]["speedup_ci95"],
            "tokens_per_round": [row["tokens_per_round"], measured[row["method"]]["mean_acceptance_length"]],
            "draft_steps": row["draft_steps"],
            "time_split": measured[row["method"]]["time_split"],
        }
        for row in rows
    ]
    return {
        "temperature": temperature,
        "batch": batch,
        "recommended": found["recommendation"]["method"],
        "cells": cells,
        "seconds": found["seconds"],
        "round_seconds": [found["costs"][str(batch)]["step_seconds"], _round_seconds(measured["none"], batch)],
    }


def _round_seconds(row: Mapping[str, Any], batch: int) -> float | None:
    """Of autoregressive rounds. The bench divides the time of a round equally among its requests."""
    rate = row["decode_tokens_per_second"]
    return None if not rate else batch / rate


@dataclass(slots=True)
class Tally:
    """Of some cells: errors of predictions, and how many of them are close or cover the measurement."""

    errors: list[float] = field(default_factory=list)
    close: int = 0
    covered: int = 0

    def count(self, cell: Mapping[str, Any]) -> None:
        measured, (low, high) = cell["measured"], cell["interval"]
        error = abs(math.log(cell["predicted"] / measured))
        within = cell["ci95"] is not None and cell["ci95"][0] <= cell["predicted"] <= cell["ci95"][1]
        self.errors.append(error)
        self.close += error <= CLOSE or within
        self.covered += low <= measured <= high

    def words(self) -> str:
        total = len(self.errors)
        return (
            f"median error {100 * median(self.errors):.1f} %, {self.close} of {total} within 5 % or the measured "
            f"interval, {self.covered} of {total} ({100 * self.covered / total:.0f} %) in the 90 % interval"
        )


def summary(pieces: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table, and the figures below it. Where there is no measured interval, nothing is judged by one."""
    lines = [f"{'model':<16}{'temp':>5}{'batch':>6}  {'method':<13}{'predicted':>10} {'90 %':<14}{'measured':>9}  95 %"]
    tallies: dict[str, Tally] = {}
    regrets: list[float] = []
    without, right, hopeless, wrong, hopeful = 0, 0, 0, 0, 0
    for one in pieces:
        cells = [cell for cell in one["cells"] if cell["measured"]]
        for cell in cells:
            for part in ("all", f"batch {one['batch']}", f"temperature {one['temperature']:g}"):
                tallies.setdefault(part, Tally()).count(cell)
            low, high = cell["interval"]
            without += cell["ci95"] is None
            ci95 = "none" if cell["ci95"] is None else f"[{cell['ci95'][0]:.2f}, {cell['ci95'][1]:.2f}]"
            lines.append(
                f"{model_label(one['model'])[:15]:<16}{one['temperature']:>5g}{one['batch']:>6}  {cell['method']:<13}"
                f"{cell['predicted']:>9.2f}x [{low:.2f}, {high:.2f}]  {cell['measured']:>8.2f}x {ci95}"
            )
        speeds = {"none": 1.0} | {cell["method"]: cell["measured"] for cell in cells}
        if not cells or one["recommended"] not in speeds:
            continue
        regrets.append(1.0 - speeds[one["recommended"]] / max(speeds.values()))
        best = max(cells, key=lambda cell: cell["measured"])
        if best["ci95"] is None:
            continue
        gains = best["ci95"][0] > WORTH
        hopeful += gains
        wrong += gains and one["recommended"] == "none"
        hopeless += not gains
        right += not gains and one["recommended"] == "none"
    if not tallies:
        return ["nothing was measured yet"]
    lines += [""] + [f"{part}: {tally.words()}" for part, tally in sorted(tallies.items())]
    if regrets:
        lines.append(f"regret of the recommendation {100 * float(np.mean(regrets)):.1f} %{_interval(regrets)}")
    lines += [
        f"none was recommended in {right} of {hopeless} pieces in which nothing was surely above {WORTH:.2f}x",
        f"none was recommended in {wrong} of {hopeful} pieces in which the best method was surely above it",
    ]
    if without:
        lines.append(
            f"{without} cells have no measured interval: their prompts ran in one turn, of twice as many prompts as "
            "the batch; measure more of them (--prompts, --limit)"
        )
    return lines


def _interval(regrets: Sequence[float]) -> str:
    if len(regrets) < 2:
        return ""
    drawn = np.random.default_rng(0).choice(np.array(regrets), (4000, len(regrets))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f" [{100 * low:.1f}, {100 * high:.1f}] over {len(regrets)} pieces"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cell_options(parser, "piece")
    parser.add_argument("--models", nargs="+", default=["smollm2=draft-lm"], metavar="MODEL[=DRAFT]")
    parser.add_argument(
        "--head",
        action="append",
        default=[],
        metavar="MODEL=FOLDER",
        help="a head, for a model of which none is shipped",
    )
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prompts", type=Path, help="prompts in place of the embedded set")
    parser.add_argument("--limit", type=int, help="prompts that are measured at most")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0, help="for an advice")
    parser.add_argument("--threads", type=int, help="of this machine; by default all")
    options = parser.parse_args(argv)
    try:
        pieces = read_cells(options.out)
        if not options.table:
            measure(options, pieces)
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; complete pieces are kept, the same command goes on", file=sys.stderr)
        return 130
    print("\n".join(summary(pieces)))
    return 0


def heads_of(given: Sequence[str], models: Collection[str]) -> dict[str, list[str]]:
    """Folders of heads by the model that they are for. Raises BadInput for another model, and where no head is."""
    found: dict[str, list[str]] = {}
    for text in given:
        name, sign, folder = text.partition("=")
        if not sign or name not in models:
            raise BadInput(f"--head takes MODEL=FOLDER, with one of --models ({', '.join(models)}), not '{text}'")
        found.setdefault(name, []).append(folder)
    for folders in found.values():
        head_folders(folders)
    return found


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all pieces depend on."""
    said = {name: getattr(options, name) for name in ("tokens", "limit", "minutes", "threads")}
    prompts = [(one.id, one.turns) for one in load_prompts(options.prompts)]
    return said | {"prompts": digest_of(prompts)}


def measure(options: argparse.Namespace, pieces: list[dict[str, Any]]) -> None:
    """Measure the pieces that are not there yet, and add them. Raises BadInput."""
    drafts, batches = models_and_drafts(options.models), numbers("--batches", options.batches)
    heads = heads_of(options.head, drafts)
    try:
        temperatures = [float(one) for one in options.temperatures.split(",")]
    except ValueError:
        raise BadInput(f"--temperatures takes numbers such as 0,0.8, not '{options.temperatures}'") from None
    for temperature in temperatures:
        SamplingParams(temperature=temperature)  # refuses what is out of range
    wanted = [(name, temperature, batch) for name in drafts for temperature in temperatures for batch in batches]
    models = {name: [draft, heads.get(name)] for name, draft in drafts.items()}
    check_settings(options.out, settings(options), models, pieces)
    run = CellRun(options.max_minutes)
    for each in pieces:
        run.known((each["model"], each["batch"]), each.get("whole_seconds"))
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    def there(one: Piece) -> bool:
        return any((each["model"], each["temperature"], each["batch"]) == one for each in pieces)

    loaded: dict[str, Model] = {}
    for one in run.each(wanted, there, lambda one: (one[0], one[2])):
        began, (name, temperature, batch) = time.monotonic(), one
        for path in (name, drafts[name]):
            if path is not None and path != DRAFT_LM and path not in loaded:
                loaded[path] = outpace.load(path)
        draft: Any = loaded.get(drafts[name] or "", drafts[name])
        found = {"model": name, **piece(options, loaded[name], draft, heads.get(name), temperature, batch)}
        found["whole_seconds"] = time.monotonic() - began
        pieces.append(found)
        append_cell(options.out, found)


if __name__ == "__main__":
    sys.exit(main())
