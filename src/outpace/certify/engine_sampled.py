"""An engine above temperature 0: tests of the tokens that it drew, at every position of many short answers.

Two samples: what the engine drew and what a server without speculation drew after the same prefix. One sample: what the
engine drew against known probabilities, its own log-probabilities or those of outpace's target, by rank over all
contexts, because a context need not occur twice for it. The first token of an answer usually comes from the prompt's
forward pass and shows nothing; a draft of K tokens is judged at tokens 2 to K + 2.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import stats

from outpace.certify.certificate import Check
from outpace.certify.endpoint import Top, likeliest
from outpace.certify.fit import Comparison, compare, detectable_bias, g_test, holm
from outpace.certify.near_ties import prefilled
from outpace.certify.server_client import Answer, Token
from outpace.certify.statistical import RANKS, Tally, rank_cells
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Target

FEWEST = 20
"""Draws of both samples together after one prefix, to compare them there; rarer prefixes are compared as one."""


@dataclass(frozen=True, slots=True)
class SampledTest:
    """One test before the adjustment for their number. ``size`` as in :class:`Comparison`; 0: power not known."""

    name: str
    p_value: float
    freedom: int
    size: float
    note: str

    def check(self, tests: int, alpha: float, bias: float) -> Check:
        """As one of ``tests`` tests; ``bias``: what the null allows."""
        if not self.freedom:
            return Check(self.name, None, note=self.note or "too few draws for a test")
        adjusted = min(1.0, self.p_value * tests)
        power = detectable_bias(self.size, self.freedom, alpha / tests, null=bias)
        return Check(self.name, adjusted >= alpha, p_value=adjusted, note=self.note, detectable_bias=power)


@dataclass(slots=True)
class Draws:
    """What was drawn after one prompt, in units (tokens, or characters): the engine's, and the baseline's if any."""

    ours: list[list[Token]] = field(default_factory=list)
    theirs: list[list[Token]] = field(default_factory=list)


def two_samples(draws: Sequence[Draws], first: int, length: int, bias: float, unit: str = "token") -> list[SampledTest]:
    """A test at each position from ``first`` on: do both sides draw alike, given the prefix, up to a ``bias``?"""
    found = []
    for at in range(first, length):
        total, contexts = Comparison(), 0
        for one in draws:
            for ours, theirs in _contexts(one, at):
                compared = compare(ours, theirs)
                contexts += bool(compared.freedom)
                total += compared
        note = f"{contexts} contexts" if total.freedom else ""
        name = f"{unit} {at + 1}, against the baseline"
        found.append(SampledTest(name, total.p_value(bias), total.freedom, total.size, note))
    return found


def _contexts(one: Draws, at: int) -> Iterable[tuple[Counter[Token], Counter[Token]]]:
    """What both sides drew at position ``at``, by prefix. Who drew a prefix does not decide how it is grouped."""
    sides: dict[Any, tuple[Counter[Token], Counter[Token]]] = defaultdict(lambda: (Counter(), Counter()))
    for side, sequences in enumerate((one.ours, one.theirs)):
        for sequence in sequences:
            if len(sequence) > at:
                sides[tuple(sequence[:at])][side][sequence[at]] += 1
    rest: tuple[Counter[Token], Counter[Token]] = (Counter(), Counter())
    for ours, theirs in sides.values():
        if ours.total() + theirs.total() >= FEWEST:
            yield ours, theirs
        else:
            rest[0].update(ours)
            rest[1].update(theirs)
    yield rest


def halves(draws: Sequence[Draws]) -> list[Draws]:
    """The baseline against itself: every other of its answers."""
    return [Draws(one.theirs[::2], one.theirs[1::2]) for one in draws]


def against_itself(draws: Sequence[Draws], first: int, length: int, bias: float, unit: str, alpha: float) -> Check:
    """The same tests between two halves of the baseline's answers."""
    tests = [one for one in two_samples(halves(draws), first, length, bias, unit) if one.freedom]
    if not tests:
        return Check("the baseline against itself", None, note="too few draws for a test")
    p_value = holm([one.p_value for one in tests])
    note = f"{len(tests)} tests, adjusted p = {p_value:.2g}"
    return Check("the baseline against itself", p_value >= alpha, p_value=p_value, note=note)


