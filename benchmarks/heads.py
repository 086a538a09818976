"""All learned drafters at equal budget, in one table: accepted length by position and by task, draft time, speed-up.

    python benchmarks/heads.py questions.jsonl --shipped --head out/medusa --data out/conversations --out out/heads

Every head drafts with all methods of its kind, as trees and as a chain, sized by measured costs and of fixed sizes,
beside autoregressive decoding, `sam`, `auto`, a bigram table fitted on the conversations in --data, and each head as it
was before training. All run by turns on every prompt (``outpace bench``'s runner), so that a machine that grows slower
favours none. OUT.md holds the tables and OUT.json the results; what an interrupt leaves is written too. --record keeps
the figures of each head beside it, in its ``training.json``.

What training cost is read from each head's ``training.json``. A head may be named with settings of its method:
``--head out/medusa:max_nodes=8,topk=2``.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace.bench.bigram import Bigrams
from outpace.bench.figure_text import number, percent, times
from outpace.bench.head_evaluation import evaluate, head_facts, keep_with_head
from outpace.bench.head_subjects import (
    Subject,
    bigram_subjects,
    choose_methods,
    head_subjects,
    own_answers,
    untrained_subjects,
)
from outpace.bench.results import plain_figures
from outpace.bench.settings import BenchSettings
from outpace.cli.bars import advancing
from outpace.cli.output import to_json, write_whole
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.heads.head_folder import HeadFolder, open_head
from outpace.heads.shipped import shipped
from outpace.heads.untrained import as_training_begins
from outpace.methods.registry import find
from outpace.model import Model
from outpace.prompts.questions import load_prompts

DEPTHS = 6
"""Positions in the tables; OUT.json has all."""


def split_settings(named: str) -> tuple[Path, dict[str, str]]:
    """``FOLDER`` or ``FOLDER:key=value,key=value``."""
    folder, colon, rest = named.rpartition(":")
    if not colon or "=" not in rest:
        return Path(named), {}
    pairs = [pair.partition("=") for pair in rest.split(",")]
    return Path(folder), {key: value for key, _, value in pairs}


def taken(method: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Those of the settings that a method has."""
    return {key: value for key, value in settings.items() if key in find(method).settings.model_fields}


def subjects_of(
    model: Model, named: Sequence[str], compared: bool, seed: int
) -> tuple[list[Subject], dict[str, dict[str, Any]], list[HeadFolder]]:
    """The drafters of all heads, what each head is by the name that tables show, and the heads' folders."""
    subjects: list[Subject] = []
    facts: dict[str, dict[str, Any]] = {}
    stored: list[HeadFolder] = []
    for one in named:
        folder, settings = split_settings(one)
        stored.append(open_head(folder))
        head = stored[-1].load(model.target)
        methods = choose_methods(head.config.kind, None)
        kinds = {method: taken(method, settings) for method in methods}
        label = label_of(head.config.kind, folder, facts)
        facts[label.format(head.config.kind)] = head_facts(folder, head) | {"methods": kinds}
        subjects += head_subjects(model, head, kinds, label, stored[-1].identity())
        if compared:
            before = as_training_begins(head, model.target, seed)
            subjects += untrained_subjects(model, before, kinds, f"untrained {label}")
    return subjects, facts, stored


def label_of(kind: str, folder: Path, taken: Container[str]) -> str:
    """How tables name the drafters of a head: {} alone for the first of a kind, else with as much of its folder as
    tells it from the others."""
    ends = [Path(*folder.parts[-count:]) for count in range(1, len(folder.parts) + 1)]
    labels = ["{}", *(f"{{}} ({end})" for end in ends), *(f"{{}} ({folder}, {number})" for number in range(2, 100))]
    return next(label for label in labels if label.format(kind) not in taken)


def others(model: Model, names: Sequence[str], heads: Sequence[Path]) -> tuple[list[Subject], dict[str, str]]:
    """Methods to compare with, and why some were left out."""
    subjects, left_out = [], {}
    for name in names:
        try:
            made = model.method(name, head=heads)
        except BadInput as error:
            left_out[name] = str(error)
            continue
        subjects.append(Subject(name, "tree" if made.drafter.proposal.tree else "chain", made))
    return subjects, left_out


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def named(row: Mapping[str, Any]) -> str:
    """The drafter of a row, in code style."""
    return f"`{row['drafter']}` {row['shape'] or ''}".strip()


