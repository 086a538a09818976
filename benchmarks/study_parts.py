"""Studies that run for hours: done parts stand in a folder, one JSON file each, and a run goes on with the rest."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outpace.core.files import write_atomically
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts, stratified, unique


@dataclass(frozen=True, slots=True)
class Part:
    """Some prompts with some rows. ``study``: what it belongs to; its file's name has a digest of all that it is."""

    study: str
    rows: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    settings: Mapping[str, Any]

    @property
    def file(self) -> str:
        said = json.dumps([self.rows, [asdict(one) for one in self.prompts], dict(self.settings)], sort_keys=True)
        return f"{self.study}-{hashlib.sha256(said.encode()).hexdigest()[:12]}.json"


def study_options(parser: argparse.ArgumentParser) -> None:
    """Options that studies have in common."""
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, default=())
    parser.add_argument("--share", type=int, default=1, help="use one prompt in so many")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch", type=int, default=4, help="prompts in a part")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype")
    parser.add_argument("--draft-model", help="by default the one that is shipped for the model")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, help="end after the part in which this time is over")
    parser.add_argument(
        "--max-minutes", type=float, help="begin no part that would end later, by the time that its study's parts took"
    )
    parser.add_argument("--page", type=Path, help="write the tables into this page, between its marks")


def chosen(options: argparse.Namespace) -> tuple[Prompt, ...]:
    """Every ``--share``-th prompt of each category, at most ``--limit`` of all."""
    found = unique([prompt for file in options.prompts for prompt in load_prompts(file)])
    mixed = stratified(found, len(found))
    return tuple(mixed[: -(-len(mixed) // options.share)][: options.limit])


def batches(options: argparse.Namespace) -> list[tuple[Prompt, ...]]:
    """The prompts of each part."""
    prompts = chosen(options)
    return [prompts[at : at + options.batch] for at in range(0, len(prompts), options.batch)]


Run = Callable[[Part], str | None]
"""Runs a part; returns its result as JSON, or None where it was interrupted."""


def run_parts(options: argparse.Namespace, parts: Iterable[Part], start: Callable[[], Run]) -> None:
    """Run the parts that are not done yet. ``start`` loads what they need, and returns what runs one."""
    parts = list(parts)
    options.out.mkdir(parents=True, exist_ok=True)
    open_parts = [part for part in parts if not (options.out / part.file).exists()]
    print(f"{len(parts) - len(open_parts)} of {len(parts)} parts are done", flush=True)
    if not open_parts:
        return
    began = time.monotonic()  # loading counts: a run has so many minutes of the machine
    run = start()
    took: dict[str, float] = {}
    for number, part in enumerate(open_parts, 1):
        begun = time.monotonic()
        if options.max_minutes and begun - began + took.get(part.study, 0.0) > 60 * options.max_minutes:
            print(f"{part.study}: the next part would end after {options.max_minutes:g} minutes", flush=True)
            return
        found = run(part)
        if found is None:
            return
        write_atomically(options.out / part.file, (found + "\n").encode())
        took[part.study] = time.monotonic() - begun
        spent = time.monotonic() - began
        left = spent / number * (len(open_parts) - number)
        print(
            f"{part.study}: {number} of {len(open_parts)}, {spent / 60:.0f} min, about {left / 60:.0f} left", flush=True
        )
        if options.hours and spent > 3600 * options.hours:
            return
