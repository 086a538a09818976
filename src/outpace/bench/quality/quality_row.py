"""The figures of ``outpace bench --quality`` in a method's row: each is defined here, from the prompts' sums.

========================== =========================================================================================
nll                        negative log-likelihood of the answers under the target, nats per token
excess_nll                 nll minus that of autoregressive decoding's answers to the same prompts (its samples above
                           temperature 0, the greedy answers at 0)
excess_nll_ci95            its 95 % interval: paired bootstrap over prompts
tv                         total variation between what a token is committed from and the target's distribution after
                           the same tokens, mean over tokens, of which some of each answer are looked at; at temperature
                           0 the share of tokens that are not the target's first choice, of lossless rules without near
                           ties, which rounding decides; null where it cannot be computed at one that is looked at
tv_ci95                    its 95 % interval: bootstrap over prompts
near_ties                  share of tokens that are not the target's first choice, but as near to it as rounding
                           reaches; of autoregressive decoding what rounding alone gives; null above temperature 0
edit_distance              tokens to insert, delete or replace to get from the greedy answer, over the longer one's
                           tokens; null above temperature 0
score                      share of the scored answers that are right; of: their number
score_ci95                 its 95 % interval (Wilson 1927)
score_difference           score minus that of autoregressive decoding on the same prompts
score_difference_ci95      its 95 % interval for paired shares (Agresti and Min 2005)
smallest_difference        the smallest difference that this sample would show with a power of 80 %
unanswered, cut_off        scored answers without a final answer, and those that reached the length limit
========================== =========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outpace.bench.quality.prompt_quality import PromptQuality
from outpace.bench.statistics import (
    Rate,
    difference_interval,
    paired_share_interval,
    rate_interval,
    share_interval,
    smallest_share_difference,
    total_rate,
)

EMPTY: dict[str, Any] = {
    "excess_nll": None,
    "tv": None,
    "score": None,
    "score_ci95": None,
    "of": None,
    "nll": None,
    "excess_nll_ci95": None,
    "tv_ci95": None,
    "near_ties": None,
    "edit_distance": None,
    "score_difference": None,
    "score_difference_ci95": None,
    "smallest_difference": None,
    "unanswered": None,
    "cut_off": None,
}


def quality_row(
    ours: Mapping[str, PromptQuality],
    reference: Mapping[str, PromptQuality],
    *,
    lossless: bool,
    greedy: bool,
    baseline: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """One row's ``quality``; what was not measured is None. ``baseline``: the row is the reference itself."""
    both = [(ours[name], reference[name]) for name in ours if name in reference]
    found = {
        **EMPTY,
        "nll": total_rate(_nll(one) for one in ours.values()),
        "near_ties": total_rate((one.near_ties, one.tokens) for one in ours.values()) if greedy else None,
        "edit_distance": total_rate((one.edits, one.longest) for one in ours.values()),
    }
    # Above temperature 0 that of a lossless rule is 0 by its certificate; nothing is measured.
    if lossless and not greedy and ours:
        found["tv"] = 0.0
    elif varied := _varied(list(ours.values()), lossless, greedy):
        found |= {"tv": total_rate(varied), "tv_ci95": rate_interval(varied, seed=seed)}
    ours_nll, theirs_nll = [_nll(one) for one, _ in both], [_nll(one) for _, one in both]
    mine, plain = total_rate(ours_nll), total_rate(theirs_nll)
    if mine is not None and plain is not None:
        found["excess_nll"] = mine - plain
        found["excess_nll_ci95"] = difference_interval(ours_nll, theirs_nll, seed=seed)
    scored = [one for one in ours.values() if one.right is not None]
    if scored:
        right = sum(bool(one.right) for one in scored)
        found |= {
            "score": right / len(scored),
            "score_ci95": share_interval(right, len(scored)),
            "of": len(scored),
            "unanswered": sum(not one.answered for one in scored),
            "cut_off": sum(one.cut_off for one in scored),
        }
    pairs = [(bool(one.right), bool(other.right)) for one, other in both if None not in (one.right, other.right)]
    if pairs and not baseline:
        gained, lost = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
        found |= {
            "score_difference": (gained - lost) / len(pairs),
            "score_difference_ci95": paired_share_interval(gained, lost, len(pairs)),
            "smallest_difference": smallest_share_difference(gained, lost, len(pairs)),
        }
    return found


def _nll(one: PromptQuality) -> Rate:
    return one.nll, one.tokens


def _varied(prompts: Sequence[PromptQuality], lossless: bool, greedy: bool) -> list[Rate]:
    """Of each prompt the total variation of its tokens together, and their number; none where it is not known."""
    if greedy:
        # A lossy rule may commit a near tie by its settings: all of these count.
        return [(one.not_first + (0 if lossless else one.near_ties), one.tokens) for one in prompts]
    # The nodes that are left would not stand for those where drafts were judged: leaves and last tokens are exact.
    if any(one.tv_lost for one in prompts):
        return []
    # As many nodes are measured of a short answer as of a long one.
    return [(one.tokens * one.tv / one.tv_nodes, one.tokens) for one in prompts if one.tv_nodes]
