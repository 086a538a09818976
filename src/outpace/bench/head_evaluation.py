"""What a trained head is worth: accepted length by position and by task, by decoding with the target.

    found = outpace.evaluate_head(outpace.load("smollm2"), "heads/eagle3", methods=["eagle3"])
    print(found["drafters"][1]["mean_acceptance_length"])

Not the teacher-forced accuracy that training watches: here a draft token stands on the draft tokens before it. The runs
are the bench's (:mod:`outpace.bench.runner`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outpace.bench.bigram import Bigrams
from outpace.bench.head_subjects import (
    CHAIN,
    TREE,
    Subject,
    bigram_subjects,
    choose_methods,
    head_subjects,
    own_answers,
    untrained_subjects,
)
from outpace.bench.results import plain_figures
from outpace.bench.runner import run
from outpace.bench.settings import BenchSettings, Progress
from outpace.core.errors import BadInput
from outpace.core.files import write_atomically
from outpace.core.sampling import SamplingParams
from outpace.heads.base import Head
from outpace.heads.checkpoint import read_provenance
from outpace.heads.head_config import PROVENANCE
from outpace.heads.head_folder import HeadFolder, open_head
from outpace.heads.untrained import as_training_begins
from outpace.methods.registry import find, present_names
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts
from outpace.training.run_state import STATE

FIGURES = (
    "prompts",
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


def evaluate_head(
    model: Model | Callable[[], Model],
    folder: str | Path,
    prompts: Sequence[Prompt] | None = None,
    *,
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    max_new_tokens: int = 64,
    params: SamplingParams | None = None,
    baselines: bool = False,
    data: str | Path | None = None,
    record: bool = False,
    command: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Measure the head in ``folder``, of any layout: accepted length by position and by category, draft time, speed-up.

    ``model``: or what loads it, called after the folder and the methods have been checked. ``prompts``: None takes the
    embedded ones. ``methods``: names, or names with settings; None takes all that draft with such a head. ``params``:
    None is greedy. ``baselines``: measure the untrained head beside it, and a bigram table fitted on the conversations
    in ``data``, else on the answers to the very prompts. ``record``: keep the figures in the head's ``training.json``.

    Returns plain numbers and text, as :func:`evaluate` does, and as ``outpace eval-head --json`` prints them;
    ``gains``: whether a method was faster with it than autoregressive decoding. Raises BadInput for a folder without a
    head that fits, and for methods and prompts that do not fit.
    """
    stored = open_head(folder)
    folder, kind, identity = stored.files.path, stored.kind, stored.identity()
    wanted = choose_methods(kind, None) if methods is None else methods
    given = methods if isinstance(methods, Mapping) else {}
    chosen = {
        name: present_names(find(name), given.get(one, {})) for one in wanted for name in choose_methods(kind, one)
    }
    settings = BenchSettings(max_new_tokens=max_new_tokens, params=params or SamplingParams(), command=command)
    questions = load_prompts() if prompts is None else prompts
    loaded = model if isinstance(model, Model) else model()
    head = stored.load(loaded.target)
    subjects, fitted = head_subjects(loaded, head, chosen, identity=identity), None
    if baselines:
        untrained = as_training_begins(head, loaded.target, settings.params.fixed_seed)
        subjects += untrained_subjects(loaded, untrained, chosen)
        if data is not None:
            table, fitted = Bigrams.of(Path(data), loaded.target.vocab_size), str(data)
        else:
            table, fitted = own_answers(loaded, questions, max_new_tokens), "the answers to these prompts"
        # As many draft tokens as the head has, where its settings say so.
        nodes = [int(one["max_nodes"]) for one in chosen.values() if "max_nodes" in one]
        subjects += bigram_subjects(loaded, table, *nodes[:1])
    found = evaluate(loaded, subjects, questions, settings, on_progress)
    found["settings"] |= {"methods": list(chosen), "method_settings": plain_figures(chosen), "bigrams_of": fitted}
    found["head"] = plain_figures(head_facts(folder, head))
    found["gains"] = gains(found["drafters"], list(chosen))
    if record and found["complete"]:
        keep_with_head(stored, found)
    return found


