"""The statistical level: a real model, its own prompts, and tests of what was put out against what p says.

Every prompt is decoded many times to the same short length, so that no token is left out for how it came about. Given
its prefix each output token is a draw from the round's own p (float32), whatever the rounds were; so over many contexts
the tokens' ranks under p follow the sums of p by rank, and their ids the sums by id, where numbers that drafter and
rule share would show. For first tokens the place by q / p, or whether it is a drafted token, is tested as well, which
is where a wrong rule shows first. Rare cells are pooled, p-values adjusted for their number. Whether p itself is that
of autoregressive decoding is found by rescoring (:mod:`outpace.certify.rescoring`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule, Verdict
from outpace.certify.certificate import Certificate, Check, Rescored
from outpace.certify.fit import detectable_bias, g_test, holm
from outpace.certify.rescoring import PREFIXES, PrefixSample
from outpace.core.chance import Chance
from outpace.core.sampling import SamplingParams
from outpace.core.tree import DETERMINISTIC, ROOT
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.targets.base import Target, TreeScores

RANKS = (1, 2, 3, 4, 6, 10, 20, 50)
"""Cells of the rank test: from each rank to before the next, the last open."""
IDS = 4
"""Ranges of the vocabulary in the test of ids, each split into even and odd."""
RATIOS = (-2.0, -1.0, -0.5, -0.1, 0.1, 0.5, 1.0, 2.0)
"""Cell limits of log(q / p) for the first token."""


class Tally:
    """Observed and expected counts of one partition of the vocabulary, over many contexts."""

    def __init__(self, cells: int) -> None:
        self.observed, self.expected = np.zeros(cells), np.zeros(cells)
        self.samples = 0

    def add(self, cell_of: Tensor, p: Tensor, token: int) -> None:
        """One draw ``token`` of ``p``, the vocabulary being split by ``cell_of`` (V,)."""
        self.observed[int(cell_of[token])] += 1
        self.expected += torch.bincount(cell_of, weights=p.double(), minlength=len(self.expected)).numpy()
        self.samples += 1


@dataclass(eq=False)
class Recorder(AcceptanceRule):
    """The rule under test, noting besides its verdict p at every node of the path, and rows for ``prefixes``."""

    rule: AcceptanceRule
    prefixes: PrefixSample
    rows: list[tuple[Tensor, int]] = field(default_factory=list)
    first: list[tuple[Tensor, Tensor | None, tuple[int, ...], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name, self.paper, self.lossless = self.rule.name, self.rule.paper, self.rule.lossless
        self.takes_trees, self.takes_sampled = self.rule.takes_trees, self.rule.takes_sampled
        self.takes_without_replacement = self.rule.takes_without_replacement
        self.takes_unverified_draws = self.rule.takes_unverified_draws

    def begin(self, sequence: Any) -> Any:
        return self.rule.begin(sequence)

    def accept(self, scores: Sequence[TreeScores], states: Sequence[Any], chances: Sequence[Chance]) -> list[Verdict]:
        verdicts = self.rule.accept(scores, states, chances)
        for one, verdict in zip(scores, verdicts, strict=True):
            self.prefixes.offer(one)
            tokens = [*(one.tree.tokens[node] for node in verdict.path), verdict.token]
            for node, token in zip((ROOT, *verdict.path), tokens, strict=True):
                self.rows.append((one.p(node).cpu(), token))
            if len(one.sequence.tokens) == one.sequence.prompt_length:
                draws = [draw for draw in one.tree.draws if draw.parent == ROOT]
                sampled = [draw.q_row for draw in draws if draw.q_row != DETERMINISTIC]
                q = one.tree.q_rows[sampled[0]].dense(len(one.p(ROOT))).cpu() if sampled else None
                certain = tuple(draw.token for draw in draws if draw.q_row == DETERMINISTIC)
                self.first.append((one.p(ROOT).cpu(), q, certain, tokens[0]))
        return verdicts


def rank_cells(p: Tensor) -> Tensor:
    """The cell of every token by its rank under ``p`` (V,)."""
    order = p.argsort(descending=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(1, len(p) + 1)
    return torch.bucketize(ranks, torch.tensor(RANKS), right=True) - 1


def id_cells(p: Tensor) -> Tensor:
    """The cell of every token by its id."""
    ids = torch.arange(len(p))
    return ids * IDS // len(p) * 2 + ids % 2


def certify_statistical(
    method: Method,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int = 2000,
    length: int = 6,
    alpha: float = 0.01,
    seed: int = 0,
    params: SamplingParams | None = None,
    batch: int = 8,
    rescored: int = PREFIXES,
    on_progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Decode about ``samples`` output tokens and test them against the target's own distribution.

    ``params`` must sample (temperature > 0); the default is temperature 1. Of the prefixes that were scored on the way
    ``rescored`` are scored again, each alone.
    """
    params = params or SamplingParams(temperature=1.0)
    tallies = {"rank": Tally(len(RANKS)), "token id": Tally(2 * IDS)}
    tallies["first token by q / p"] = Tally(len(RATIOS) + 1)
    tallies["first token drafted"] = Tally(2)
    rng = random.Random(seed)
    prefixes = PrefixSample(target, params, rescored, seed)
    done, drafted = 0, 0
    while done < samples:
        recorder = Recorder(method.rule_for(params), prefixes)
        recorded = replace(method, rule=recorder)
        decoder = Decoder(target)
        running = []
        for prompt in rng.choices(list(prompts), k=batch):
            drawn = replace(params, seed=rng.getrandbits(48))
            running.append(decoder.submit(Request(tuple(prompt), recorded, drawn, max_new_tokens=length)))
            running[-1].rule = recorder  # whatever the parameters, this rule judges
        decoder.run()
        for one in running:
            one.raise_error()
        _count(recorder, tallies)
        done += batch * length
        drafted += sum(one.metrics.drafted for one in running)
        if on_progress is not None:
            on_progress(min(done, samples), samples)
    certificate = _conclude(method, tallies, drafted, alpha, prefixes.rescore())
    return replace(certificate, sampling=params.described)