def by_logprobs(
    answers: Sequence[Answer], params: SamplingParams, top: int, *, raw: bool, bias: float, first: int
) -> list[SampledTest]:
    """The tokens from position ``first`` on against the log-probabilities that the engine returned with them.

    Where the probability of all other tokens is known as well (temperature 1, or processed log-probabilities), they are
    one more cell. Else a token among the ``top`` is tested given that it is one of them, and the number of the others
    against the most that there can be.
    """
    temperature = params.temperature if raw else 1.0
    cells = len(RANKS) + 1
    observed, expected = np.zeros(cells), np.zeros(cells)
    others, most, left_out = 0, 0.0, 0
    for one in answers:
        for token, row in list(zip(one.tokens, one.top or (), strict=False))[first:]:
            weights = _weights(row, top, temperature)
            if weights is None:
                left_out += 1
                continue
            ranks, rest, bound = weights
            if temperature == 1.0:
                observed[ranks.cell(token)] += 1
                ranks.add_to(expected, 1.0 - rest)
                expected[-1] += rest
            else:
                most += bound
                if token in ranks.order:
                    observed[ranks.cell(token)] += 1
                    ranks.add_to(expected, 1.0)
                else:
                    others += 1
    p_value, freedom = g_test(observed, expected, bias)
    drawn = int(observed.sum())
    kind = "raw" if raw else "processed"
    note = f"{_apart(observed, expected)}, {kind} log-probabilities, {top} most likely tokens"
    note += f", {left_out} contexts left out: two tokens share a text" if left_out else ""
    found = [SampledTest("rank by the engine's log-probabilities", p_value, freedom, drawn, note)]
    if temperature < 1.0 and drawn + others:
        tail = float(stats.poisson.sf(others - 1, most)) if others else 1.0
        note = f"{others} of {drawn + others} tokens, {most:.3g} expected at most"
        found.append(SampledTest(f"tokens beyond the {top} most likely", tail, 1, 0, note))
    return found


def _apart(observed: np.ndarray, expected: np.ndarray) -> str:
    """How many tokens, and how far the shares of the cells are from the expected ones: a lower bound of the bias."""
    drawn = max(1.0, float(observed.sum()))
    size = 0.5 * float(np.abs(observed - expected).sum()) / drawn
    shares = f"the most likely one drawn {observed[0] / drawn:.1%} of the time, {expected[0] / drawn:.1%} expected"
    return f"{int(observed.sum())} tokens, ranks {size:.2g} apart (total variation); {shares}"


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The listed tokens in order, with their shares among themselves."""

    order: dict[Token, int]
    shares: np.ndarray

    def cell(self, token: Token) -> int:
        rank = self.order.get(token)
        return len(RANKS) if rank is None else _cell(rank + 1)

    def add_to(self, expected: np.ndarray, total: float) -> None:
        for rank, share in enumerate(self.shares):
            expected[_cell(rank + 1)] += total * share


def _cell(rank: int) -> int:
    return int(np.searchsorted(RANKS, rank, side="right")) - 1


def _weights(row: Top, top: int, temperature: float) -> tuple[_Ranks, float, float] | None:
    """The ranks, the probability of all tokens that are not listed (at temperature 1), and the most that it can be at
    this temperature. None where texts of tokens collide, so that probability is missing."""
    order = likeliest(row, top)
    if len(row) < top and sum(map(math.exp, row.values())) < 0.999:
        return None
    logs = np.array([row[one] for one in order])
    p = np.exp(logs)
    rest = float(max(0.0, 1.0 - p.sum()))
    tempered = np.exp((logs - logs[0]) / temperature)
    total = float(tempered.sum())
    # No other token is likelier than the last one listed: that bounds the sum of their powers.
    bound = 0.0
    if temperature < 1.0 and rest > 0.0:
        bound = rest * math.exp(float(logs[-1]) * (1.0 / temperature - 1.0) - float(logs[0]) / temperature)
    shares = tempered / total if temperature != 1.0 else p / p.sum()
    return _Ranks({one: at for at, one in enumerate(order)}, shares), rest, bound / (total + bound)


def by_target(
    answers: Mapping[tuple[int, ...], Sequence[Sequence[int]]],
    target: Target,
    params: SamplingParams,
    *,
    bias: float,
    first: int,
) -> list[SampledTest]:
    """Answers by prompt against the processed distributions of outpace's own target of the same weights."""
    tally = Tally(len(RANKS))
    for prompt, found in answers.items():
        with prefilled(target, prompt, (), replace(params, seed=None)) as sequence:
            for tokens in found:
                tree = TokenTree.chain(tokens[:-1])
                scores = target.score([(sequence, tree)])[0]
                for node, token in list(zip((ROOT, *range(len(tree))), tokens, strict=True))[first:]:
                    p = scores.p(node).cpu()
                    tally.add(rank_cells(p), p, token)
    p_value, freedom = g_test(tally.observed, tally.expected, bias)
    note = _apart(tally.observed, tally.expected)
    return [SampledTest("rank by the target's probabilities", p_value, freedom, tally.samples, note)]
