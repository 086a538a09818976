"""Is the advice right? Predictions of ``outpace advise`` beside measurements of ``outpace bench`` on other prompts.

    python benchmarks/advice_check.py --out advice.jsonl --models smollm2 --batches 1,4,16 --temperatures 0,0.8
    python benchmarks/advice_check.py --out advice.jsonl --models MODEL.gguf --draft-model SMALL.gguf
    python benchmarks/advice_check.py --out advice.jsonl --table

Prompts of even number in their category are advised on, those of odd number are measured, all categories mixed: that is
the traffic that an advice speaks of, where a bench would decode those of one category together. A *piece* is a model at
a temperature and a batch: one advice, and one bench of the methods with the settings that it found best. Each piece is
appended to the file as a line when it is complete; pieces that are there already are left out, so that a run that was
ended goes on. ``--pieces N`` ends after N new ones.

Printed are, over all cells (a method in a piece): the median error, how many predictions are within 5 % or within the
measurement's own interval, how many measurements the 90 % intervals cover; and over all pieces the regret of the
recommendation: by how much the best measured method was faster, with a bootstrap interval over pieces.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import outpace
from outpace.advice.advising import advise
from outpace.advice.recommendation import WORTH
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts, stratified

CLOSE = 0.05


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to advise on, and others to measure on, of the same categories."""
    seen: dict[str, int] = {}
    parts: tuple[list[Prompt], list[Prompt]] = [], []
    for prompt in prompts:
        number = seen.get(prompt.category, 0)
        seen[prompt.category] = number + 1
        parts[number % 2].append(prompt)
    return parts


def piece(options: argparse.Namespace, name: str, temperature: float, batch: int) -> dict[str, Any]:
    """One advice and one bench."""
    model = outpace.load(name)
    draft = options.draft_model
    if draft is not None and draft != "draft-lm" and Path(draft).suffix == ".gguf":
        draft = outpace.load(draft)
    ours, others = halves(load_prompts(options.prompts))
    others = [replace(one, category="mixed") for one in stratified(others, options.limit or len(others))]
    params = SamplingParams(temperature=temperature, seed=0)
    found = advise(
        model,
        ours,
        batches=(batch,),
        params=params,
        draft_model=draft,
        minutes=options.minutes,
        max_new_tokens=options.tokens,
    ).result
    rows = [row for row in found["candidates"] if row["method"] != "none"]
    report = outpace.bench(
        model,
        {row["method"]: row["settings"] for row in rows},
        others,
        max_new_tokens=options.tokens,
        batch_size=batch,
        params=params,
        draft_model=draft,
    ).result
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
        "model": name,
        "temperature": temperature,
        "batch": batch,
        "recommended": found["recommendation"]["method"],
        "cells": cells,
        "seconds": found["seconds"],
        "round_seconds": [found["costs"][str(batch)]["step_seconds"], _round_seconds(measured["none"])],
    }


def _round_seconds(row: Mapping[str, Any]) -> float | None:
    """Of autoregressive rounds of one request, as the bench counts them."""
    rate = row["decode_tokens_per_second"]
    return None if not rate else 1.0 / rate


def summary(pieces: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table, and the figures below it."""
    lines = [f"{'model':<16}{'temp':>5}{'batch':>6}  {'method':<13}{'predicted':>10} {'90 %':<14}{'measured':>9}  95 %"]
    errors, close, covered, total, regrets, none_right, none_said = [], 0, 0, 0, [], 0, 0
    for one in pieces:
        cells = [cell for cell in one["cells"] if cell["measured"]]
        for cell in cells:
            low, high = cell["interval"]
            ci95 = cell["ci95"] or [cell["measured"]] * 2
            error = math.log(cell["predicted"] / cell["measured"])
            errors.append(abs(error))
            close += abs(error) <= CLOSE or ci95[0] <= cell["predicted"] <= ci95[1]
            covered += low <= cell["measured"] <= high
            total += 1
            lines.append(
                f"{Path(one['model']).stem[:15]:<16}{one['temperature']:>5g}{one['batch']:>6}  {cell['method']:<13}"
                f"{cell['predicted']:>9.2f}x [{low:.2f}, {high:.2f}]  {cell['measured']:>8.2f}x "
                f"[{ci95[0]:.2f}, {ci95[1]:.2f}]"
            )
        speeds = {"none": 1.0} | {cell["method"]: cell["measured"] for cell in cells}
        regrets.append(1.0 - speeds[one["recommended"]] / max(speeds.values()))
        best = max(cells, key=lambda cell: cell["measured"])
        hopeless = (best["ci95"] or [best["measured"]])[0] <= WORTH
        none_said += hopeless
        none_right += hopeless and one["recommended"] == "none"
    if not total:
        return ["nothing was measured yet"]
    lines += [
        "",
        f"median error {100 * median(errors):.1f} %; {close} of {total} within 5 % or the measured interval",
        f"the 90 % intervals cover {covered} of {total} measurements ({100 * covered / total:.0f} %)",
        f"regret of the recommendation {100 * float(np.mean(regrets)):.1f} %{_interval(regrets)}",
        f"none was recommended in {none_right} of {none_said} pieces in which nothing was surely above {WORTH:.2f}x",
    ]
    return lines


def _interval(regrets: Sequence[float]) -> str:
    if len(regrets) < 2:
        return ""
    drawn = np.random.default_rng(0).choice(np.array(regrets), (4000, len(regrets))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f" [{100 * low:.1f}, {100 * high:.1f}] over {len(regrets)} pieces"


def read(path: Path) -> list[dict[str, Any]]:
    """The pieces of a file. Raises BadInput for a line that is none."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(json.loads(line))
        except ValueError:
            raise BadInput(f"{path}, line {number}: not JSON; delete the line to measure the piece again") from None
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of pieces, a line each")
    parser.add_argument("--models", default="smollm2", help="names, separated by commas")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--draft-model", help="draft model for draft-model; draft-lm: the shipped one")
    parser.add_argument("--prompts", type=Path, help="prompts in place of the embedded set")
    parser.add_argument("--limit", type=int, help="prompts that are measured at most")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0, help="for an advice")
    parser.add_argument("--pieces", type=int, help="end after so many new ones")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args(argv)
    try:
        pieces = read(options.out)
        done = {(one["model"], one["temperature"], one["batch"]) for one in pieces}
        wanted = [
            (name, float(temperature), int(batch))
            for name in options.models.split(",")
            for temperature in options.temperatures.split(",")
            for batch in options.batches.split(",")
        ]
        missing = [] if options.table else [one for one in wanted if one not in done]
        for name, temperature, batch in missing[: options.pieces]:
            found = piece(options, name, temperature, batch)
            pieces.append(found)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
    except (BadInput, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(summary(pieces)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
