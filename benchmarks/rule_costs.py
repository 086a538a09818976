"""What accepting costs beside a forward, with probabilities in plain PyTorch and by the kernels.

    python benchmarks/rule_costs.py --threads 2
    python benchmarks/rule_costs.py --model qwen2.5-coder-1.5b.gguf --dtype auto --threads 2

Times every acceptance rule on chains and trees of real logits: all that a rule does, the target's probabilities
included, as a share of the forward over that tree and the rule. Both ways judge the same tree, in turn, with the same
random numbers; the quickest of several runs counts.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import torch

import outpace
from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.registry import rules
from outpace.core.chance import SeededChance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.token_distribution import OpenRows, dense_distributions
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Sequence, Target, TreeScores
from outpace.targets.dense.native_distribution import native_distributions

KINDS = {
    "chain": Proposal(sampled=True, shares_noise=True),
    "likeliest tokens": Proposal(tree=True),
    "with replacement": Proposal(tree=True, sampled=True),
    "without replacement": Proposal(tree=True, sampled=True, replacement=False),
    "greedy + 1": Proposal(tree=True, sampled=True, one_sampled_sibling=True),
}
WAYS: dict[str, OpenRows] = {"PyTorch": dense_distributions, "kernels": native_distributions}


def opened(target: Target, context: int, params: SamplingParams) -> Sequence:
    sequence = target.sequence([(37 * i) % 20_000 + 100 for i in range(context)], params)
    target.prefill([sequence])
    return sequence


def draft(target: Target, sequence: Sequence, proposal: Proposal, nodes: int, open_rows: OpenRows) -> TokenTree:
    """A tree with draws of the target's own softened distribution: many are accepted, as with a good drafter."""
    chance = SeededChance(0).at(0, "draft")
    softer = SamplingParams(temperature=1.2 * sequence.params.temperature)
    tree = TokenTree(replacement=proposal.replacement)
    level, width = [ROOT], 3 if proposal.tree else 1
    while len(tree) < nodes:
        scores = target.score([(sequence, tree)])[0]
        below: list[int] = []
        for node in level:
            [q] = open_rows(scores.logits, [node + 1], softer)
            assert q is not None
            likeliest = q.dense().topk(width).indices.tolist()
            row: QRow | int = QRow(q)
            if not proposal.sampled:
                below += [tree.add(node, token) for token in likeliest[: nodes - len(tree)]]
                continue
            if proposal.one_sampled_sibling:
                below += [tree.add(node, token) for token in likeliest[:-1]]
                rest, _ = q.residual(None, likeliest[:-1])
                tokens, row = [chance.categorical(rest)], QRow(rest)
            elif proposal.replacement:
                tokens = [chance.categorical(q) for _ in range(width)]
            else:
                tokens = q.sequential_draws([chance.uniform() for _ in range(width)])
            for token in tokens:
                if len(tree) < nodes:
                    below.append(tree.add(node, token, row))
                    row = len(tree.q_rows) - 1
        level = list(dict.fromkeys(below))
    return tree


def kinds_of(rule: AcceptanceRule) -> list[str]:
    """The kinds of trees that the rule takes."""
    taken = []
    for name, proposal in KINDS.items():
        try:
            rule.check("tree", proposal)
        except BadInput:
            continue
        taken.append(name)
    return taken


def rule_costs(target: Target, context: int, repeat: int, nodes: int, params: SamplingParams) -> None:
    print(f"{nodes} nodes, vocabulary {target.vocab_size:,}, {params.described}; milliseconds")
    print(f"{'rule':<20} {'tree':<20} {'forward':>8}", *(f"{way:>9} {'share':>7}" for way in WAYS))
    sequence = opened(target, context, params)
    trees: dict[tuple[str, str], TreeScores] = {}
    forwards: dict[str, float] = {}
    found = {rule.name: rule for rule in rules().values() if not rule.greedy_only}
    for rule in [kind() for kind in found.values()]:
        for kind in kinds_of(rule):
            if kind not in forwards:
                for way, open_rows in WAYS.items():
                    tree = draft(target, sequence, KINDS[kind], nodes, open_rows)
                    trees[way, kind] = target.score([(sequence, tree)])[0]
                forwards[kind] = min(forward_ms(target, sequence, tree) for _ in range(3 * repeat))
            parts = {way: trees[way, kind] for way in WAYS}
            costs = accept_costs(rule, sequence, parts, repeat)
            shares = {way: 100 * cost / (forwards[kind] + cost) for way, cost in costs.items()}
            columns = (f"{costs[way]:>9.3f} {shares[way]:>6.1f}%" for way in WAYS)
            print(f"{rule.name:<20} {kind:<20} {forwards[kind]:>8.1f}", *columns, flush=True)


def forward_ms(target: Target, sequence: Sequence, tree: TokenTree) -> float:
    """Milliseconds of one forward over the tree."""
    began = perf_counter()
    target.score([(sequence, tree)])
    return 1e3 * (perf_counter() - began)


def accept_costs(
    rule: AcceptanceRule, sequence: Sequence, parts: dict[str, TreeScores], repeat: int, runs: int = 8
) -> dict[str, float]:
    """Milliseconds of a verdict by each way: the mean over random numbers of the quickest of ``runs``."""
    spent: dict[str, list[float]] = {way: [] for way in parts}
    for seed in range(repeat):
        best = dict.fromkeys(parts, float("inf"))
        for _ in range(runs):
            for way, part in parts.items():
                sequence.sampler = Sampler(sequence.params, sequence.tokens, part.logits.shape[-1], open_rows=WAYS[way])
                part._distribution = None
                chance = SeededChance(seed)
                began = perf_counter()
                rule.accept([part], [None], [chance.at(0, "accept")])
                best[way] = min(best[way], perf_counter() - began)
        for way, seconds in best.items():
            spent[way].append(1e3 * seconds)
    return {way: statistics.mean(each) for way, each in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = outpace.load(options.model, dtype=options.dtype).target
    params = SamplingParams(
        options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty
    )
    rule_costs(target, options.context, options.repeat, options.nodes, params)


if __name__ == "__main__":
    main()
