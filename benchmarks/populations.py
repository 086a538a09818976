"""Groups of sequences, beams, particles and gates, measured against what each replaces. Resumable.

    python benchmarks/populations.py run --out runs/populations --prompts prompts.jsonl --gates gates
    python benchmarks/populations.py run --out runs/populations --prompts prompts.jsonl \\
        --model qwen2.5-coder-1.5b.gguf --draft-model qwen2.5-coder-0.5b.gguf
    python benchmarks/populations.py table --out runs/populations --page docs/populations.md

``run`` works through the studies of ``--studies`` a few prompts at a time; every prompt runs all rows of a study, one
after the other, beginning with another one each time:

- ``groups``: n and best_of, against as many requests one after the other;
- ``transformers``: beam search against transformers' own, both in float32 (which takes the model's memory twice);
- ``beams``: ``dsbd`` against beams without a draft, at temperature 0 and as stochastic beams at temperature 1;
- ``particles``: ``smcsd`` against as many independent samples at once, which hold as much K/V of the target;
- ``gates``: ``pad``, ``sprinter`` and ``bild`` with the gates in ``--gates`` (folders of these names, as ``outpace
  train`` writes them), ``bild`` without one, and the controller ``fallback``, with what they do to answers;
- ``scores``: the same on prompts with a checkable answer, others left out, and how many answers are right;
- ``error``: on a toy target, how far the law of ``smcsd``'s answer is from the target's, and the error of an estimate.

What is done stands in ``--out``, one file of results for each part; run again, it goes on where it ended. ``table``
pools what is there, prints it, and with ``--page`` writes it into the page, between its marks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import outpace
from cells import model_label
from outpace.core.machine import describe
from outpace.engine.method import Method
from outpace.engine.scheduler import Limits
from outpace.model import Model
from page_tables import write_tables
from particle_errors import particle_errors
from population_rows import rows_of, timed
from population_tables import SCRIPT, study_lines
from study_parts import Part, Run, batches, run_parts, study_options

STUDIES = ("groups", "transformers", "beams", "particles", "gates", "scores", "error")
GATES = ("sprinter", "pad", "bild")
GATE_ROWS = ("draft-model", "draft-model#fallback", "bild#unsure")
"""Rows of ``gates`` and ``scores`` that need no trained gate."""


def parts(options: argparse.Namespace) -> Iterator[Part]:
    model = model_label(options.model)
    used = {
        "model": model,
        "dtype": options.dtype,
        "draft_model": options.draft_model and Path(options.draft_model).name,
        "max_new_tokens": options.max_new_tokens,
        "threads": options.threads,
        "seed": options.seed,
    }
    if "error" in options.studies:
        for count in options.error_particles:
            yield Part("error-toy", (str(count),), (), {"runs": options.runs, "seed": options.seed})
    for prompts in batches(options):  # all studies advance together
        for study in options.studies:
            if study in ("gates", "scores"):
                trained = tuple(one for one in GATES if options.gates and (options.gates / one).is_dir())
                asked = prompts if study == "gates" else tuple(one for one in prompts if one.task is not None)
                if asked:
                    yield Part(f"{study}-{model}", (*GATE_ROWS, *trained), asked, used)
            elif study != "error":
                names = tuple(row.name for row in rows_of(study, options))
                yield Part(f"{study}-{model}", names, prompts, used)


class Runs:
    """What runs parts, and the models that it has loaded."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._models: dict[str, Model] = {}
        self._warm: set[str] = set()

    def model(self, **how: Any) -> Model:
        """The target: as the options say, or loaded in another way."""
        how.setdefault("dtype", self.options.dtype)
        if str(how) not in self._models:
            model = outpace.load(self.options.model, **how)
            model.shared.limits = Limits(max_batch=max(32, self.options.samples, *self.options.particles))
            self._models[str(how)] = model
        return self._models[str(how)]

    @property
    def draft(self) -> dict[str, Any]:
        """The option that names the draft model; none for the shipped one."""
        if self.options.draft_model is None:
            return {}
        if "draft" not in self._models:
            self._models["draft"] = outpace.load(self.options.draft_model, dtype=self.options.dtype)
        return {"draft_model": self._models["draft"]}

    def __call__(self, part: Part) -> str | None:
        study = part.study.partition("-")[0]
        if study == "error":
            return json.dumps(particle_errors(int(part.rows[0]), self.options.runs, self.options.seed))
        return self._gates(part) if study in ("gates", "scores") else self._rows(study, part)

    def _rows(self, study: str, part: Part) -> str:
        rows = rows_of(study, self.options)
        per_prompt = []
        for at, prompt in enumerate(part.prompts):
            if study not in self._warm:  # what is measured once is measured here
                self._warm.add(study)
                for row in rows:
                    timed(row, self, prompt, min(8, self.options.max_new_tokens))
            turn = at % len(rows)
            found = {}
            for row in (*rows[turn:], *rows[:turn]):
                found[row.name] = timed(row, self, prompt, self.options.max_new_tokens)
            per_prompt.append({"id": prompt.id, "rows": found})
        bases: dict[str, str] = {row.name: row.base for row in rows}
        about = {"settings": dict(part.settings), "machine": describe(), "bases": bases, "per_prompt": per_prompt}
        return json.dumps(about, indent=1)

    def _gates(self, part: Part) -> str | None:
        model, draft = self.model(), self.draft

        def built(row: str) -> Method:
            name, _, label = row.partition("#")
            given: dict[str, Any] = {}
            if row in GATES:
                given["settings"] = {"gate": str(self.options.gates / row)}
            elif label == "unsure":
                given["settings"] = {"fallback": 0.5, "rollback": 2.0}
            elif label:
                given["controller"] = label
            return replace(model.method(name, **given, **draft), name=row)

        found = outpace.bench(
            model,
            [built(row) for row in part.rows],
            list(part.prompts),
            max_new_tokens=self.options.max_new_tokens,
            quality=True,
        )
        return found.to_json() if found.complete else None


def started(options: argparse.Namespace) -> Run:
    torch.set_num_threads(options.threads)
    return Runs(options)


def read(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    study_options(parser)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--samples", type=int, default=8, help="n, and best_of, of 'groups'")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--particles", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--gates", type=Path, help="folder of trained gates; without it those rows are left out")
    parser.add_argument("--error-particles", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="of 'error'")
    parser.add_argument("--runs", type=int, default=1000, help="of 'error'")
    options = parser.parse_args(words)
    if options.what == "run" and not options.prompts and set(options.studies) != {"error"}:
        parser.error("give --prompts; 'error' alone needs none")
    return options


def main() -> None:
    options = read()
    if options.what == "table":
        write_tables(options.out, options.page, SCRIPT, study_lines)
    else:
        run_parts(options, parts(options), lambda: started(options))


if __name__ == "__main__":
    main()
