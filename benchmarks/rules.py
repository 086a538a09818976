"""Accepted length of every lossless rule on the same drafted trees, and how far each is from the optimum.

    python benchmarks/rules.py --threads 2 --contexts 60
    python benchmarks/rules.py --bound

The first form drafts with the model itself less some of its layers (``--without``), a stand-in for a small draft model.
At every context one tree of each kind is drawn and scored once; every rule that takes it decides it under ``--seeds``
seeds. Mean tokens a round, bonus included, with a bootstrap interval over contexts, and the difference from recursive
rejection on the same trees with its own interval. The second form sets one node's acceptance beside the optimal
transport's, which is a linear program, on random distributions over eight tokens.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import torch

import outpace
from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.registry import rules
from outpace.api.requests import prompt_ids
from outpace.certify.transport import draw_sets, optimal_acceptance
from outpace.controllers.base import Budget
from outpace.core.chance import SeededChance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.model_drafter import DraftModel, top_k_tree
from outpace.drafting.sampled_trees import GreedyPlusOne, StochasticBeam, WithoutReplacement, WithReplacement
from outpace.prompts.questions import load_prompts
from outpace.targets.base import Target, TreeScores
from outpace.targets.hf import HFTarget
from outpace.targets.table import TableTarget

BRANCHING = (3, 2, 1, 1)
NODES = 21  # 3 + 6 + 6 + 6


def thinned(model: Any, without: list[int]) -> HFTarget:
    """The model less some layers: a drafter of the same vocabulary."""
    twin = copy.deepcopy(model)
    kept = [layer for index, layer in enumerate(twin.model.layers) if index not in without]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    twin.model.layers = torch.nn.ModuleList(kept)
    twin.config.num_hidden_layers = len(kept)
    return HFTarget(twin)


def drafters(draft: Target) -> dict[str, tuple[Drafter[Any], Budget]]:
    depth = len(BRANCHING)
    tree = Budget(depth, NODES, max(BRANCHING))
    sampled = Proposal(tree=True, sampled=True)
    without = Proposal(tree=True, sampled=True, replacement=False)
    single = Proposal(tree=True, sampled=True, one_sampled_sibling=True)
    return {
        f"chain of {depth}": (DraftModel(draft), Budget(depth)),
        "with replacement": (DraftModel(draft, partial(WithReplacement, branching=BRANCHING), sampled), tree),
        "without replacement": (DraftModel(draft, partial(WithoutReplacement, branching=BRANCHING), without), tree),
        "stochastic beam": (
            DraftModel(draft, partial(StochasticBeam, branching=(NODES // depth,)), without),
            Budget(depth, NODES, NODES // depth),
        ),
        "greedy + 1": (DraftModel(draft, partial(GreedyPlusOne, branching=BRANCHING), single), tree),
        "top-k, deterministic": (top_k_tree(draft), tree),
    }


def taken_by(proposal: Proposal) -> list[AcceptanceRule]:
    """The sampling rules that judge one tree under many seeds: noise that is shared fixes draft and verdict at once."""
    found = []
    for rule in {kind.name: kind() for kind in rules().values()}.values():
        try:
            rule.check("tree", proposal)
        except BadInput:
            continue
        if not rule.greedy_only and not rule.shares_noise:
            found.append(rule)
    return found


def accepted(rule: AcceptanceRule, part: TreeScores, seeds: range) -> float:
    lengths = [len(rule.accept([part], [None], [SeededChance(seed).at(0, "accept")])[0].path) + 1 for seed in seeds]
    return float(np.mean(lengths))


def interval(values: np.ndarray) -> str:
    generator = np.random.default_rng(0)
    means = generator.choice(values, (2000, len(values))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"[{low:+.3f}, {high:+.3f}]" if values.min() < 0 else f"[{low:.3f}, {high:.3f}]"


def compare(options: argparse.Namespace) -> None:
    model = outpace.load(options.model, dtype="float32", target="generic")
    target = model.target
    draft = thinned(target.model, options.without)  # type: ignore[attr-defined]
    params = SamplingParams(temperature=options.temperature)
    lengths: dict[tuple[str, str], list[float]] = defaultdict(list)
    prompts = load_prompts(None, min(options.contexts, 42))
    for number in range(options.contexts):
        prompt = prompts[number % len(prompts)]
        ids = prompt_ids(model, prompt.turns[0])
        answer = outpace.generate(
            model, prompt.turns[0], method="none", temperature=1.0, seed=number, max_new_tokens=4 + number % 24
        )
        tokens = [*ids, *answer.tokens]
        # Other seeds at every context: the same few numbers everywhere would be one throw of the dice, not many.
        seeds = range(number * options.seeds, (number + 1) * options.seeds)
        for kind, (drafter, budget) in drafters(draft).items():
            sequence = target.sequence(tokens, params, chance=SeededChance(number))
            target.prefill([sequence])
            state = drafter.begin(sequence)
            tree = drafter.propose_batch([state], [budget])[0]
            part = target.score([(sequence, tree)])[0]
            for rule in taken_by(drafter.proposal):
                lengths[kind, rule.name].append(accepted(rule, part, seeds))
            drafter.end(state)
            target.close(sequence.kv)
        print(f"\r{number + 1} of {options.contexts} contexts", end="", flush=True)
    print(f"\n\n{'tree':<22} {'rule':<20} {'tokens a round':<24} against recursive-rejection")
    for (kind, name), values in lengths.items():
        base = np.array(lengths[kind, "recursive-rejection"])
        mine = np.array(values)
        versus = "" if name == "recursive-rejection" else f"{(mine - base).mean():+.3f} {interval(mine - base)}"
        print(f"{kind:<22} {name:<20} {mine.mean():.3f} {interval(mine):<18} {versus}")


def bound(options: argparse.Namespace) -> None:
    """One node, k draws, random p and q over eight tokens: P(the output is one of the draws)."""
    vocab, generator = 8, np.random.default_rng(0)
    kinds = {"with replacement": True, "without replacement": False}
    print(f"{'draws':<24} {'rule':<20} acceptance / optimum (mean over {options.cases} cases)")
    for k in (1, 2, 3):
        for kind, replacement in kinds.items():
            shares: dict[str, list[float]] = defaultdict(list)
            for case in range(options.cases):
                p, q = generator.dirichlet(np.ones(vocab)), generator.dirichlet(np.ones(vocab))
                best = optimal_acceptance(p, draw_sets(q, k, replacement))
                for name, value in _one_node(p, q, k, replacement, case, options.seeds).items():
                    shares[name].append(value / best)
            for name, values in shares.items():
                print(f"{f'{k} {kind}':<24} {name:<20} {np.mean(values):.3f} {interval(np.array(values))}")


def _one_node(p: np.ndarray, q: np.ndarray, k: int, replacement: bool, case: int, seeds: int) -> dict[str, float]:
    row = torch.from_numpy(p).float().log()
    target = TableTarget(len(p), lambda _: row)
    sequence = target.sequence([0, 0], SamplingParams(temperature=1.0))
    target.prefill([sequence])
    weights = torch.from_numpy(q).float()
    hits: dict[str, list[bool]] = defaultdict(list)
    for seed in range(seeds):
        chance = SeededChance(1000 * case + seed).at(0, "draft")
        tokens = [chance.categorical(weights) for _ in range(k)] if replacement else chance.ordered_sample(weights, k)
        tree = TokenTree(replacement=replacement)
        for index, token in enumerate(tokens):
            tree.add(ROOT, token, 0 if index else QRow(weights))
        part = target.score([(sequence, tree)])[0]
        for rule in taken_by(Proposal(tree=k > 1, sampled=True, replacement=replacement)):
            verdict = rule.accept([part], [None], [SeededChance(1000 * case + seed).at(0, "accept")])[0]
            hits[rule.name].append(bool(verdict.path))
    return {name: float(np.mean(values)) for name, values in hits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--without", type=lambda text: [int(one) for one in text.split(",")], default=[15, 20])
    parser.add_argument("--contexts", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bound", action="store_true", help="compare with the optimal transport instead")
    parser.add_argument("--cases", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.bound:
        options.seeds = max(options.seeds, 400)
        bound(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
