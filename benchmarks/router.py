"""Which strategy answers which prompt soonest: what the router ``aio`` begins with, and what it gains.

    python benchmarks/router.py collect PROMPTS --model smollm2 --strategies none,sam,eagle3 --out answers.jsonl
    python benchmarks/router.py fit answers.jsonl more.jsonl --out src/outpace/methods/combination/aio/priors.json
    python benchmarks/router.py table answers.jsonl

``collect`` answers every prompt with every strategy in turn, greedily, and writes what was drafted, accepted and how
long it took. ``fit`` makes the router's priors from every other prompt of each task; a kind of strategy that drafted in
none of them keeps the priors that the router has. ``table`` prints the decode rates
by task and, for the prompts that nothing was fitted to, those of the strategies, of the best one of each prompt and
(``--route``) of the router, which learns from the answers that it has chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import outpace
from cells import read_cells
from outpace.api.requests import request
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.warm_up import warm_up
from outpace.methods.combination.aio.prompt_features import FEATURES, PromptFeatures
from outpace.methods.combination.aio.routed_drafter import Routed
from outpace.methods.combination.aio.strategy_estimates import WHOLE, priors
from outpace.methods.registry import build
from outpace.prompts.questions import load_prompts


def levels(tree: TokenTree) -> int:
    return max(tree.depths) if tree.depths else 0


def collect(options: argparse.Namespace) -> None:
    model = outpace.load(options.model)
    drafts = draft_models(options)
    features = PromptFeatures(model.tokenizer)
    prompts = load_prompts(options.prompts, options.limit)
    names = options.strategies.split(",")
    decoder = Decoder(model.target, model.tokenizer)
    context = model.context(draft_model=drafts)
    methods = {name: build(name, context) for name in names}
    for method in methods.values():
        warm_up(model.target, method, 1)
    with options.out.open("a") as out:
        for number, prompt in list(enumerate(prompts))[options.skip :]:
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                asked = request(model, prompt.turns[0], max_new_tokens=options.length, method=methods[name])
                one = decoder.submit(replace(asked, trace=True))
                decoder.run()
                found = one.metrics
                record = {
                    "model": Path(options.model).stem,
                    "prompt": number,
                    "task": prompt.category,
                    "strategy": name,
                    "features": features.of(one.request.prompt),
                    "context": len(one.request.prompt),
                    "rounds": found.rounds,
                    "drafting": found.drafting,
                    "drafted": found.drafted,
                    "accepted": found.accepted,
                    "judged": found.judged,
                    "levels": sum(levels(each.tree) for each in one.rounds),
                    "tokens": found.tokens,
                    "seconds": found.decode_seconds,
                    "draft_seconds": found.phase_seconds["draft"],
                }
                out.write(json.dumps(record) + "\n")
                out.flush()


def draft_models(options: argparse.Namespace) -> dict[str, Any] | None:
    """Those that were named, loaded. Raises BadInput unless each has a name."""
    if len(options.draft_name) != len(options.draft_model):
        raise BadInput("give each --draft-model PATH a --draft-name NAME, in the same order")
    named = [outpace.load(path) for path in options.draft_model]
    return dict(zip(options.draft_name, named, strict=True)) if named else None


KINDS = {"sam": "lookup", "pld": "lookup", "draft-model": "draft"}
"""Kinds of strategies; all others are heads."""
WEAK = 2.0
"""Requests that a prior of zeros counts as where priors are fitted."""
Record = Mapping[str, Any]


def read(paths: Iterable[Path]) -> list[Record]:
    """All records. Of each task every other prompt is held out: nothing is fitted to it. Raises BadInput for a file
    without any."""
    records: list[Record] = []
    for path in paths:
        seen: dict[str, list[int]] = {}
        if not (found := read_cells(path)):
            raise BadInput(f"{path}: there are no answers; write them with 'router.py collect PROMPTS --out {path}'")
        for one in found:
            numbers = seen.setdefault(one["task"], [])
            if one["prompt"] not in numbers:
                numbers.append(one["prompt"])
            held_out = numbers.index(one["prompt"]) % 2 == 1
            records.append(one | {"prompt": f"{path.name}:{one['prompt']}", "held_out": held_out})
    return records


def kind(record: Record) -> str:
    return KINDS.get(record["strategy"].partition("#")[0], "head")


def fitted(records: Seq[Record], figure: str, of: str) -> list[float]:
    """Ridge weights of ``figure`` / ``of`` by the prompts' numbers; the constant is not drawn to 0."""
    shown = [one for one in records if one[of]]
    numbers = np.array([one["features"] for one in shown])
    shares = np.array([one[figure] / one[of] for one in shown])
    weights = np.minimum(1.0, np.array([one[of] for one in shown]) / WHOLE)
    rest = numbers[:, 1:] - np.average(numbers[:, 1:], axis=0, weights=weights)
    mean = np.average(shares, weights=weights)
    squares = (rest * weights[:, None]).T @ rest + WEAK * np.eye(rest.shape[1])
    slopes = np.linalg.solve(squares, (rest * weights[:, None]).T @ (shares - mean))
    constant = mean - np.average(numbers[:, 1:], axis=0, weights=weights) @ slopes
    return [round(float(one), 3) for one in (constant, *slopes)]


