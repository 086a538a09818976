"""What a forward gains at most that stops rejected branches at a layer boundary (FASER's early pruning).

    python benchmarks/early_pruning.py questions.jsonl 'eagle3={"max_nodes": 24}' --cache pruning.pickle
    python benchmarks/early_pruning.py --cache pruning.pickle --costs 1:3.8,2:3.9,4:4.4,8:6.2,16:10.9,32:20.7,64:41.7

Greedy decoding is recorded once with large drafts (``pruning_rows.py``); drafting and pruning are then computed. A
draft keeps the nodes whose path is accepted with at least some probability, as the drafter knows it; this threshold is
the best one for each batch, with pruning and without. A pruned round runs all rows to a boundary, checks the draft
tokens there, and runs the rest of the layers over the rows whose path is now accepted with at least a second
probability. Probabilities are fitted on one half of the prompts and used on the other.

It is a ceiling: splitting a forward, drafting, and the rest of a round cost nothing, and thresholds, boundary and check
are the best in hindsight. ``perfect`` knows at the boundary what the last layer will choose, at no cost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

import outpace
from outpace.core.tree import TokenTree
from outpace.prompts.questions import load_prompts
from outpace.targets.base import Target
from pruning_rows import CHECKS, REDUCED, Recorder, Round

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PERFECT = "perfect"
THRESHOLDS = (2.0, *(float(one) for one in np.geomspace(0.9, 0.02, 20)), 0.0)
"""Above 1: no draft."""
SHUFFLES = 3
"""How often rounds are put together to batches anew."""


@dataclass
class Machine:
    """Milliseconds of whole forwards and of the LM head alone, by rows."""

    forward: dict[int, float]
    head: dict[int, float]
    layers: int
    vocabulary: int

    def whole(self, rows: np.ndarray) -> np.ndarray:
        return _interpolated(rows, self.forward)

    def pruned(self, rows: np.ndarray, checked: np.ndarray, left: np.ndarray, layer: int, share: float) -> np.ndarray:
        """``rows`` up to ``layer``, the LM head's ``share`` over ``checked`` rows, then ``left`` rows to the end."""
        body = {at: self.forward[at] - self.head[at] for at in self.forward}
        below, above = _interpolated(rows, body), _interpolated(left, body)
        part = layer / self.layers
        check = share * _interpolated(checked, self.head)
        return np.asarray(part * below + check + (1.0 - part) * above + _interpolated(left, self.head))


def _interpolated(rows: np.ndarray, table: dict[int, float]) -> np.ndarray:
    """In proportion beyond the table."""
    known, times = list(table), list(table.values())
    return np.asarray(np.where(rows > known[-1], times[-1] * rows / known[-1], np.interp(rows, known, times)))


def measure(target: Target, context: int, repeat: int) -> Machine:
    """The quickest of ``repeat`` runs each, sizes by turns."""
    sequence = target.sequence([(37 * i) % 20_000 + 100 for i in range(context)])
    target.prefill([sequence])
    trees = {rows: TokenTree.chain(range(200, 199 + rows)) for rows in ROWS}
    states = {rows: torch.randn(rows, target.hidden_size) for rows in ROWS}
    forward, head = dict.fromkeys(ROWS, np.inf), dict.fromkeys(ROWS, np.inf)
    with target.round():
        for _, rows in itertools.product(range(repeat), ROWS):
            forward[rows] = min(forward[rows], _ms(lambda rows=rows: target.score([(sequence, trees[rows])])))  # type: ignore[misc]
            head[rows] = min(head[rows], _ms(lambda rows=rows: target.lm_head(states[rows])))  # type: ignore[misc]
    return Machine(forward, head, target.num_layers, target.vocab_size)


def given(costs: str, head: float, layers: int, vocabulary: int) -> Machine:
    """Costs of forwards that were measured elsewhere; the LM head takes a share of each."""
    forward = {int(rows): float(ms) for rows, ms in (one.split(":") for one in costs.split(","))}
    return Machine(forward, {rows: head * ms for rows, ms in forward.items()}, layers, vocabulary)


