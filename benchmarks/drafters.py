"""Every drafter in one table: greedy and sampled, by task, and how far each drafts what another would have drafted.

    python benchmarks/drafters.py questions.jsonl --datastore corpus.store --draft-model small.gguf --out out/drafters

All methods that can be built with what was supplied run interleaved on every prompt (``outpace bench``'s runner), once
at temperature 0 and once at 0.8. ``--methods a,b,a#2`` picks some; a name may come again with other settings
(``--param 'a#2.parts=["b", "c"]'``). OUT.md holds the tables and OUT.json the results; what an interrupt leaves is
written too.

The last column of the greedy table: the method whose drafts are most often the very same tree, and in what share of the
rounds that both begin at the same token of the same answer, rounds without a draft from either left out.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace.api.requests import prompt_ids
from outpace.bench.bench_report import categories, interval
from outpace.bench.figure_text import number, percent, times
from outpace.bench.runner import run
from outpace.bench.settings import BenchSettings
from outpace.cli.bars import advancing
from outpace.cli.options import settings_by_method
from outpace.cli.output import to_json, write_whole
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.registry import find, methods
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts, stratified

Drafts = dict[tuple[str, int], frozenset[tuple[int, ...]]]
"""What a method drafted, as paths, by prompt and by the length of the answer when the round began."""


def build(
    model: Model, labels: Sequence[str] | None, pairs: Sequence[str], drafts: Sequence[Model], datastore: Path | None
) -> tuple[list[Method], dict[str, str]]:
    """The methods, and why others were left out. Raises BadInput for one that was asked for and cannot be built."""
    chosen = labels or [info.name for info in methods() if info.lossless]
    infos = {label: find(label.split("#")[0]) for label in chosen}
    settings = settings_by_method(pairs, {label: info.setting_names() for label, info in infos.items()})
    built, left_out = [], {}
    for label, info in infos.items():
        try:
            built.append(model.method(info.name, settings[label], draft_model=drafts, datastore=datastore))
        except BadInput as error:
            if labels:
                raise
            left_out[label] = str(error)
    return built, left_out


def drafted(model: Model, method: Method, prompts: Sequence[Prompt], length: int) -> Drafts:
    """The trees of greedy answers to the first turns."""
    found: Drafts = {}
    for prompt in prompts:
        decoder = Decoder(model.target)
        tokens = tuple(prompt_ids(model, [{"role": "user", "content": prompt.turns[0]}]))
        request = Request(tokens, method, max_new_tokens=length, stop_ids=model.eos_ids, trace=True)
        generation = decoder.submit(request)
        decoder.run()
        at = 0
        for one in generation.rounds:
            paths = frozenset(tuple(one.tree.path_tokens(node)) for node in range(len(one.tree)))
            found[prompt.id, at] = paths
            at += len(one.committed)
    return found


def alike(one: Drafts, other: Drafts) -> tuple[int, int]:
    """(rounds with the same tree, rounds that both began at the same place and at least one drafted in)."""
    pairs = [(one[at], other[at]) for at in one.keys() & other.keys() if one[at] or other[at]]
    return sum(ours == theirs for ours, theirs in pairs), len(pairs)


def neighbours(drafts: Mapping[str, Drafts], least: int = 10) -> dict[str, dict[str, Any]]:
    """For every method the one whose trees are most often the same, of those compared in ``least`` rounds or more."""
    nearest = {}
    for label, ours in drafts.items():
        shares = [(*alike(ours, theirs), name) for name, theirs in drafts.items() if name != label]
        compared = [(same / rounds, rounds, name) for same, rounds, name in shares if rounds >= least]
        if compared:
            share, rounds, name = max(compared)
            nearest[label] = {"neighbour": name, "same": share, "rounds": rounds}
    return nearest


def table(result: Mapping[str, Any], near: Mapping[str, Mapping[str, Any]]) -> str:
    """One Markdown table of a bench's result; every figure as docs/metrics.md defines it."""
    tasks = categories(result)
    names = ["method", "speed-up", "tokens a round", "rounds drafted", "tokens a drafted round", "draft ms a round"]
    names += [*tasks, "same answers", *(["same drafts as"] if near else [])]
    rows = []
    for row in result["methods"]:
        if row["error"]:
            rows.append([f"`{row['method']}`", f"failed: {row['error']}"])
            continue
        same, close = row["identical"], near.get(row["method"])
        cells = [
            f"`{row['method']}`",
            f"{times(row['speedup'])} {interval(row)}".strip(),
            number(row["mean_acceptance_length"], 2),
            percent(row["drafting_rounds"]),
            number(row["drafting_acceptance_length"], 2),
            number(row["draft_ms"], 2),
            *(times(row["by_category"].get(task, {}).get("speedup")) for task in tasks),
            f"{same['same']} of {same['of']}" if same else "–",
        ]
        if near:
            cells.append(f"{close['neighbour']}, {percent(close['same'])}" if close else "–")
        rows.append(cells)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def page(results: Mapping[str, Any]) -> str:
    """All tables, and what they were measured with."""
    parts = [f"`{results['command']}`"]
    for result in results["runs"]:
        settings, machine = result["settings"], result["machine"]
        counted = max((row["prompts"] for row in result["methods"]), default=0)
        title = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
        parts.append(
            f"## {title}\n\n{result['model'].get('name')}, {result['model'].get('dtype')}, {machine.get('cpu')}, "
            f"{machine.get('threads')} threads; {counted} of {settings['prompts']} prompts"
            + ("" if result["complete"] else " (interrupted)")
            + f", up to {settings['max_new_tokens']} new tokens, namespace {settings['namespace'] or 'none'}."
        )
        parts.append(table(result, {} if settings["temperature"] else results["neighbours"]))
    if results["left_out"]:
        parts.append("Left out:\n\n" + "\n".join(f"- `{name}`: {why}" for name, why in results["left_out"].items()))
    return "\n\n".join(parts) + "\n"