def evaluate(
    model: Model,
    subjects: Sequence[Subject],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Decode every prompt with every subject by turns; the JSON object, plain numbers and text.

    ``drafters`` holds autoregressive decoding first, then the subjects, each with FIGURES, ``by_category``, its method
    and its head: folder and fingerprint of the weights, None where it has no head on disk. After an interrupt
    ``complete`` is false. Raises BadInput as the bench does.
    """
    built = [replace(one.method, name=one.label) for one in subjects]
    result = run(model, built, prompts, settings, on_progress)
    of = {one.label: one for one in subjects}
    rows = []
    for row in result["methods"]:
        subject = of.get(row["method"])
        if subject is None:
            named: dict[str, Any] = {"drafter": "none", "shape": None, "method": "none", "head": None}
        else:
            named = {"drafter": subject.drafter, "shape": subject.shape, "method": subject.method.name}
            named["head"] = None if subject.head is None else asdict(subject.head)
        by_category = {category: figures(part) for category, part in row["by_category"].items()}
        rows.append({**named, **figures(row), "by_category": by_category, "error": row["error"]})
    kept = {key: result[key] for key in ("version", "complete", "machine", "model", "settings")}
    return {**kept, "drafters": rows}


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """FIGURES of a bench's row."""
    return {name: row[name] for name in FIGURES if name in row} | {
        "acceptance_by_depth": by_depth(row["per_position_acceptance"])
    }


def gains(rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> bool:
    """Whether one of the head's methods, with the draft size chosen by costs, was faster than autoregressive decoding.

    The whole interval of its speed-up must lie above 1, where there is one.
    """
    used = [row for row in rows if row["drafter"] in methods and row["shape"] in (TREE, CHAIN) and row["speedup"]]
    return any((row.get("speedup_ci95") or [row["speedup"]])[0] > 1.0 for row in used)


def by_depth(shares: Sequence[float]) -> list[float]:
    """Of the rounds that got to each depth, the share in which the draft token there was accepted."""
    return [share / before for share, before in zip(shares, (1.0, *shares), strict=False)]


def head_facts(folder: Path, head: Head) -> dict[str, Any]:
    """What a head is, and where it comes from as ``training.json`` says (None where there is none)."""
    config, no_weights = head.config, (STATE, "training_args.bin")
    files = [one for one in folder.iterdir() if one.suffix in (".safetensors", ".bin", ".pt")]
    weights = [one for one in files if one.name not in no_weights]
    return {
        "folder": str(folder),
        "kind": config.kind,
        "target": config.target.name,
        "parameters": sum(weight.numel() for weight in head.parameters()),
        "bytes": sum(one.stat().st_size for one in weights),
        "vocabulary": config.vocabulary,
        "rank": config.rank,
        "layers": config.layers,
        "aux_hidden_state_layers": list(config.aux_hidden_state_layers),
        "options": config.options,
        "training": read_provenance(folder),
    }


def keep_with_head(head: HeadFolder, result: Mapping[str, Any]) -> None:
    """Keep the rows that were measured with this head beside it, in place of earlier ones at this temperature.

    Raises BadInput where they cannot be written, and where there is no row of the weights that are in the folder now.
    """
    settings, folder, identity = result["settings"], head.files.path, asdict(head.identity())
    rows = [row for row in result["drafters"] if row["head"] == identity]
    if not rows:
        raise BadInput(f"the weights in {folder} have changed since they were measured; measure the head again")
    about = read_provenance(folder) or {}
    measured = dict(about.get("measured") or {})
    measured[f"temperature {settings['temperature']:g}"] = {
        # Others run it from elsewhere: files by their names.
        "command": shlex.join(Path(word).name if "/" in word else word for word in shlex.split(settings["command"])),
        "prompts": settings["prompts"],
        "max_new_tokens": settings["max_new_tokens"],
        "machine": {key: result["machine"].get(key) for key in ("cpu", "threads", "accelerator")},
        "weights": identity["weights"],
        "drafters": [{key: row[key] for key in ("method", "shape", *RECORDED)} for row in rows],
    }
    try:
        write_atomically(folder / PROVENANCE, json.dumps({**about, "measured": measured}, indent=1).encode())
    except OSError as error:
        raise BadInput(f"cannot write the figures to {folder}: {error.strerror or error}") from None
