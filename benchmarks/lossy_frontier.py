"""What lossy acceptance rules cost: the frontier of speed against divergence, and scores of tasks. Resumable.

    python benchmarks/lossy_frontier.py divergence --out runs/lossy --prompts spec_bench.jsonl --share 3
    python benchmarks/lossy_frontier.py scores --out runs/lossy --prompts gsm8k.jsonl --max-new-tokens 512 \\
        --model qwen2.5-coder-1.5b.gguf --draft-model qwen2.5-coder-0.5b.gguf
    python benchmarks/lossy_frontier.py table --out runs/lossy --page docs/lossy.md

``divergence`` measures every rule of :data:`SWEEPS` at each value of its knob, at every temperature; ``scores`` the
rows of :data:`SCORED` on tasks, a study for each ``--prompts``. Both take ``--batch`` prompts at a time and run all
rows on them, every drafter and temperature, before the next ones: whenever a run ends, all rules and settings have
answered the same prompts. What is done stands in ``--out``, one file of results for each part; run again, they go on
where they ended. ``--max-minutes`` bounds a run.
``table`` pools what is there, prints it, and with ``--page`` writes it into the page, between its marks.
``lossy_scores.tar.xz`` holds the parts of ``scores`` that docs/lossy.md shows: unpacked into ``--out``, a run goes on
from them.

    python benchmarks/lossy_frontier.py divergence --out runs/lossy --prompts spec_bench.jsonl --max-new-tokens 48 \\
        --max-minutes 30
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import outpace
from cells import model_label
from lossy_tables import SCRIPT, overall, study_lines
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.methods.side_by_side import build_all
from page_tables import write_tables
from study_parts import Part, Run, batches, run_parts, study_options

SWEEPS: dict[str, tuple[str, ...]] = {
    # As in the defaults, delta is the square root of epsilon.
    "typical": tuple(f"epsilon={one:g},delta={one**0.5:.3g}" for one in (0.03, 0.09, 0.25, 0.5)),
    "top-beta": (
        *(f"tau={one:g}" for one in (0.25, 0.5, 1.0, 2.0)),
        "criterion=top-k,beta=2",
        "criterion=distance,distance=1",
    ),
    "cactus": tuple(f"delta={one:g}" for one in (0.01, 0.03, 0.1, 0.3, 1.0)),
    "margin": tuple(f"theta={one:g}" for one in (0.98, 0.95, 0.9, 0.8)),
    "rollback": tuple(f"distance={one:g}" for one in (0.5, 1.0, 2.0, 4.0)),
    "fly": tuple(f"entropy={one:g},window={window}" for one, window in ((0.3, 6), (0.1, 6), (0.1, 3), (0.1, 1))),
    "lantern": tuple(f"cap={one:g}" for one in (0.05, 0.1, 0.3)),
    "grouped": tuple(f"size={one}" for one in (2, 3, 10)),
    "importance": tuple(f"relax={one:g}" for one in (0.1, 0.3, 1.0)),
    "target-first": tuple(f"candidates={one}" for one in (2, 4)),
}
"""Settings of every rule, from careful to generous."""
GREEDY = ("top-beta", "margin", "rollback", "fly")
"""Rules that change answers at temperature 0; the others' are then those of greedy decoding."""
SCORED = (
    "draft-model",
    "draft-model@margin(theta=0.8)",
    "draft-model@rollback(distance=4)",
    "draft-model@fly(entropy=0.1,window=1)",
)
"""Rows of ``scores``: lossless, and the settings with which three rules gained the most speed in ``divergence``."""


def rows_of(drafter: str, temperature: float, only: Sequence[str] = ()) -> tuple[str, ...]:
    """The drafter with its own rule, and with every lossy one, or ``only`` with some."""
    lossy = [rule for rule in (SWEEPS if temperature else GREEDY) if rule in only or not only]
    return (drafter, *(f"{drafter}@{rule}({one})" for rule in lossy for one in SWEEPS[rule]))


def divergence(options: argparse.Namespace) -> Iterator[Part]:
    for prompts in batches(options):  # all studies advance together
        for temperature in map(float, options.temperatures.split(",")):
            for drafter in options.methods.split(","):
                rows = rows_of(drafter, temperature, options.rules)
                study = f"divergence-{options.model_name}-{drafter}-t{temperature:g}"
                yield Part(study, rows, prompts, settings(options, temperature))


def scores(options: argparse.Namespace) -> Iterator[Part]:
    tasks = "+".join(file.stem for file in options.prompts)
    for prompts in batches(options):
        yield Part(f"scores-{options.model_name}-{tasks}", SCORED, prompts, settings(options, 0.0))


def settings(options: argparse.Namespace, temperature: float) -> dict[str, Any]:
    return {
        "model": options.model_name,
        "dtype": options.dtype,
        "draft_model": options.draft_model and Path(options.draft_model).name,
        "temperature": temperature,
        "max_new_tokens": options.max_new_tokens,
        "threads": options.threads,
        "seed": options.seed,
    }


def measure(options: argparse.Namespace, parts: Iterable[Part]) -> None:
    """Run the parts that are not done yet."""

    def start() -> Run:
        torch.set_num_threads(options.threads)
        model = outpace.load(options.model, dtype=options.dtype)
        drafts = outpace.load(options.draft_model, dtype=options.dtype) if options.draft_model else None
        context = model.context(draft_model=drafts)
        built: dict[str, list[Method]] = {}

        def run(part: Part) -> str | None:
            warm = part.study in built  # parts are small: what one has warmed up, the next ones use
            if not warm:
                methods = build_all(part.rows, context, {})
                built[part.study] = [replace(one, name=row) for one, row in zip(methods, part.rows, strict=True)]
            found = outpace.bench(
                model,
                built[part.study],
                list(part.prompts),
                max_new_tokens=options.max_new_tokens,
                params=SamplingParams(temperature=part.settings["temperature"], seed=options.seed),
                draft_model=drafts,
                quality=True,
                warmup_tokens=0 if warm else 8,
            )
            failed = {row["method"]: row["error"] or row["failed"] for row in found.rows}
            if wrong := {name: why for name, why in failed.items() if why}:
                # Kept, it would take its prompts out of all rows.
                raise SystemExit(f"{part.study}: this part is not kept, as rows failed: {wrong}")
            return found.to_json() if found.complete else None

        return run

    run_parts(options, parts, start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("divergence", "scores", "table"))
    study_options(parser)
    parser.add_argument("--methods", default="draft-model,pld", help="drafters of 'divergence'")
    parser.add_argument("--rules", nargs="+", default=(), choices=SWEEPS, help="only these; by default all")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.set_defaults(batch=1)
    options = parser.parse_args()
    options.model_name = model_label(options.model)
    if options.study == "table":
        write_tables(options.out, options.page, SCRIPT, study_lines, overall)
    else:
        measure(options, (divergence if options.study == "divergence" else scores)(options))


if __name__ == "__main__":
    main()