def write(results: Mapping[str, Any], out: Path) -> None:
    """OUT.json and OUT.md, each whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", to_json(results) + "\n"), (".md", page(results))):
        write_whole(Path(f"{out}{suffix}"), partial(_write, text=text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    model = outpace.load(options.model, dtype=options.dtype)
    drafts = [outpace.load(name, dtype=options.dtype) for name in options.draft_model]
    labels = [name.strip() for name in options.methods.split(",")] if options.methods else None
    built, left_out = build(model, labels, options.param, drafts, options.datastore)
    prompts = load_prompts(options.prompts, options.limit)
    results: dict[str, Any] = {"command": shlex.join(sys.argv), "runs": [], "neighbours": {}, "left_out": left_out}
    for temperature in options.temperatures:
        settings = BenchSettings(
            max_new_tokens=options.max_new_tokens,
            params=SamplingParams(temperature=temperature, seed=options.seed),
            namespace=options.namespace,
            references=tuple(path.read_text(encoding="utf-8") for path in options.reference),
            command=results["command"],
            extra={"param": options.param, "draft_models": options.draft_model, "datastore": str(options.datastore)},
        )
        with advancing() as advance:
            results["runs"].append(run(model, built, prompts, settings, advance))
        write(results, options.out)
        if not results["runs"][-1]["complete"]:
            return
    if 0.0 in options.temperatures and options.compared:
        few = stratified(prompts, options.compared)
        rows = results["runs"][options.temperatures.index(0.0)]["methods"]
        seen: dict[str, Drafts] = {}
        for row, method in zip(rows[1:], [one for one in built if one.name != "none"], strict=True):
            if row["error"] is None:
                seen[row["method"]] = drafted(model, method, few, options.max_new_tokens)
        results["neighbours"] = neighbours(seen)
        write(results, options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path, help="Spec-Bench questions, JSON lines or text")
    parser.add_argument("--out", type=Path, default=Path("out/drafters"), help="where to write, without the ending")
    parser.add_argument("--methods", default="", help="labels; default: all that can be built")
    parser.add_argument("--param", action="append", default=[], metavar="LABEL.KEY=VALUE")
    parser.add_argument("--draft-model", action="append", default=[], metavar="NAME")
    parser.add_argument("--datastore", type=Path)
    parser.add_argument("--reference", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--namespace", default="", help="methods keep what they learn from prompt to prompt")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--limit", type=int, help="prompts, taken from all tasks in turn")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--compared", type=int, default=14, help="prompts on which drafts are compared; 0: none")
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
