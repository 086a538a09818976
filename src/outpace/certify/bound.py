"""The bound level: does a rule keep its promise about the committed token? Every outcome, at small vocabularies.

Two enumerations, for the settings at the corners of what the rule takes. *Nodes*: one round of the rule alone, over
many target distributions and everything that a drafter may propose after the root; here a promise is reached if it
can be. *Outputs*: whole outputs of the method through the decoder; the distribution of the next token after every
beginning is compared with the target's. A promise that holds at every node holds there as well, because divergences
are convex. Settings that mean lossless are compared with autoregressive decoding. Rules that promise nothing are only
measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.bounds import EXCESS_NLL, MEASURES, view
from outpace.acceptance.lossy import LossyRule
from outpace.acceptance.registry import configured
from outpace.certify.certificate import BoundCheck, Certificate
from outpace.certify.distributions import (
    Output,
    OutputDistribution,
    autoregressive_distribution,
    distance,
    enumerated_distribution,
)
from outpace.certify.exact import PROMPTS, SAMPLING, TOLERANCE, Setting, requests
from outpace.core.chance import ChanceSource, Enumeration
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.shared_noise import SharedNoise
from outpace.core.tree import ROOT, QRow, TokenTree
from outpace.engine.method import Method
from outpace.methods.registry import Context
from outpace.targets.base import TreeScores
from outpace.targets.table import Table, TableTarget, random_table

NODES = 12
NEAR = 0.5
"""Share of a limit from which on a node counts as near to it."""
MakeWith = Callable[[Context, AcceptanceRule], Method]
"""Builds the method under test with a rule, afresh, for a tiny target."""
Grow = Callable[[ChanceSource], TokenTree]
_OUTCOMES = 5_000
"""Most outcomes of one enumeration; where there are more, shorter outputs are enumerated."""
_SHORTEST = 2
"""Tokens of an output before which something may be drafted."""
_NODE_SAMPLING = ("temperature 1", "temperature 0.6", "top-k 2", "greedy, penalties")


def corners_of(rule: AcceptanceRule) -> list[AcceptanceRule]:
    """The rule at the corners of its settings; those that were given stay as they are."""
    if not isinstance(rule, LossyRule) or not rule.corners:
        return [rule]
    given = {name: getattr(rule.settings, name) for name in rule.settings.model_fields_set}
    found: dict[str, AcceptanceRule] = {}
    for corner in rule.corners:
        one = configured(type(rule), {**corner, **given})
        found[one.described] = one
    return list(found.values())


def cells(corner: int, sampling: Mapping[str, SamplingParams] = SAMPLING) -> list[Setting]:
    """The settings in which whole outputs are enumerated for one corner: some of the sampling parameters in turn, and
    greedy ones always."""
    names = [name for name, params in sampling.items() if not params.greedy and not params.weighting.weighs]
    greedy = [name for name, params in sampling.items() if params.greedy]
    drawn = [names[(3 * corner + turn) % len(names)] for turn in range(3)] if names else []
    return [
        Setting(name, (3, 4, 3)[number % 3], 3, PROMPTS[(corner + number) % 2], "alone", 40 * corner + number)
        for number, name in enumerate(dict.fromkeys([*drawn, *greedy]))
    ]


def certify_bound(
    name: str,
    make: MakeWith,
    rule: AcceptanceRule,
    *,
    sampling: Mapping[str, SamplingParams] = SAMPLING,
    most: int | None = None,
    nodes: int = NODES,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Certificate:
    """Test what ``rule`` promises, at the corners of its settings, alone and as the rule of the method.

    ``most``: enumerate whole outputs in so many settings for each corner; None: in all of :func:`cells`. ``nodes``: how
    many target distributions are enumerated for each corner and each kind of sampling.
    """
    corners = corners_of(rule)
    checks = []
    for number, corner in enumerate(corners):
        if on_progress is not None:
            on_progress(number, len(corners), corner.described)
        found = _Found(corner)
        if corner.bound is not None:
            _enumerate_nodes(found, sampling, nodes)
        for cell in cells(number, sampling)[:most]:
            _enumerate_outputs(found, make, cell, sampling[cell.sampling])
        checks.append(found.check())
    return _conclude(name, rule, checks)


@dataclass
class _Found:
    """What was found of one rule so far. ``worst``: the largest excess over a limit, and where."""

    rule: AcceptanceRule
    nodes: int = 0
    largest: float | None = None
    tightest: float | None = None
    worst: float = 0.0
    where: str = ""
    total_variation: float = 0.0
    notes: list[str] = field(default_factory=list)

    def see(self, scores: TreeScores, h: Tensor, where: str) -> None:
        """Compare the distribution of the committed token after the root with the target's."""
        bound = self.rule.bound
        if bound is None:
            return
        node = view(scores, ROOT)
        if scores.sequence.params.greedy:
            committed = h > TOLERANCE
            value = float((node.probs.max() / node.probs[committed].min()).log())
            limit, measure = self.rule.greedy_limit(node), EXCESS_NLL
        else:
            value, limit = MEASURES[bound.measure](h, scores.p(ROOT)), self.rule.limit(node)
            measure = bound.measure
            self.largest = max(value, self.largest or 0.0)
        self.nodes += 1
        if value > limit * (1.0 + TOLERANCE) + TOLERANCE and value - limit > self.worst:
            self.worst = value - limit
            self.where = f"{where}: {measure} {value:.4g}, limit {limit:.4g}"
        if limit > TOLERANCE and math.isfinite(limit):
            self.tightest = max(value / limit, self.tightest or 0.0)

    def fail(self, size: float, where: str) -> None:
        """Something that needs no limit is wrong."""
        if size > self.worst:
            self.worst, self.where = size, where

    def check(self) -> BoundCheck:
        bound = self.rule.bound
        promised = bound is not None or self.rule.exact
        return BoundCheck(
            rule=self.rule.described,
            measure=None if bound is None else bound.measure,
            limit=None if bound is None else bound.limit,
            lossless=self.rule.exact and not self.worst,
            holds=not self.worst if promised else None,
            nodes=self.nodes,
            largest=self.largest,
            tightest=self.tightest,
            total_variation=self.total_variation,
            where=self.where,
            note="; ".join(self.notes),
        )