def prior(name: str, group: Seq[Record]) -> dict[str, Any]:
    """What the router begins with for this kind of strategy: as before where none of them drafted anything."""
    if not any(one["drafted"] for one in group):
        print(f"no strategy of kind '{name}' has drafted: its priors stay as they are", file=sys.stderr)
        return asdict(priors()[name])
    return {
        "drafting": fitted(group, "drafting", "rounds"),
        "nodes": fitted(group, "drafted", "drafting"),
        "accepted": fitted(group, "accepted", "drafting"),
        "width": round(sum(one["drafted"] for one in group) / sum(one["levels"] for one in group), 2),
    }


def fit(options: argparse.Namespace) -> None:
    records = [one for one in read(options.answers) if one["strategy"] != "none" and not one["held_out"]]
    groups: dict[str, list[Record]] = {"lookup": [], "head": [], "draft": [], "other": records}
    for one in records:
        groups[kind(one)].append(one)
    kinds = {name: prior(name, group) for name, group in groups.items()}
    written = {"features": FEATURES, "kinds": kinds}
    options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(options.out.read_text())


def rate(records: Iterable[Record]) -> float:
    """Tokens a second of all the answers together, after the first."""
    records = list(records)
    seconds = sum(float(one["seconds"]) for one in records)
    return sum(int(one["tokens"]) - 1 for one in records) / seconds


def table(options: argparse.Namespace) -> None:
    """Decode rates by task and strategy, and what choosing well would give."""
    for model, records in by(read(options.answers), "model").items():
        names = list(by(records, "strategy"))
        found_for = by(records, "prompt")
        complete = {number: found for number, found in found_for.items() if usable(found, len(names))}
        rows = [one for found in complete.values() for one in found]
        if not rows:
            print(f"\n{model}: no prompt has an answer of more than 8 tokens from each of {', '.join(names)}")
            continue
        print(f"\n{model}: {len(complete)} prompts, tokens a second\n")
        print("| task | " + " | ".join(names) + " |")
        print("|---" * (1 + len(names)) + "|")
        for task, found in [*by(rows, "task").items(), ("all", rows)]:
            of = by(found, "strategy")
            print(f"| {task} | " + " | ".join(f"{rate(of[name]):.1f}" for name in names) + " |")
        accepted = by(rows, "strategy")
        print(
            "| accepted of judged | " + " | ".join(share(accepted[name], "accepted", "judged") for name in names) + " |"
        )
        drafts = [share(accepted[name], "draft_seconds", "seconds") for name in names]
        print("| time drafting | " + " | ".join(drafts) + " |")
        held = [found for found in complete.values() if found[0]["held_out"]]
        if not held:
            print("\nno prompt was held out: every task has one alone")
            continue
        best = [max(found, key=speed) for found in held]
        fixed = {name: rate(one for found in held for one in found if one["strategy"] == name) for name in names}
        print(
            f"\nof {len(held)} prompts that no prior was fitted to: "
            + ", ".join(f"{n} {r:.1f}" for n, r in fixed.items())
        )
        print(f"the best strategy of each prompt in hindsight {rate(best):.1f}")
        if options.route:
            ours, one = routed(options, held, names), max(fixed, key=lambda name: fixed[name])
            alone = [next(each for each in found if each["strategy"] == one) for found in held]
            print(f"the router's choices, learning as it goes {rate(ours):.1f}")
            print(f"beside {one} alone {ratio(ours, alone)}, beside the best of each prompt {ratio(ours, best)}")


