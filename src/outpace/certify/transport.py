"""The optimal-transport bound: how much any lossless rule could accept of one node's draws, for small vocabularies.

A rule that sees the set S of tokens drawn after a node and must put out y ~ p is a coupling of S and y; its acceptance
is P(y in S). The best coupling is the solution of a linear program (Sun et al. 2023, arXiv 2310.15141, section 4).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations, product

import numpy as np
from scipy.optimize import linprog


def draw_sets(q: np.ndarray, draws: int, replacement: bool) -> dict[frozenset[int], float]:
    """The distribution of the set of tokens drawn, ``draws`` of them from ``q`` (V,), with or without replacement."""
    proposal_distribution: dict[frozenset[int], float] = defaultdict(float)
    support = [token for token in range(len(q)) if q[token] > 0]
    draws = draws if replacement else min(draws, len(support))
    ordered = product(support, repeat=draws) if replacement else permutations(support, draws)
    for sequence in ordered:
        weight, left = 1.0, 1.0
        for token in sequence:
            weight *= q[token] / left
            left -= 0.0 if replacement else q[token]
        proposal_distribution[frozenset(sequence)] += weight
    return dict(proposal_distribution)


def optimal_acceptance(p: np.ndarray, proposal_distribution: dict[frozenset[int], float]) -> float:
    """The largest P(y in S) of any coupling of y ~ ``p`` (V,) with S ~ ``proposal_distribution``."""
    sets = list(proposal_distribution)
    flows = [(number, token) for number, drawn in enumerate(sets) for token in sorted(drawn)]
    constraints = np.zeros((len(sets) + len(p), len(flows)))
    for column, (number, token) in enumerate(flows):
        constraints[number, column] = 1.0
        constraints[len(sets) + token, column] = 1.0
    limits = np.concatenate([[proposal_distribution[drawn] for drawn in sets], p])
    solved = linprog(-np.ones(len(flows)), A_ub=constraints, b_ub=limits, bounds=(0, None), method="highs")
    return float(-solved.fun)


def draws_bound(p: np.ndarray, q: np.ndarray, draws: int = 1, replacement: bool = True) -> float:
    """:func:`optimal_acceptance` of ``draws`` tokens from ``q`` (V,), for any V; without replacement of 1 or 2.

    By max-flow min-cut it is the smallest 1 + p(H) - P(all draws are in H) over sets H of tokens, and the smallest one
    holds the tokens with the smallest p / q (Hu et al. 2025, arXiv 2502.18779, section 3): V + 1 sets are looked at.
    Raises ValueError for more draws without replacement.
    """
    order = np.argsort(np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0))
    p, q = p[order], q[order]
    inside = np.minimum(1.0, q.cumsum())
    if replacement or draws == 1:
        drawn = inside**draws
    elif draws == 2:
        odds = np.divide(q, 1.0 - q, out=np.zeros_like(q), where=q < 1.0)
        drawn = inside * odds.cumsum() - (q * odds).cumsum()
        if q.max() == 1.0:  # nothing else can be drawn
            drawn = inside
    else:
        raise ValueError(f"{draws} draws without replacement have no short form; see optimal_acceptance")
    return float(min(1.0, 1.0 + (p.cumsum() - drawn).min()))