# ------------------------------------------------------------------------------------------------------------ nodes


def _enumerate_nodes(found: _Found, sampling: Mapping[str, SamplingParams], nodes: int) -> None:
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

    kinds: list[tuple[Proposal, str, Grow]] = [
        (Proposal(), f"token {token}", partial(certain, [token])) for token in range(size)
    ]
    kinds += [(Proposal(tree=True), f"tokens {pair}", partial(certain, pair)) for pair in combinations(range(size), 2)]
    kinds.append((Proposal(sampled=True), "a sampled token", partial(sampled, 1, True)))
    if size == 3:  # there are many outcomes
        kinds.append((Proposal(tree=True, sampled=True), "two draws", partial(sampled, 2, True)))
        distinct = Proposal(tree=True, sampled=True, replacement=False)
        kinds.append((distinct, "two different draws", partial(sampled, 2, False)))
    for proposal, what, grow in kinds:
        try:
            rule.check("any", proposal)
        except BadInput:
            continue
        yield what, grow


# ---------------------------------------------------------------------------------------------------------- outputs


def _enumerate_outputs(found: _Found, make: MakeWith, cell: Setting, params: SamplingParams) -> None:
    table = random_table(cell.vocab_size, cell.seed)
    batch = partial(requests, lambda context: make(context, found.rule), cell, params)
    try:
        outputs, drafted = enumerated_distribution(batch, _OUTCOMES)
    except (NotImplementedError, RuntimeError) as reason:
        if cell.length > _SHORTEST:
            _enumerate_outputs(found, make, replace(cell, length=cell.length - 1), params)
        else:
            found.notes.append(f"{cell} was not enumerated: {reason}")
        return
    plain = autoregressive_distribution(table, cell.vocab_size, params, cell.prompt, cell.length)
    found.total_variation = max(found.total_variation, _variation(outputs, plain))
    if found.rule.exact and (error := distance(outputs, plain)) > TOLERANCE:
        found.fail(error, f"{cell}: settings that mean lossless, but output probabilities are off by {error:.2g}")
    if not drafted:
        found.notes.append(f"{cell}: nothing was drafted")
    for start, h in _continuations(outputs, cell.vocab_size):
        found.see(_after(table, cell, params, start), h, f"{cell}, after {list(start)}")


def _variation(one: OutputDistribution, other: OutputDistribution) -> float:
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def _continuations(outputs: OutputDistribution, vocab_size: int) -> Iterator[tuple[Output, Tensor]]:
    """Every beginning of an output, and the distribution of the token after it."""
    found: dict[Output, Tensor] = defaultdict(lambda: torch.zeros(vocab_size, dtype=torch.float64))
    for output, weight in outputs.items():
        for length, token in enumerate(output):
            found[output[:length]][token] += weight
    for start, weights in found.items():
        if (total := float(weights.sum())) > 1e-4:  # rounding would show in what nearly never happens
            yield start, weights / total


def _after(table: Table, cell: Setting, params: SamplingParams, start: Output) -> TreeScores:
    """The target's scores after an output's beginning, without a draft."""
    target = TableTarget(cell.vocab_size, table)
    sequence = target.sequence(list(cell.prompt), params)
    sequence.sampler.extend(start)
    return TreeScores(sequence, TokenTree(), table((*cell.prompt, *start))[None], {})


# ------------------------------------------------------------------------------------------------------- conclusion


def _conclude(name: str, rule: AcceptanceRule, checks: list[BoundCheck]) -> Certificate:
    broken = [check for check in checks if check.holds is False]
    unbounded = [check for check in checks if check.holds is None]
    loose = [check for check in checks if check.holds and check.tightest is not None and check.tightest < NEAR]
    lossless = [check for check in checks if check.lossless]
    nodes = sum(check.nodes for check in checks)
    if broken:
        verdict = f"the bound does not hold: {broken[0].rule}: {broken[0].where}"
    elif unbounded:
        most = max(check.total_variation for check in unbounded)
        verdict = (
            f"rule '{rule.name}' states no bound; whole outputs differ by up to {most:.3g} (total variation) from "
            "those of autoregressive decoding"
        )
    elif rule.bound is None:
        verdict = f"rule '{rule.name}' states no bound; with these settings it is lossless"
    else:
        verdict = f"the bound holds at {nodes:,} nodes, with {len(checks)} choices of settings"
    if not broken and lossless and not rule.lossless:
        verdict += f"; identical in distribution with {', '.join(check.rule for check in lossless)}"
    if not broken and loose:
        verdict += f"; never near its limit (below {NEAR:.0%} of it) with {', '.join(check.rule for check in loose)}"
    certificate = Certificate(name, "bound", rule.lossless and not broken, verdict)
    return replace(certificate, bounds=tuple(checks))
