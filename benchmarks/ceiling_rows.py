"""What `benchmarks/acceptance_ceiling.py` records at every position of a sampled answer.

The target answers alone. Then its answer is walked once more: at every position the head drafts a wide tree and the
rows along the target's own next tokens, the suffix automaton copies, and one forward of the target gives p at every
node. Expectations over sampled chains are taken along the target's own tokens y: a token that a chain accepts with
probability a(y) is reached by the target with p(y), so that the product of a(y) / p(y) over a path, times the closed
form of the next token, is the expected acceptance at that depth without a draw of the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.draws import (
    acceptance_probability,
    draws_by_parent,
    proposal_distribution,
    residual_distribution,
)
from outpace.certify.transport import draws_bound
from outpace.controllers.base import Budget
from outpace.core.chance import SeededChance
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.candidate_tree import CandidateTree
from outpace.drafting.copying import LONGEST, continuation
from outpace.drafting.sampled_trees import GreedyPlusOne, SampledTree, WithoutReplacement, WithReplacement
from outpace.heads.feature_drafter import FeatureState
from outpace.methods.learned.eagle.feature_method import FeatureMethod
from outpace.methods.lookup.sam import SuffixLookup
from outpace.targets.base import Sequence, Target, TreeScores

DEPTH = 5
"""Draft tokens on the longest path of the head."""
EXPAND = 4
CHILDREN = 6
LEAF = 1.15
"""The heat of single draws beside deterministic siblings."""
COPIES = 8
HEATS = (0.7, 0.85, 1.0, 1.15, 1.3, 1.6)
"""Factors on the head's logits beside 1 / temperature."""
TRUNCATED = (2, 4, 8, 32)
TINY = 1e-8
"""Tokens that are less likely for both are left out of closed forms that sort."""
DRAWN = {
    "without replacement 2-1-1": (WithoutReplacement, (2, 1, 1)),
    "without replacement 3-2-1-1": (WithoutReplacement, (3, 2, 1, 1)),
    "with replacement 2-1-1": (WithReplacement, (2, 1, 1)),
    "greedy + 1, 2-1-1": (GreedyPlusOne, (2, 1, 1)),
    "greedy + 1, 2-2-1": (GreedyPlusOne, (2, 2, 1)),
}