def _count(recorder: Recorder, tallies: dict[str, Tally]) -> None:
    """Rank and id of every token; place by q / p, or drafted or not, of first tokens."""
    for p, token in recorder.rows:
        tallies["rank"].add(rank_cells(p), p, token)
        tallies["token id"].add(id_cells(p), p, token)
    for p, q, certain, token in recorder.first:
        if q is not None:
            ratio = (q.clamp(min=1e-12) / p.clamp(min=1e-12)).log()
            tallies["first token by q / p"].add(torch.bucketize(ratio, torch.tensor(RATIOS)), p, token)
        if certain:
            cells = torch.zeros(len(p), dtype=torch.long)
            cells[list(certain)] = 1
            tallies["first token drafted"].add(cells, p, token)


def _conclude(method: Method, tallies: dict[str, Tally], drafted: int, alpha: float, rescored: Rescored) -> Certificate:
    checks, sizes = [], []
    for name, tally in tallies.items():
        p_value, freedom = g_test(tally.observed, tally.expected)
        if freedom:
            checks.append(Check(name, None, p_value=p_value, note=f"{tally.samples} tokens"))
            sizes.append((tally.samples, freedom))
    adjusted = holm([check.p_value for check in checks if check.p_value is not None]) if checks else None
    power = [detectable_bias(size, freedom, alpha / len(checks)) for size, freedom in sizes]
    bias = max((one for one in power if one is not None), default=None)
    lossless: bool | None = True
    if not rescored.passed:
        lossless, verdict = False, f"not lossless: {rescored}"
    elif adjusted is None:
        lossless, verdict = None, "inconclusive: too few samples for any test"
    elif adjusted < alpha:
        worst = min(checks, key=lambda check: check.p_value or 0.0)
        lossless, verdict = False, f"not lossless: the test '{worst.name}' rejects, adjusted p = {adjusted:.2g}"
    elif not drafted and method.may_draft:
        lossless, verdict = None, "inconclusive: the method drafted nothing on these prompts"
    else:
        tested = f"{len(checks)} tests, adjusted p = {adjusted:.2g}"
        verdict = f"no bias above {bias:.3g} (total variation) in {tested}; {rescored}"
    return Certificate(
        method.name,
        "statistical",
        lossless,
        verdict,
        p_value=adjusted,
        detectable_bias=bias,
        rescored=rescored,
        checks=tuple(checks),
    )
