"""How many tokens a round each kind of proposal can bring to requests that sample, and the speed at given costs.

    python benchmarks/acceptance_ceiling.py questions.jsonl --cache ceiling.pickle
    python benchmarks/acceptance_ceiling.py --cache ceiling.pickle --costs 1:4,2:4.2,4:4.4,8:5.6,16:9 --level 0.2

The target answers by plain sampling; its answers are then walked with the head, the suffix automaton and the target's
own distributions recorded at every node (``ceiling_rows.py``). Expectations over draws are closed forms, apart from
sampled trees of several levels: one of these is drawn at every ``--every``-th position, and its rules are evaluated
exactly. ``--costs``: milliseconds of a forward by rows (those between are interpolated); ``--root``, ``--level``: of
the head's first and of each further level; ``--other``: of every round, autoregressive ones included.
"""

from __future__ import annotations

import argparse
import pickle
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

import outpace
from ceiling_rows import DEPTH, HEATS, Context, Recorder, walk
from outpace.api.requests import prompt_ids
from outpace.core.sampling import SamplingParams
from outpace.drafting.dynamic_tree import EDGES
from outpace.methods.learned.eagle.feature_settings import FeatureSettings
from outpace.methods.lookup.sam import SuffixLookup
from outpace.prompts.questions import load_prompts

Recorded = dict[float, list[Context]]
Option = tuple[float, float, float]
"""A draft that a round may make: (expected tokens as the drafter estimates them, as they are, cost in steps)."""
MOST = 15


def record(options: argparse.Namespace) -> Recorded:
    model = outpace.load(options.model, dtype=options.dtype)
    net = model.method("eagle3").drafter.net  # type: ignore[attr-defined]
    head = Recorder(net, FeatureSettings.model_validate({}), confident=True)
    found: Recorded = {}
    for temperature in options.temperatures:
        found[temperature] = []
        for number, prompt in enumerate(load_prompts(options.prompts, options.limit)):
            ids = prompt_ids(model, prompt.turns[0])
            answer = outpace.generate(
                model, prompt.turns[0], method="none", temperature=temperature, seed=number,
                max_new_tokens=options.max_new_tokens,
            ).tokens  # fmt: skip
            with torch.inference_mode():
                found[temperature] += walk(
                    model.target, head, SuffixLookup(), ids, answer, Context(prompt.category, number),
                    SamplingParams(temperature=temperature), options.every, number,
                )  # fmt: skip
            print(f"\rtemperature {temperature:g}: {number + 1} questions", end="", flush=True)
        print()
    return found


class Costs:
    """Rounds in autoregressive steps: a forward over the root and n draft tokens, and the head's levels."""

    def __init__(self, forward: dict[int, float], root: float = 0.0, level: float = 0.0, other: float = 0.0) -> None:
        self._rows, self._ms = list(forward), [ms + other for ms in forward.values()]
        self._root, self._level = root / self._ms[0], level / self._ms[0]

    def __call__(self, draft_tokens: int, levels: int) -> float:
        forward = float(np.interp(1 + draft_tokens, self._rows, self._ms)) / self._ms[0]
        return forward + (self._root + self._level * (levels - 1) if levels else 0.0)


class Calibrated:
    """Mean p by depth and bucket of q, over all contexts of a temperature; as DynamicTree calibrates."""

    def __init__(self, contexts: Iterable[Context]) -> None:
        nodes: dict[tuple[int, int], list[float]] = defaultdict(lambda: [1e-4, 1e-4])
        leaves: dict[tuple[int, int, int], list[float]] = defaultdict(lambda: [0.0, 1e-9])
        copies: dict[int, list[float]] = defaultdict(lambda: [0.0, 1e-9])
        for one in contexts:
            for _, depth, q, p in one.nodes:
                self._add(nodes[depth, bisect(EDGES, q)], p, q)
            for _, depth, beyond, overlaps in one.leaves:
                for j, (left, value) in enumerate(zip(beyond, overlaps, strict=True)):
                    self._add(leaves[min(2, depth), j, bisect(EDGES, left)], value, 1.0)
            for length, p in one.copied:
                self._add(copies[length], p, 1.0)
        self._nodes, self._leaves, self._copies = nodes, leaves, copies

    @staticmethod
    def _add(sums: list[float], p: float, q: float) -> None:
        sums[0] += p
        sums[1] += q

    def node(self, depth: int, q: float) -> float:
        hits, mass = self._nodes[depth, bisect(EDGES, q)]
        return min(0.995, q * hits / mass)

    def leaf(self, depth: int, j: int, left: float) -> float:
        hits, count = self._leaves[min(2, depth), j, bisect(EDGES, left)]
        return hits / count

    def copy(self, length: int) -> float:
        hits, count = self._copies[length]
        return hits / count