@dataclass
class Context:
    """One position. ``nodes``: candidates of the head as (index of the parent, depth, q, p), parents first, p and q of
    the token after its parent at the request's temperature; ``copied``: (length of the match behind it, p)."""

    group: str
    prompt: int
    nodes: list[tuple[int, int, float, float]] = field(default_factory=list)
    leaves: list[tuple[int, int, list[float], list[float]]] = field(default_factory=list)
    """For each node that the head ran: (its candidate or -1, its depth + 1, what the head has beyond its j likeliest
    tokens, and the acceptance of one draw of it beside them, optimally), j from 0."""
    copied: list[tuple[int, float]] = field(default_factory=list)
    both: list[int] = field(default_factory=list)
    """For each copied token the candidate of the head that is the same node, or -1."""
    one: dict[str, float] = field(default_factory=dict)
    """Acceptance at the root, by kind of proposal."""
    chains: dict[str, list[float]] = field(default_factory=dict)
    """Acceptance at depth 1, 2, ... of sampled chains."""
    trees: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Draws, and the expected accepted length, of one sampled tree."""


class Wide:
    """Candidates that run a wide tree of the head, and its rows along ``path``, the target's own tokens."""

    def __init__(self, ids: Seq[int], path: Seq[int], temperature: float) -> None:
        self.ids, self.path, self.temperature = ids, path, temperature
        self.logits: list[Tensor] = []
        self.parents, self.tokens, self.depths = [-1], [-1], [0]
        self.own = [0]
        """Rows along the target's tokens."""
        self.nodes: list[tuple[int, int, float, int, int]] = []
        """Candidates: parent, depth, q, token, row that it follows."""
        self._paths: list[float] = []
        self.ran = {0: -1}
        """The candidate that each row runs; none for rows that only the target's tokens lead to."""
        self._children: dict[int, list[int]] = {}
        self._running = [0]
        self._greedy = 0

    def take(self, logits: Tensor) -> list[tuple[int, int]]:
        found: list[int] = []
        for row, values in zip(self._running, logits, strict=True):
            self.logits.append(values.clone())
            if row in self.ran:
                found += self._born(row, values)
        level = self.depths[self._running[0]] + 1
        if level >= DEPTH:
            return []
        greedy = next(at for at in found if self.nodes[at][4] == self._greedy)
        best = [greedy, *sorted(found, key=lambda at: -self._paths[at])[:EXPAND]]
        wanted = {(self.nodes[at][4], self.nodes[at][3]): at for at in best}
        own = self.own[-1], self.path[level - 1]
        rows = list(dict.fromkeys([*wanted, own]))
        before = len(self.parents)
        for row, (parent, token) in enumerate(rows, start=before):
            self.parents.append(parent)
            self.tokens.append(token)
            self.depths.append(level)
            if (parent, token) in wanted:
                self.ran[row] = wanted[parent, token]
        self._greedy = before  # the first of them goes on with the likeliest chain
        self.own.append(before + rows.index(own))
        self._running = list(range(before, len(self.parents)))
        return rows

    def _born(self, row: int, values: Tensor) -> list[int]:
        parent = self.ran[row]
        q = (values.float() / self.temperature).softmax(-1)
        before = self._paths[parent] if parent >= 0 else 1.0
        born = []
        for prob, column in zip(*(one.tolist() for one in q.topk(CHILDREN)), strict=True):
            born.append(len(self.nodes))
            self.nodes.append((parent, self.depths[row] + 1, prob, self.ids[int(column)], row))
            self._paths.append(before * prob)
        return born

    def tree(self) -> TokenTree:
        tree = TokenTree()
        for parent, token in zip(self.parents[1:], self.tokens[1:], strict=True):
            tree.add(parent - 1, token)
        return tree

    def learn(self, committed: Seq[int], target_row: Callable[[int], Tensor] | None = None) -> None:
        """Nothing."""


class Recorder(FeatureMethod):
    """The head, drafting with whatever ``make`` begins."""

    make: Any

    def start(self, state: FeatureState, budget: Budget, level_cost: float) -> CandidateTree:
        made: CandidateTree = self.make(state)
        self.made = made
        return made


def walk(
    target: Target, head: Recorder, copies: SuffixLookup, prompt: Seq[int], answer: Seq[int], context: Context,
    params: SamplingParams, every: int, seed: int,
) -> list[Context]:  # fmt: skip
    """Contexts like ``context`` at every position of ``answer``; trees are drawn at every ``every``-th."""
    sequence = target.sequence(list(prompt), params, chance=SeededChance(seed))
    layers = head.aux_hidden_state_layers
    state, copy = head.begin(sequence), copies.begin(sequence)
    target.prefill([sequence], layers, lambda _, position, states: head.on_prefill(state, position, states))
    found: list[Context] = []
    for at in range(len(answer) - DEPTH):
        one = Context(context.group, context.prompt)
        path = list(answer[at : at + DEPTH])
        head.make = lambda _, path=path: Wide(head.net.ids, path, params.temperature)
        tree = head.propose_batch([state], [Budget(DEPTH, 64, CHILDREN)])[0]
        wide = head.made
        assert isinstance(wide, Wide)
        match = copies.match(copy)
        copied = [] if match is None else continuation(match.text, match.start, COPIES, periodic=match.periodic)
        node, line = ROOT, []
        for token in copied:
            line.append((node, token))
            known = tree.child(node, token)
            node = tree.add(node, token) if known is None else known
        scores = target.score([(sequence, tree)], layers)
        part = scores[0]
        part.distribution.ensure([ROOT, *range(len(tree))])
        _candidates(one, wide, part, line, 0 if match is None else match.length)
        _sampled(one, wide, part, path, params.temperature)
        if at % every == 0:
            _drawn(one, head, state, target, sequence)
        found.append(one)
        target.commit(scores, [()])
        sequence.tokens.append(answer[at])
        sequence.sampler.extend([answer[at]])
        head.observe(state, Verdict((), answer[at], part, (answer[at],)))
    head.end(state)
    target.close(sequence.kv)
    return found


