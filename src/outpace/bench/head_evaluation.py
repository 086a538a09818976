"""What a trained head is worth: accepted length by position and by task, by decoding with the target.

    subjects = head_subjects(model, open_head("my_head").load(model.target), {"eagle3": {}})
    result = evaluate(model, subjects, load_prompts(), BenchSettings(max_new_tokens=64))
    print(result["drafters"][0]["mean_acceptance_length"])

Not the teacher-forced accuracy that training watches: there every draft token stands on the target's own text, here it
stands on the draft tokens before it. The runs are the bench's (:mod:`outpace.bench.runner`): all drafters by turns on
the same prompts, plain decoding among them, answers compared. Draft time and accepted length are reported apart from
the speed-up that comes of them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.bench.head_subjects import Subject
from outpace.bench.runner import run
from outpace.bench.settings import BenchSettings, Progress
from outpace.core.errors import BadInput
from outpace.core.files import write_atomically
from outpace.heads.base import Head
from outpace.heads.checkpoint import PROVENANCE, read_provenance
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.training.run_state import STATE

FIGURES = (
    "tokens",
    "mean_acceptance_length",
    "per_position_acceptance",
    "acceptance_by_depth",
    "acceptance_rate",
    "drafting_rounds",
    "draft_ms",
    "decode_tokens_per_second",
    "speedup",
    "speedup_ci95",
    "identical",
)
"""What is said of a drafter, over all prompts and over those of each category."""
RECORDED = ("mean_acceptance_length", "per_position_acceptance", "draft_ms", "speedup", "speedup_ci95")
"""What a head's ``training.json`` keeps of it."""


def evaluate(
    model: Model,
    subjects: Sequence[Subject],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Decode every prompt with every subject by turns; the JSON object, plain numbers and text.

    ``drafters`` holds plain decoding first, then the subjects, each with FIGURES and ``by_category``. After an
    interrupt ``complete`` is false. Raises BadInput as the bench does.
    """
    built = [replace(one.method, name=one.label) for one in subjects]
    result = run(model, built, prompts, settings, on_progress)
    of = {one.label: one for one in subjects}
    rows = []
    for row in result["methods"]:
        subject = of.get(row["method"])
        named = {"drafter": subject.drafter, "shape": subject.shape} if subject else {"drafter": "none", "shape": None}
        by_category = {category: figures(part) for category, part in row["by_category"].items()}
        rows.append({**named, **figures(row), "by_category": by_category, "error": row["error"]})
    kept = {key: result[key] for key in ("version", "complete", "machine", "model", "settings")}
    return {**kept, "drafters": rows}


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a bench's row that say what a drafter is worth, ``acceptance_by_depth`` among them."""
    return {name: row[name] for name in FIGURES if name in row} | {
        "acceptance_by_depth": by_depth(row["per_position_acceptance"])
    }


def by_depth(shares: Sequence[float]) -> list[float]:
    """Of the rounds that got to each depth, the share in which the draft token there was accepted."""
    return [share / before for share, before in zip(shares, (1.0, *shares), strict=False)]


def head_facts(folder: Path, head: Head) -> dict[str, Any]:
    """What a head is, and where it comes from as ``training.json`` says (None where there is none)."""
    config = head.config
    return {
        "folder": str(folder),
        "kind": config.kind,
        "target": config.target.name,
        "parameters": sum(weight.numel() for weight in head.parameters()),
        "bytes": sum(one.stat().st_size for one in folder.iterdir() if _holds_weights(one)),
        "vocabulary": config.vocabulary,
        "rank": config.rank,
        "layers": config.layers,
        "aux_hidden_state_layers": list(config.aux_hidden_state_layers),
        "options": config.options,
        "training": read_provenance(folder),
    }


def _holds_weights(path: Path) -> bool:
    """Of whatever layout; the state of a run is not the head."""
    return path.suffix in (".safetensors", ".bin", ".pt") and path.name not in (STATE, "training_args.bin")


def record(folder: Path, result: Mapping[str, Any]) -> None:
    """Keep with the head what was measured of it: accepted lengths, on what, by which command.

    The head's own rows alone; an earlier measurement at this temperature is replaced. Raises BadInput where it cannot.
    """
    settings = result["settings"]
    about = read_provenance(folder) or {}
    measured = dict(about.get("measured") or {})
    measured[f"temperature {settings['temperature']:g}"] = {
        # Others run it from elsewhere: files by their names.
        "command": shlex.join(Path(word).name if "/" in word else word for word in shlex.split(settings["command"])),
        "prompts": settings["prompts"],
        "max_new_tokens": settings["max_new_tokens"],
        "machine": {key: result["machine"].get(key) for key in ("cpu", "threads", "accelerator")},
        "drafters": [
            {key: row[key] for key in ("drafter", "shape", *RECORDED)}
            for row in result["drafters"]
            if row["drafter"] in settings["methods"]
        ],
    }
    try:
        write_atomically(folder / PROVENANCE, json.dumps({**about, "measured": measured}, indent=1).encode())
    except OSError as error:
        raise BadInput(f"what was measured cannot be kept in {folder}: {error.strerror or error}") from None