def head_tree(one: Context, known: Calibrated | None, costs: Costs) -> list[Option]:
    """The best n candidates of the head no deeper than each depth. ``known`` None: by the target's own p."""
    paths = _paths(one, known)
    return [option for depth in range(1, DEPTH + 1) for option in _sizes([x for x in paths if x[2] <= depth], costs)]


def head_tree_with_draws(one: Context, known: Calibrated | None, costs: Costs) -> list[Option]:
    """As head_tree, with one draw beyond the likeliest children after nodes where it is worth a row; draws are leaves.

    Children are taken in the order of q, so that the draw beside j of them is what the head has beyond these.
    """
    paths = _paths(one, known)
    children: dict[int, list[int]] = defaultdict(list)
    for index, (parent, *_) in enumerate(one.nodes):
        children[parent].append(index)
    found = []
    for depth in range(1, DEPTH + 1):
        chosen = {-1}
        drawn: dict[int, tuple[float, float]] = {}
        size, estimate, true = 0, 1.0, 1.0
        order = sorted((x for x in range(len(paths)) if paths[x][2] <= depth), key=lambda x: (-paths[x][0], x))
        for index in order[:MOST]:
            if one.nodes[index][0] not in chosen:
                continue
            chosen.add(index)
            size, estimate, true = size + 1, estimate + paths[index][0], true + paths[index][1]
            drawn = {}
            for at, level, beyond, overlaps in one.leaves:
                if at not in chosen or level > depth:
                    continue
                taken = sum(child in chosen for child in children[at])
                before = (1.0, 1.0) if at < 0 else paths[at][:2]
                guess = overlaps[taken] if known is None else known.leaf(level, taken, beyond[taken])
                drawn[at] = before[0] * guess, before[1] * overlaps[taken]
            extra = sorted(drawn.values(), reverse=True)
            for count in range(min(len(extra), MOST - size) + 1):
                some = extra[:count]
                found.append((
                    estimate + sum(x[0] for x in some), true + sum(x[1] for x in some), costs(size + count, depth)
                ))  # fmt: skip
    for at, level, beyond, overlaps in one.leaves:
        if at < 0:
            guess = overlaps[0] if known is None else known.leaf(level, 0, beyond[0])
            found.append((1.0 + guess, 1.0 + overlaps[0], costs(1, 1)))
    return found


def copied(one: Context, known: Calibrated | None, costs: Costs) -> list[Option]:
    found, guess, true = [], 1.0, 1.0
    estimate = value = 1.0
    for count, (length, p) in enumerate(one.copied, start=1):
        guess *= p if known is None else known.copy(length)
        true *= p
        estimate, value = estimate + guess, value + true
        found.append((estimate, value, costs(count, 0)))
    return found


def head_and_copies(one: Context, known: Calibrated | None, costs: Costs) -> list[Option]:
    """The union of the head's candidates and the copied chain; the copy alone, too."""
    paths = _paths(one, known)
    guess, true = 1.0, 1.0
    extra: list[tuple[float, float, int]] = []
    for index, ((length, p), same) in enumerate(zip(one.copied, one.both, strict=True)):
        guess *= p if known is None else known.copy(length)
        true *= p
        if same >= 0:
            paths[same] = max(paths[same][0], guess), paths[same][1], paths[same][2]
        else:
            extra.append((guess, true, -1 - index))
    found = copied(one, known, costs)
    for depth in range(1, DEPTH + 1):
        found += _sizes([*(x for x in paths if x[2] <= depth), *extra], costs, depth)
    return found


def _paths(one: Context, known: Calibrated | None) -> list[tuple[float, float, int]]:
    """Estimated and true probability of the path to each candidate, and its depth."""
    found: list[tuple[float, float, int]] = []
    for parent, depth, q, p in one.nodes:
        guess, true = (1.0, 1.0) if parent < 0 else found[parent][:2]
        found.append((guess * (p if known is None else known.node(depth, q)), true * p, depth))
    return found