def _candidates(one: Context, wide: Wide, part: TreeScores, line: Seq[tuple[int, int]], length: int) -> None:
    places = {}
    for index, (parent, depth, q, token, row) in enumerate(wide.nodes):
        one.nodes.append((parent, depth, q, float(part.p(row - 1)[token])))
        places[row - 1, token] = index
    ids = torch.tensor(wide.ids)
    for row, candidate in wide.ran.items():
        inside, rest = part.p(row - 1)[ids], (wide.logits[row].float() * (LEAF / wide.temperature)).softmax(-1)
        best, beyond, overlaps = rest.topk(CHILDREN).indices.tolist(), list[float](), list[float]()
        for column in [*best, None]:
            left = float(rest.sum())
            beyond.append(left)
            overlaps.append(float(torch.minimum(inside, rest / left).sum()) if left > 1e-6 else 0.0)
            if column is not None:
                inside[column] = rest[column] = 0.0
        one.leaves.append((candidate, wide.depths[row] + 1, beyond, overlaps))
    for index, (node, token) in enumerate(line):
        one.copied.append((min(LONGEST, length + index), float(part.p(node)[token])))
        one.both.append(places.get((node, token), -1))


def _sampled(one: Context, wide: Wide, part: TreeScores, path: Seq[int], temperature: float) -> None:
    ids = torch.tensor(wide.ids)
    columns = {token: column for column, token in enumerate(wide.ids)}
    heated = {f"heat {heat:g}": heat for heat in HEATS}
    weights = {(kind, name): (1.0, 1.0) for kind in ("rejection", "block", "gumbel") for name in heated}
    for depth, row in enumerate(wide.own):
        p = part.p(row - 1).double()
        inside = p[ids]
        token = path[depth]
        column, own = columns.get(token), float(p[token])
        for name, heat in heated.items():
            q = (wide.logits[row].double() * (heat / temperature)).softmax(-1)
            drafted = 0.0 if column is None else float(q[column])
            for kind in ("rejection", "block", "gumbel"):
                weight, mass = weights[kind, name]
                if kind == "gumbel":
                    accepted, mine = _coupled(inside, p, q, column)
                    value, factor = accepted, mine / own
                elif kind == "rejection":
                    value, factor = float(torch.minimum(inside, q).sum()), min(1.0, drafted / own)
                else:
                    value, factor = float(torch.minimum(mass * inside, q).sum()), drafted / own
                    mass = min(1.0, mass * own / drafted) if drafted > 0.0 else 0.0
                one.chains.setdefault(f"{kind}, {name}", []).append(weight * value)
                weights[kind, name] = weight * factor, mass
        if depth == 0:
            _at_root(one, p.numpy(), ids.numpy(), wide.logits[row].double(), temperature)


def _coupled(inside: Tensor, p: Tensor, q: Tensor, column: int | None) -> tuple[float, float]:
    """P(both draw the same token) and P(both draw ``column``) with the same Gumbel noise."""
    kept = ((inside > TINY) | (q > TINY)).nonzero()[:, 0]
    a, b = inside[kept], q[kept]
    order = (a / b).argsort()
    a, b = a[order], b[order]
    # 1 / sum_j max(p_j / p_x, q_j / q_x): those with a larger ratio p / q than x count with p, the others with q.
    above, below = 1.0 - a.cumsum(0), b.cumsum(0)
    same = (1.0 / (above.clamp(min=0.0) / a + below / b)).nan_to_num()
    at = (kept[order] == column).nonzero() if column is not None else kept[:0]
    return float(same.sum()), float(same[at[0, 0]]) if len(at) else 0.0


