"""What acceptance rules cost beside a forward.

    python benchmarks/rule_costs.py --threads 2

Times every acceptance rule on a tree of 64 nodes with real logits: the rule alone as a share of that tree's forward,
the target's sampler (p of the nodes that the rule reads) apart.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import torch

import outpace
from forward import median_ms
from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.greedy import Greedy
from outpace.acceptance.registry import rules
from outpace.core.chance import SeededChance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, QRow, TokenTree
from outpace.targets.base import Sequence, Target, TreeScores


def opened(target: Target, context: int, params: SamplingParams) -> Sequence:
    sequence = target.sequence([(37 * i) % 20_000 + 100 for i in range(context)], params)
    target.prefill([sequence])
    return sequence


def sampled_tree(target: Target, sequence: Sequence, proposal: Proposal, nodes: int) -> TokenTree:
    """A tree with draws of the target's own softened distribution: many are accepted, as with a good drafter."""
    generator = torch.Generator().manual_seed(0)
    tree = TokenTree(replacement=proposal.replacement)
    level, width = [ROOT], 3 if proposal.tree else 1
    while len(tree) < nodes:
        scores = target.score([(sequence, tree)])[0]
        below: list[int] = []
        for node in level:
            q = (scores.logits[node + 1].float() / 1.2).softmax(-1)
            if proposal.one_sampled_sibling:
                below += [tree.add(node, token) for token in q.topk(width - 1).indices.tolist()]
                rest = q.clone()
                rest[q.topk(width - 1).indices] = 0.0
                tokens, q = torch.multinomial(rest, 1, generator=generator).tolist(), rest / rest.sum()
            else:
                tokens = torch.multinomial(q, width, proposal.replacement, generator=generator).tolist()
            row: QRow | int = QRow(q)
            for token in tokens:
                if len(tree) < nodes:
                    below.append(tree.add(node, token, row))
                    row = len(tree.q_rows) - 1
        level = list(dict.fromkeys(below))
    return tree


def shapes(rule: AcceptanceRule) -> dict[str, Proposal]:
    """The kinds of trees that the rule takes."""
    kinds = {
        "chain": Proposal(sampled=True, shares_noise=True),
        "with replacement": Proposal(tree=True, sampled=True),
        "without replacement": Proposal(tree=True, sampled=True, replacement=False),
        "greedy + 1": Proposal(tree=True, sampled=True, one_sampled_sibling=True),
    }
    taken = {}
    for name, proposal in kinds.items():
        try:
            rule.check("tree", proposal)
        except BadInput:
            continue
        taken[name] = proposal
    return taken


def rule_costs(target: Target, context: int, repeat: int, nodes: int) -> None:
    sampling = SamplingParams(temperature=1.0)
    trees: dict[str, tuple[Sequence, TokenTree]] = {}
    print(f"{'rule':<20} {'tree':<20} {'forward ms':>10} {'sampler ms':>10} {'rule ms':>8} {'share':>7}")
    found = {rule.name: rule for rule in rules().values()}
    for rule in [kind() for kind in found.values()]:
        params = SamplingParams() if isinstance(rule, Greedy) else sampling
        for kind, proposal in shapes(rule).items():
            if kind not in trees:
                sequence = opened(target, context, sampling)
                trees[kind] = sequence, sampled_tree(target, sequence, proposal, nodes)
            sequence, tree = trees[kind]
            forward = median_ms(lambda s=sequence, t=tree: target.score([(s, t)]), max(3, repeat // 5))  # type: ignore[misc]
            sequence.sampler.params = params
            part = target.score([(sequence, tree)])[0]
            sampler, alone = rule_cost(rule, part, repeat)
            share = 100 * alone / forward
            print(
                f"{rule.name:<20} {kind:<20} {forward:>10.1f} {sampler:>10.2f} {alone:>8.2f} {share:>6.1f}%", flush=True
            )


def rule_cost(rule: AcceptanceRule, part: TreeScores, repeat: int) -> tuple[float, float]:
    """Milliseconds in the target's sampler, and in the rule itself with p at hand; medians over seeds."""
    with_sampler, alone = [], []
    for seed in range(repeat):
        chance = SeededChance(seed)
        part._distribution = None
        began = perf_counter()
        rule.accept([part], [None], [chance.at(0, "accept")])
        middle = perf_counter()
        rule.accept([part], [None], [chance.at(0, "accept")])  # the same walk: p is there now
        with_sampler.append(middle - began)
        alone.append(perf_counter() - middle)
    quick = 1e3 * statistics.median(alone)
    return max(0.0, 1e3 * statistics.median(with_sampler) - quick), quick


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--nodes", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = outpace.load(options.model, dtype=options.dtype).target
    rule_costs(target, options.context, options.repeat, options.nodes)


if __name__ == "__main__":
    main()