def routed(options: argparse.Namespace, held: Seq[Seq[Record]], names: Seq[str]) -> list[Record]:
    """The record of the strategy that the router would have chosen for each prompt, which it then learns from."""
    model = outpace.load(options.model)
    drafts = draft_models(options)
    method = build("aio", model.context(draft_model=drafts), {"strategies": names, "explore": 0.0})
    assert isinstance(method.drafter, Routed)
    routes, chosen = method.drafter.routes, []
    for found in held:
        odds = routes.odds(found[0]["features"], 1, found[0]["context"], 0.0)
        one = next(each for each in found if each["strategy"] == names[odds.index(max(odds))])
        known = routes.estimates[names.index(one["strategy"])]
        if known is not None:
            fields = ("rounds", "drafting", "drafted", "accepted", "judged")
            known.learn(one["features"], RequestMetrics(**{name: one[name] for name in fields}), one["levels"])
            clock = routes.clocks[names.index(one["strategy"])]
            for _ in range(min(9, one["drafting"])):
                clock.read(1, one["draft_seconds"] / one["drafting"])
        chosen.append(one)
        print(f"{one['task']}: chose {one['strategy']}, the best was {max(found, key=speed)['strategy']}")
    return chosen


def ratio(ours: Seq[Record], others: Seq[Record], samples: int = 4000) -> str:
    """Of decode rates on the same prompts, with a 95 % interval by paired bootstrap over prompts."""
    picked = np.random.default_rng(0).integers(len(ours), size=(samples, len(ours)))
    found = [rate([ours[at] for at in each]) / rate([others[at] for at in each]) for each in picked]
    low, high = np.quantile(found, [0.025, 0.975])
    return f"{rate(ours) / rate(others):.2f}x [{low:.2f}, {high:.2f}]"


def speed(one: Record) -> float:
    return rate([one])


def usable(found: Seq[Record], strategies: int) -> bool:
    """Whether all strategies have answered, with an answer that is long enough to time."""
    return len(found) == strategies and all(one["tokens"] > 8 for one in found)


def share(records: Iterable[Record], figure: str, of: str) -> str:
    records = list(records)
    whole = sum(one[of] for one in records)
    return f"{sum(one[figure] for one in records) / whole:.0%}" if whole else "-"


def by(records: Iterable[Record], field: str) -> dict[Any, list[Record]]:
    found = defaultdict(list)
    for one in records:
        found[one[field]].append(one)
    return dict(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("collect")
    one.set_defaults(run=collect)
    one.add_argument("prompts", type=Path)
    with_models(one)
    one.add_argument("--strategies", default="none,sam,eagle3")
    one.add_argument("--limit", type=int, default=48)
    one.add_argument("--skip", type=int, default=0)
    one.add_argument("--length", type=int, default=64)
    one.add_argument("--out", type=Path, required=True)
    one = commands.add_parser("fit")
    one.set_defaults(run=fit)
    one.add_argument("answers", type=Path, nargs="+")
    one.add_argument("--out", type=Path, required=True)
    one = commands.add_parser("table")
    one.set_defaults(run=table)
    one.add_argument("answers", type=Path, nargs="+")
    one.add_argument("--route", action="store_true", help="replay the router on the models, which must be named again")
    with_models(one)
    options = parser.parse_args()
    try:
        options.run(options)
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def with_models(one: argparse.ArgumentParser) -> None:
    one.add_argument("--model", default="smollm2")
    one.add_argument("--draft-model", action="append", default=[])
    one.add_argument("--draft-name", action="append", default=[])


if __name__ == "__main__":
    sys.exit(main())