def _at_root(one: Context, p: np.ndarray, ids: np.ndarray, logits: Tensor, temperature: float) -> None:
    """Closed forms of one level, k draft tokens after the root."""
    top = np.sort(p)[::-1][:6]
    p = p[ids]  # nothing else is ever drafted
    for heat in (0.8, 1.0, 1.3):
        q = (logits * (heat / temperature)).softmax(-1).numpy()
        some = (q > TINY) | (p > TINY)
        q, p_some = q[some], p[some]
        _one_level(one, p_some, q, heat)
    order = logits.numpy().argsort()[::-1]
    for k in (1, 2, 3, 4, 6):
        one.one[f"{k} likeliest of the head"] = float(p[order[:k]].sum())
        one.one[f"{k} likeliest of the target"] = float(top[:k].sum())


def _one_level(one: Context, p: np.ndarray, q: np.ndarray, heat: float) -> None:
    order = np.argsort(-q)
    for k in (1, 2, 3, 4):
        one.one[f"{k} i.i.d., optimal, heat {heat:g}"] = draws_bound(p, q, k)
    one.one[f"2 without replacement, optimal, heat {heat:g}"] = draws_bound(p, q, 2, replacement=False)
    for k in (1, 2, 3, 4):
        left = p.copy()
        rest, reached, accepted = q.copy(), 1.0, 0.0
        for _ in range(k):  # recursive rejection of independent draws: the residual does not depend on the draw
            overlap = float(np.minimum(left, q).sum())
            accepted += reached * overlap
            reached *= 1.0 - overlap
            left = np.maximum(left - q, 0.0)
            left /= max(left.sum(), 1e-30)
        one.one[f"{k} i.i.d., recursive rejection, heat {heat:g}"] = accepted
        rest[order[: k - 1]] = 0.0
        rest /= max(rest.sum(), 1e-30)
        known = float(p[order[: k - 1]].sum())
        left = p.copy()
        left[order[: k - 1]] = 0.0
        one.one[f"{k} greedy + 1, optimal, heat {heat:g}"] = known + float(np.minimum(left, rest).sum())
    for k in TRUNCATED:
        kept = np.zeros(len(p))
        kept[order[:k]] = q[order[:k]] / q[order[:k]].sum()
        one.one[f"1 draw of the top {k}, heat {heat:g}"] = float(np.minimum(p, kept).sum())


def _drawn(one: Context, head: Recorder, state: FeatureState, target: Target, sequence: Sequence) -> None:
    """One sampled tree of each kind, and the exact expectation of the rules on it."""
    for name, (builder, branching) in DRAWN.items():
        make = partial(builder, branching=branching)
        budget = Budget(len(branching), 32, max(branching))
        chance = sequence.chance.at(len(sequence.tokens), "draft")
        head.make = lambda state, make=make, budget=budget, chance=chance: SampledTree(
            make(state.sequence, budget, chance), torch.tensor(head.net.ids), target.vocab_size
        )
        tree = head.propose_batch([state], [budget])[0]
        part = target.score([(sequence, tree)])[0]
        part.distribution.ensure([ROOT, *range(len(tree))])
        for rule in ("recursive", "traversal"):
            one.trees[f"{name}, {rule}"] = len(tree.draws), expected(part, rule == "traversal")


def expected(part: TreeScores, bottom_up: bool) -> float:
    """Expected accepted length of recursive rejection, or of traversal (``bottom_up``), given the tree."""
    tree, draws_at = part.tree, draws_by_parent(part.tree)

    def below(node: int, mass: float) -> float:
        p, remaining, total = part.p(node), 1.0, 0.0
        draws = draws_at.get(node, ())
        prefix = mass if bottom_up else 1.0
        for index, draw in enumerate(draws):
            q = proposal_distribution(tree, draws[:index], draw, p)
            share = acceptance_probability(p, q, draw.token, prefix)
            if share > 0.0:
                inner = below(draw.node, share)
                total += remaining * (share + inner if bottom_up else share * (1.0 + inner))
                remaining *= 1.0 - share
            rest, left = residual_distribution(p, q, draw.token, prefix)
            if left > 0.0:
                p = rest / left
            if prefix < 1.0:
                prefix = left / (left + 1.0 - prefix)
        return total

    return below(ROOT, 1.0)