def _sizes(paths: list[tuple[float, float, int]], costs: Costs, levels: int = 0) -> list[Option]:
    estimate = true = 1.0
    deepest, found = 0, []
    for count, (guess, value, depth) in enumerate(sorted(paths, key=lambda x: -x[0])[:MOST], start=1):
        estimate, true, deepest = estimate + guess, true + value, max(deepest, depth)
        found.append((estimate, true, costs(count, levels or deepest)))
    return found


def best(choices: Sequence[list[Option]]) -> tuple[float, float, float]:
    """Tokens per time of the best policy over the options of all contexts (Dinkelbach's iteration), in autoregressive
    steps, and its tokens and costs a round. Not drafting is always an option."""
    pace, tokens, cost = 1.0, 1.0, 1.0
    tables = [np.array([(1.0, 1.0, 1.0), *options]) for options in choices]
    for _ in range(12):
        picked = np.array([table[(table[:, 0] - pace * table[:, 2]).argmax()] for table in tables])
        tokens, cost = picked[:, 1].mean(), picked[:, 2].mean()
        if abs(tokens / cost - pace) < 1e-5:
            break
        pace = tokens / cost
    return float(tokens / cost), float(tokens), float(cost)


def by_confidence(
    contexts: Sequence[Context], value: Callable[[Context], list[tuple[float, float]] | None]
) -> list[list[Option] | None]:
    """Options of fixed shape whose expectation the drafter knows by its confidence in its first token, in 8 classes.

    None: nothing was drawn at this position.
    """
    tops = [max((q for parent, _, q, _ in one.nodes if parent < 0), default=0.0) for one in contexts]
    edges = np.quantile(tops, np.linspace(0, 1, 9)[1:-1]).tolist()
    classes = [bisect(edges, top) for top in tops]
    values = [value(one) for one in contexts]
    means = {
        which: np.mean([v for v, c in zip(values, classes, strict=True) if c == which and v is not None], 0)
        for which in set(classes)
    }
    found: list[list[Option] | None] = []
    for which, mine in zip(classes, values, strict=True):
        guesses = [float(guess) for guess, _ in means[which]] if mine else []
        found.append([(guess, *one) for guess, one in zip(guesses, mine, strict=True)] if mine else None)
    return found


def chains(kind: str, heat: float, costs: Costs) -> Callable[[Context], list[tuple[float, float]]]:
    def value(one: Context) -> list[tuple[float, float]]:
        gains = one.chains[f"{kind}, heat {heat:g}"]
        return [(1.0 + sum(gains[:n]), costs(n, n)) for n in range(1, DEPTH + 1)]

    return value


def trees(name: str, levels: int, costs: Costs) -> Callable[[Context], list[tuple[float, float]] | None]:
    return lambda one: [(1.0 + one.trees[name][1], costs(one.trees[name][0], levels))] if one.trees else None


def root_table(found: Recorded) -> None:
    print("\nAcceptance of one level (all positions; closed forms)\n")
    print("| proposal | " + " | ".join(f"{t:g}" for t in found) + " |\n|---|" + "---|" * len(found))
    for name in next(iter(found.values()))[0].one:
        print(
            f"| {name} | "
            + " | ".join(f"{np.mean([c.one[name] for c in every]):.3f}" for every in found.values())
            + " |"
        )
    print("\nAccepted draft tokens of sampled chains of 1, 2, 3 and 5, and of drawn trees\n")
    print("| proposal | " + " | ".join(f"{t:g}" for t in found) + " |\n|---|" + "---|" * len(found))
    for name in next(iter(found.values()))[0].chains:
        rows = [np.mean([c.chains[name] for c in every], 0).cumsum() for every in found.values()]
        print(f"| {name} | " + " | ".join(f"{r[0]:.3f} {r[1]:.3f} {r[2]:.3f} {r[4]:.3f}" for r in rows) + " |")
    for name in next(iter(found.values()))[0].trees:
        rows = [np.mean([c.trees[name] for c in every if c.trees], 0) for every in found.values()]
        print(f"| {name} | " + " | ".join(f"{value:.3f} of {size:.1f}" for size, value in rows) + " |")
    for size in (1, 2, 3, 4, 6, 8, 10, 15):
        free = Costs({1: 1.0, 2: 1.0})
        line = []
        for every in found.values():
            for known in (Calibrated(every), None):
                options = [_sizes(_paths(one, known), free) for one in every]
                line.append(np.mean([x[min(size, len(x)) - 1][1] for x in options]) - 1.0)
        pairs = zip(line[::2], line[1::2], strict=True)
        print(
            f"| deterministic tree of {size}: by the head, by p | "
            + " | ".join(f"{a:.3f} {b:.3f}" for a, b in pairs)
            + " |"
        )


