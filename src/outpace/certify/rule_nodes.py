"""One round of a rule alone: every outcome, over many target distributions and everything that may be proposed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule
from outpace.certify.rule_findings import RuleFindings
from outpace.core.chance import ChanceSource, Enumeration
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.shared_noise import SharedNoise
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import TreeScores
from outpace.targets.table import TableTarget, random_table

Grow = Callable[[ChanceSource], TokenTree]
_NODE_SAMPLING = ("temperature 1", "temperature 0.6", "top-k 2", "greedy, penalties")


def enumerate_nodes(found: RuleFindings, sampling: Mapping[str, SamplingParams], nodes: int) -> None:
    """See every outcome of one round after each of ``nodes`` target distributions, for each kind of sampling."""
    names = [name for name in _NODE_SAMPLING if name in sampling] or list(sampling)
    for name in names:
        if sampling[name].greedy and found.rule.keeps_greedy:
            continue  # such a request has another rule, the greedy walk
        for seed in range(nodes):
            size = 3 + seed % 3
            scale = (0.5, 1.0, 2.0, 4.0)[seed // 3 % 4]
            logits = random_table(size, 7_000 + seed, order=0, sharpness=scale)(()) + 2.0
            target = TableTarget(size, random_table(size, seed))
            rule = found.rule.for_target(target)
            for what, grow in proposals(rule, logits, seed):
                h: Tensor = torch.zeros(size, dtype=torch.float64)
                program = partial(_one_round, rule, target, sampling[name], logits, grow)
                judged = None
                for (token, judged), weight in Enumeration.outcomes(program):  # noqa: B007
                    h[token] += weight
                assert judged is not None
                found.see(judged, h, f"{name}, logits {[round(one, 3) for one in logits.tolist()]}, {what}")


def _one_round(
    rule: AcceptanceRule, target: TableTarget, params: SamplingParams, logits: Tensor, grow: Grow, chance: ChanceSource
) -> tuple[int, TreeScores]:
    """The first token that a round commits, and the scores that were judged."""
    tree = grow(chance)
    sequence = target.sequence([0], params, chance=chance)
    if rule.shares_noise:
        sequence.noise = SharedNoise()
    only = torch.full_like(logits, -math.inf)
    only[0] = 0.0  # after a draft token there is one choice
    scores = TreeScores(sequence, tree, torch.stack([logits, *([only] * len(tree))]), {})
    [verdict] = rule.accept([scores], [rule.begin(sequence)], [chance.at(1, "accept")])
    return tree.tokens[verdict.path[0]] if verdict.path else verdict.token, scores


def proposals(rule: AcceptanceRule, logits: Tensor, seed: int) -> Iterator[tuple[str, Grow]]:
    """What may be proposed after one node: every token, every pair, draws of a row; of what the rule takes."""
    size = len(logits)
    row = random_table(size, 9_000 + seed, order=0, sharpness=2.0)(()).softmax(-1)

    def certain(tokens: Seq[int], _: ChanceSource) -> TokenTree:
        tree = TokenTree()
        for token in tokens:
            tree.add(ROOT, token)
        return tree

    def sampled(count: int, replacement: bool, chance: ChanceSource) -> TokenTree:
        tree, stream = TokenTree(replacement=replacement), chance.at(1, "draft")
        if not replacement:
            first, *others = stream.ordered_sample(row, count)
            tree.add(ROOT, first, QRow(row))
            for token in others:
                tree.add(ROOT, token, 0)
            return tree
        for _ in range(count):
            tree.add(ROOT, stream.categorical(row), 0 if tree.q_rows else QRow(row))
        return tree

    def as_drawn(chance: ChanceSource) -> TokenTree:
        """One draw where it was the likeliest token, else more: how many there are depends on what was drawn."""
        tree, stream = TokenTree(replacement=False), chance.at(1, "draft")
        first = stream.categorical(row)
        tree.add(ROOT, first, QRow(row))
        rest = row.clone()
        rest[first] = 0.0
        for token in () if first == int(row.argmax()) else stream.ordered_sample(rest, 2):
            tree.add(ROOT, token, 0)
        return tree

    def beside(token: int, chance: ChanceSource) -> TokenTree:
        tree, rest = TokenTree(), row.clone()
        rest[token] = 0.0
        tree.add(ROOT, token)
        tree.add(ROOT, chance.at(1, "draft").categorical(rest), QRow(rest / rest.sum()))
        return tree

    kinds: list[tuple[Proposal, str, Grow]] = [
        (Proposal(), f"token {token}", partial(certain, [token])) for token in range(size)
    ]
    kinds += [(Proposal(tree=True), f"tokens {pair}", partial(certain, pair)) for pair in combinations(range(size), 2)]
    kinds.append((Proposal(sampled=True), "a sampled token", partial(sampled, 1, True)))
    distinct = Proposal(tree=True, sampled=True, replacement=False)
    if size < 5:
        kinds.append((distinct, "as many draws as the first one says", as_drawn))
    if size == 3:  # there are many outcomes
        kinds.append((Proposal(tree=True, sampled=True), "two draws", partial(sampled, 2, True)))
        kinds.append((distinct, "two different draws", partial(sampled, 2, False)))
        mixed = Proposal(tree=True, sampled=True, one_sampled_sibling=True)
        kinds += [(mixed, f"token {token} and a draw of the others", partial(beside, token)) for token in range(size)]
    for proposal, what, grow in kinds:
        try:
            rule.check("any", proposal)
        except BadInput:
            continue
        yield what, grow
