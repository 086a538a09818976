"""How a sampled draft token is drawn: with the drafter's own numbers, or with noise that it shares with the rule."""

from __future__ import annotations

from outpace.core.chance import Chance
from outpace.core.token_distribution import TokenDistribution
from outpace.targets.base import Sequence


def draft_token(sequence: Sequence, ahead: int, q: TokenDistribution, chance: Chance) -> int:
    """A token drawn from ``q`` to stand after the committed tokens and ``ahead`` drafted ones.

    ``chance`` is the drafter's own; it is not asked where the request's rule shares its noise. A drafter that draws all
    its tokens like this declares ``Proposal.shares_noise``.
    """
    if sequence.noise is None:
        return chance.categorical(q)
    return sequence.noise.at(sequence.chance, len(sequence.tokens) + ahead).race(q.dense())