def yields(found: Recorded, costs: Costs) -> None:
    for temperature, every in found.items():
        groups = {"all": set(range(len(every)))}
        for index, one in enumerate(every):
            groups.setdefault(one.group, set()).add(index)
        known = Calibrated(every)
        options: dict[str, list[list[Option] | None]] = {
            "copies": [copied(one, known, costs) for one in every],
            "deterministic tree": [head_tree(one, known, costs) for one in every],
            "deterministic tree + draws": [head_tree_with_draws(one, known, costs) for one in every],
            "head and copies, deterministic": [head_and_copies(one, known, costs) for one in every],
        }
        for kind in ("rejection", "block", "gumbel"):
            heat = max(HEATS, key=lambda h: np.mean([sum(c.chains[f"{kind}, heat {h:g}"][:3]) for c in every]))
            options[f"sampled chain, {kind}, heat {heat:g}"] = by_confidence(every, chains(kind, heat, costs))
        for name in max((one.trees for one in every), key=len):
            levels = name.split(",")[-2].strip().split(" ")[-1].count("-") + 1
            options[f"tree, {name}"] = by_confidence(every, trees(name, levels, costs))
        chain = next(value for label, value in options.items() if label.startswith("sampled chain, block"))
        mixed = options["deterministic tree + draws"]
        options["either: chain (block), deterministic tree + draws"] = [
            [*(a or ()), *(b or ())] for a, b in zip(chain, mixed, strict=True)
        ]
        options["either, or copies"] = [
            [*(a or ()), *(b or ()), *(c or ())]
            for a, b, c in zip(chain, mixed, options["head and copies, deterministic"], strict=True)
        ]
        options["best tree by p"] = [head_tree(one, None, costs) for one in every]
        options["best tree by p + draws"] = [head_tree_with_draws(one, None, costs) for one in every]
        options["best tree by p, with copies"] = [head_and_copies(one, None, costs) for one in every]
        print(f"\n## Temperature {temperature:g}: speed against autoregressive decoding\n")
        print("| proposal | tokens, cost a round | " + " | ".join(groups) + " |\n|---|---|" + "---|" * len(groups))
        for label, table in options.items():
            rates = [best([x for i, x in enumerate(table) if i in some and x is not None]) for some in groups.values()]
            print(
                f"| {label} | {rates[0][1]:.2f}, {rates[0][2]:.2f} | "
                + " | ".join(f"{x[0]:.2f}" for x in rates)
                + " |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="?", help="questions; without a file the embedded ones")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--limit", type=int, default=18)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--every", type=int, default=4, help="draw sampled trees at every so many positions")
    parser.add_argument("--temperatures", default="0.3,0.6,0.8,1", help="comma-separated")
    parser.add_argument("--cache", type=Path, help="what was recorded: read if it is there, else written")
    parser.add_argument("--costs", default="1:3.8,2:3.9,4:4.4,8:6.2,16:10.9", help="milliseconds by rows")
    parser.add_argument("--root", type=float, default=0.6, help="milliseconds of the head's first level")
    parser.add_argument("--level", type=float, default=0.4, help="milliseconds of each further level")
    parser.add_argument("--other", type=float, default=0.5, help="milliseconds of every round beside these")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.temperatures = [float(one) for one in options.temperatures.split(",")]
    torch.set_num_threads(options.threads)
    if options.cache is not None and options.cache.exists():
        found: Recorded = pickle.loads(options.cache.read_bytes())
    else:
        found = record(options)
        if options.cache is not None:
            options.cache.write_bytes(pickle.dumps(found))
    print({temperature: len(every) for temperature, every in found.items()}, "positions")
    root_table(found)
    forward = {int(rows): float(ms) for rows, ms in (one.split(":") for one in options.costs.split(","))}
    yields(found, Costs(forward, options.root, options.level, options.other))


if __name__ == "__main__":
    main()