def _ms(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return 1e3 * (perf_counter() - began)


class Rounds:
    """All rounds as arrays (rounds, nodes), padded with nodes that nobody accepts."""

    def __init__(self, rounds: list[Round]) -> None:
        self.rounds = rounds
        most = max(len(one.parents) for one in rounds)
        self.real = np.zeros((len(rounds), most), bool)
        self.parents = np.full((len(rounds), most), -1)
        hits = np.zeros((len(rounds), most), bool)
        own = np.ones((len(rounds), most))
        for at, one in enumerate(rounds):
            count = len(one.parents)
            self.real[at, :count], self.parents[at, :count], hits[at, :count] = True, one.parents, one.hits
            paths = [1.0, *one.path_probs]
            own[at, :count] = [min(1.0, paths[n + 1] / max(paths[p + 1], 1e-9)) for n, p in enumerate(one.parents)]
        self.hits = hits
        self.on_path = self._along(hits).astype(bool) & self.real
        below = np.concatenate([np.ones((len(rounds), 1), bool), self.on_path], 1)
        self.reached = np.take_along_axis(below, self.parents + 1, 1) & self.real
        """Nodes whose parent is accepted: of these a check's probabilities are learned."""
        self._own = np.log(np.clip(own, 1e-4, 1 - 1e-4) / (1 - np.clip(own, 1e-4, 1 - 1e-4)))
        self._halves = np.array([one.prompt % 2 for one in rounds])
        self.drafted = self._path_probs(self._own[..., None])

    def checked(self, layer: int, check: str) -> np.ndarray:
        """Path probabilities after a check."""
        if check == PERFECT:
            return self._along(self.hits.astype(float))
        features = np.zeros((*self.real.shape, 2))
        for at, one in enumerate(self.rounds):
            features[at, : len(one.parents)] = one.found[layer, check]
        return self._path_probs(np.concatenate([features, self._own[..., None]], -1))

    def _path_probs(self, features: np.ndarray) -> np.ndarray:
        """Of a logistic regression for each half of the prompts, fitted on the other."""
        probs = np.zeros(self.real.shape)
        for half in (0, 1):
            fit, mine = self.reached & (self._halves != half)[:, None], self._halves == half
            mean, spread = features[fit].mean(0), features[fit].std(0) + 1e-6
            scaled = torch.tensor((features - mean) / spread)
            # Squares let a check's probability saturate.
            scaled = torch.cat([scaled, scaled.square().clamp(max=16.0), torch.ones(*scaled.shape[:-1], 1)], -1)
            weights = _logistic(scaled[fit], torch.tensor(self.hits[fit], dtype=torch.float64))
            probs[mine] = torch.sigmoid(scaled @ weights).numpy()[mine]
        return self._along(probs)

    def _along(self, values: np.ndarray) -> np.ndarray:
        """Products along paths."""
        found = np.ones((len(values), values.shape[1] + 1))
        for node in range(values.shape[1]):
            found[:, node + 1] = values[:, node] * found[np.arange(len(values)), self.parents[:, node] + 1]
        return found[:, 1:]

    def inner(self, kept: np.ndarray) -> np.ndarray:
        """How many rows have a draft token after them, by round."""
        marks = np.zeros((len(kept), kept.shape[1] + 1), bool)
        for node in range(kept.shape[1]):
            marks[kept[:, node], self.parents[kept[:, node], node] + 1] = True
        return np.asarray(marks.sum(1))


def _logistic(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Weights of a logistic regression."""
    weights = torch.zeros(rows.shape[-1], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(rows @ weights, wanted)
        value = value + 1e-4 * weights.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()


@dataclass
class Outcome:
    """Tokens per millisecond, rows and tokens a round; what of the rows and of the accepted tokens was dropped."""

    rate: float
    rows: float
    tokens: float
    setting: str = ""
    dropped: float = 0.0
    lost: float = 0.0


def outcomes(rounds: Rounds, machine: Machine, batch: int, layers: list[int]) -> Iterator[tuple[str, int, Outcome]]:
    """(check, layer, the best outcome) of each; first that without pruning, under no check."""
    order = np.random.default_rng(0)
    count = len(rounds.rounds)
    drawn = [order.permutation(count)[: count // batch * batch] for _ in range(SHUFFLES if batch > 1 else 1)]
    groups = np.concatenate(drawn).reshape(-1, batch)

    def summed(values: np.ndarray) -> np.ndarray:
        return np.asarray(values[groups].sum(1), float)

    first = []
    for threshold in THRESHOLDS:
        kept = rounds.real & (rounds.drafted >= threshold)
        rows, tokens = summed(1 + kept.sum(1)), summed(1 + (kept & rounds.on_path).sum(1))
        first.append((threshold, kept, rows, tokens, summed(rounds.inner(kept))))
    plain = [
        Outcome(
            tokens.sum() / machine.whole(rows).sum(), rows.mean() / batch, tokens.mean() / batch, f"{threshold:.2g}"
        )
        for threshold, _, rows, tokens, _ in first
    ]
    yield "", machine.layers, max(plain, key=lambda one: one.rate)
    for layer, check in itertools.product(layers, (*CHECKS, PERFECT)):
        share = 0.0 if check in ("tree", PERFECT) else 1.0 if check.startswith("full") else REDUCED / machine.vocabulary
        found, probs = [], rounds.checked(layer, check)
        for (threshold, kept, rows, tokens, inner), second in itertools.product(first, THRESHOLDS[1:-1]):
            still = kept & (probs >= second)
            left, got = summed(1 + still.sum(1)), summed(1 + (still & rounds.on_path).sum(1))
            spent = machine.pruned(rows, inner, left, layer, share)
            accepted = (tokens - batch).sum()
            found.append(Outcome(
                got.sum() / spent.sum(), rows.mean() / batch, got.mean() / batch, f"{threshold:.2g}, {second:.2g}",
                1.0 - left.sum() / rows.sum(), (tokens - got).sum() / accepted if accepted else 0.0,
            ))  # fmt: skip
        yield check, layer, max(found, key=lambda one: one.rate)


def show(name: str, rounds: Rounds, machine: Machine, batches: list[int], layers: list[int]) -> None:
    print(f"\n{name}: {len(rounds.rounds)} rounds, {rounds.real.sum(1).mean():.1f} draft tokens a round\n")
    print("| batch | check | boundary | speed | thresholds | rows | tokens | rows dropped | accepted lost |")
    print("|---|---|---|---|---|---|---|---|---|")
    for batch in batches:
        every = list(outcomes(rounds, machine, batch, layers))
        plain = every[0][2]
        for check in ("", *CHECKS, PERFECT):
            _, layer, one = max((x for x in every if x[0] == check), key=lambda x: x[2].rate)
            print(
                f"| {batch} | {check or 'none'} | {layer} | {one.rate / plain.rate:.3f} | {one.setting} | "
                f"{one.rows:.2f} | {one.tokens:.2f} | {one.dropped:.0%} | {one.lost:.1%} |"
            )
        real = [(at, one.rate / plain.rate) for name, at, one in every if name in CHECKS]
        by_layer = (f"{layer}: {max(rate for at, rate in real if at == layer):.3f}" for layer in layers)
        print(f"| {batch} | best check by boundary | {', '.join(by_layer)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="?", help="questions; without a file the embedded ones")
    parser.add_argument("methods", nargs="*", metavar="METHOD=SETTINGS", help="large drafts; settings as JSON")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--limit", type=int, default=24, help="prompts; as many others are for fitting")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--shares", default="0.3,0.5,0.7,0.8,0.9", help="boundaries, as shares of the layers")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="of the forwards that are timed")
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--costs", help="milliseconds by rows, 1:3.8,2:3.9,...; by default as measured while recording")
    parser.add_argument("--head", type=float, default=0.21, help="with --costs: the LM head's share of a forward")
    parser.add_argument("--cache", type=Path, required=True, help="what was recorded: read if there, else written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recorded: dict[str, list[Round]] = {}
    if options.cache.exists():
        machine, layers, recorded = pickle.loads(options.cache.read_bytes())
    else:
        model = outpace.load(options.model, dtype=options.dtype)
        machine = measure(model.target, options.context, options.repeat)
        layers = [round(model.target.num_layers * float(share)) for share in options.shares.split(",")]
        every = list(enumerate(load_prompts(options.prompts, 2 * options.limit)))
        fitting = every[1::2]
        for label in options.methods:
            name, _, text = label.partition("=")
            draft = None if options.draft_model is None else outpace.load(options.draft_model, dtype=options.dtype)
            method = model.method(name, json.loads(text or "{}"), draft_model=draft if name == "draft-model" else None)
            recorder = Recorder(model, method, layers)
            recorder.fit(fitting, options.max_new_tokens)
            mine = [(at // 2, one) for at, one in every if (at, one) not in fitting]
            recorded[label] = recorder.rounds(mine, options.max_new_tokens)
            options.cache.write_bytes(pickle.dumps((machine, layers, recorded)))
            print(f"{label}: {len(recorded[label])} rounds", flush=True)
    if options.costs:
        machine = given(options.costs, options.head, machine.layers, machine.vocabulary)
    for title, table in (("forward", machine.forward), ("LM head", machine.head)):
        print(f"{title}, ms by rows: " + ", ".join(f"{rows}: {ms:.2f}" for rows, ms in table.items()))
    batches = [int(one) for one in options.batches.split(",")]
    for label, rounds in recorded.items():
        show(label, Rounds(rounds), machine, batches, layers)


if __name__ == "__main__":
    main()