def training_table(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """What each head is and what it cost. Training figures are those of its ``training.json``."""
    rows = []
    for name, fact in facts.items():
        said = fact["training"] or {}
        tokens, minutes = first(said, "tokens", "train_tokens"), first(said, "minutes")
        if minutes is None and (seconds := first(said, "seconds")) is not None:
            minutes = seconds / 60
        rows.append(
            [
                f"`{name}`",
                fact["kind"],
                f"{fact['parameters'] / 1e6:.1f} M",
                f"{fact['bytes'] / 1e6:.1f}",
                f"{fact['vocabulary']:,}",
                "–" if tokens is None else f"{tokens:,.0f}",
                number(minutes),
                str(said.get("machine", "–")),
            ]
        )
    names = ["head", "kind", "parameters", "MB", "words", "training tokens", "minutes", "trained on"]
    return table(names, rows)


def first(values: Mapping[str, Any], *keys: str) -> float | None:
    """The first of these that is a number, looked for one level down as well."""
    for key in keys:
        for where in (values, *(one for one in values.values() if isinstance(one, Mapping))):
            found = where.get(key)
            if isinstance(found, int | float):
                return float(found)
    return None


def worth_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Accepted length, by position; draft time; speed-up."""
    names = ["drafter", "tokens a forward", *(f"depth {depth + 1}" for depth in range(DEPTHS))]
    names += ["draft ms a round", "tok/s", "speed-up", "same answers"]
    lines = []
    for row in rows:
        if row["error"]:
            lines.append([named(row), f"failed: {row['error']}", *[""] * (len(names) - 2)])
            continue
        shares, bounds, same = row["per_position_acceptance"], row["speedup_ci95"], row["identical"]
        lines.append(
            [
                named(row),
                number(row["mean_acceptance_length"], 2),
                *(percent(shares[depth]) if depth < len(shares) else "–" for depth in range(DEPTHS)),
                number(row["draft_ms"], 2),
                number(row["decode_tokens_per_second"]),
                times(row["speedup"]) + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds and row["shape"] else ""),
                f"{same['same']} of {same['of']}" + (f", {same['near_ties']} near ties" if same["near_ties"] else "")
                if same
                else "–",
            ]
        )
    return table(names, lines)


def task_table(rows: Sequence[Mapping[str, Any]], figure: str) -> str:
    """One figure by task: "mean_acceptance_length" or "speedup"."""
    tasks = list(rows[0]["by_category"])

    def cell(row: Mapping[str, Any], task: str) -> str:
        value = row["by_category"].get(task, {}).get(figure)
        return times(value) if figure == "speedup" else number(value, 2)

    return table(["drafter", *tasks], [[named(row), *(cell(row, task) for task in tasks)] for row in rows])


def page(results: Mapping[str, Any]) -> str:
    """All tables, and what they were measured with."""
    parts = [f"`{results['command']}`"]
    if results["heads"]:
        parts.append("## What they are\n\n" + training_table(results["heads"]))
    for run in results["runs"]:
        settings, machine, rows = run["settings"], run["machine"], run["drafters"]
        title = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
        counted = f"{settings['prompts']} prompts" + ("" if run["complete"] else " (interrupted)")
        parts.append(
            f"## {title}\n\n{run['model'].get('name')}, {run['model'].get('dtype')}, {machine.get('cpu')}, "
            f"{machine.get('threads')} threads; {counted}, up to {settings['max_new_tokens']} new tokens. Depth n: "
            "share of all rounds in which a draft token at that depth was accepted."
        )
        parts.append(worth_table(rows))
        parts.append("Tokens a forward by task:\n\n" + task_table(rows, "mean_acceptance_length"))
        parts.append("Speed-up by task:\n\n" + task_table(rows, "speedup"))
    if results["bigrams_of"]:
        parts.append(f"`bigram` is fitted on {results['bigrams_of']}.")
    if results["left_out"]:
        parts.append("Left out:\n\n" + "\n".join(f"- `{name}`: {why}" for name, why in results["left_out"].items()))
    return "\n\n".join(parts) + "\n"


def write(results: Mapping[str, Any], out: Path) -> None:
    """OUT.json and OUT.md, each whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", to_json(plain_figures(results)) + "\n"), (".md", page(results))):
        write_whole(Path(f"{out}{suffix}"), partial(_write, text=text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    model = outpace.load(options.model, dtype=options.dtype)
    prompts = load_prompts(options.prompts, options.limit)
    folders = [*options.head, *([str(one.files.path) for one in shipped(model.target)] if options.shipped else ())]
    subjects, facts, stored = subjects_of(model, folders, not options.no_untrained, options.seed)
    compared, left_out = others(model, options.others, [split_settings(one)[0] for one in folders])
    fitted: str | None = None
    if options.data is not None:
        bigrams = Bigrams.of(options.data, model.target.vocab_size)
        fitted = f"{bigrams.tokens:,} pairs of the conversations that heads are trained on"
    else:
        bigrams, fitted = own_answers(model, prompts, options.max_new_tokens), "the answers to these very prompts"
    subjects = [*compared, *bigram_subjects(model, bigrams, options.bigram_nodes), *subjects]
    results: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "heads": facts,
        "bigrams_of": fitted,
        "left_out": left_out,
        "runs": [],
    }
    for temperature in options.temperatures:
        settings = BenchSettings(
            max_new_tokens=options.max_new_tokens,
            params=SamplingParams(temperature=temperature, seed=options.seed),
            command=results["command"],
        )
        with advancing() as advance:
            results["runs"].append(evaluate(model, subjects, prompts, settings, advance))
        run = results["runs"][-1]
        write(results, options.out)
        if not run["complete"]:
            return
        for head in stored if options.record else ():
            keep_with_head(head, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path, help="Spec-Bench questions, JSON lines or text; nothing of it trained on")
    parser.add_argument("--head", action="append", default=[], metavar="FOLDER[:KEY=VALUE,...]")
    parser.add_argument("--shipped", action="store_true", help="the heads that come with the package")
    parser.add_argument("--data", type=Path, help="conversations for the bigram table; default: these very answers")
    parser.add_argument("--bigram-nodes", type=int, help="its draft tokens a round; default: by measured costs")
    parser.add_argument("--record", action="store_true", help="keep the measured figures with the heads")
    parser.add_argument("--others", nargs="*", default=["sam", "auto"], help="methods to compare with")
    parser.add_argument("--no-untrained", action="store_true", help="leave out the heads before training")
    parser.add_argument("--out", type=Path, default=Path("out/heads"), help="where to write, without the ending")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--limit", type=int, help="prompts, taken from all tasks in turn")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # a polite end writes what there is, too
    try:
        measure(options)
    except BadInput as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    print(Path(f"{options.out}.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
