"""Loosely speculative decoding (FLy: Li et al. 2025, arXiv 2511.22972): a mismatch may stand that later tokens confirm.

Draft tokens are verified exactly: by recursive rejection, and at temperature 0 by the greedy walk. Where that rejects
all of a node's draws, two tests decide whether one of them stands nevertheless (the first that passes): the entropy
of the target's distribution there, divided by log V, is at least ``entropy``, so that several tokens are plausible;
and the next ``window`` draft tokens after it are accepted exactly, so that the target continues with it as it is. A
draft that ends before the window does, or a second mismatch within it, rejects the first one. The paper's drafter, a
draft model sped up by n-grams, is method ``hsd`` with ``inner=pld``.

Promise: none. Which tokens stand does not depend on their own probability, so the committed token's distribution at a
node may be anything that the drafter proposes there. ``outpace certify`` measures whole outputs instead. With
``entropy`` 1 no mismatch stands, and the rule is lossless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from typing import ClassVar

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.acceptance.bounds import view
from outpace.acceptance.draws import draws_by_parent
from outpace.acceptance.lossy import Corners, LossyRule, exact_token
from outpace.acceptance.rejection import RecursiveRejection
from outpace.core.chance import Chance
from outpace.core.tree import ROOT, Draw
from outpace.core.validation import StrictModel
from outpace.targets.base import TreeScores

_EXACTLY = RecursiveRejection()


class FlySettings(StrictModel):
    """Settings of ``fly``."""

    entropy: float = Field(
        0.3, ge=0, le=1, description="least entropy, divided by log V, at which a mismatch may stand; 1 is lossless"
    )
    window: int = Field(6, ge=0, description="how many draft tokens after a mismatch must be accepted for it to stand")


class Fly(LossyRule[FlySettings]):
    """Lets a rejected draft token stand where the target is uncertain and accepts the draft tokens after it."""

    name = "fly"
    aliases: tuple[str, ...] = ("loosely-speculative",)
    paper = "Li et al. 2025, arXiv 2511.22972"
    Settings = FlySettings
    corners: ClassVar[Corners] = ({}, {"entropy": 1.0}, {"entropy": 0.0, "window": 0}, {"entropy": 0.3, "window": 1})

    @property
    def bound(self) -> None:
        return None

    @property
    def exact(self) -> bool:
        return self.settings.entropy == 1.0

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        draws_at = draws_by_parent(scores.tree)
        path: list[int] = []
        while True:
            node = path[-1] if path else ROOT
            chosen = self._exactly(scores, draws_at, node, chance)
            if isinstance(chosen, Draw):
                path.append(chosen.node)
                continue
            stands = self._standing(scores, draws_at, node, chance)
            if not stands:
                return Verdict(tuple(path), chosen)
            path += stands

    def _exactly(self, scores: TreeScores, draws_at: Mapping[int, Seq[Draw]], node: int, chance: Chance) -> Draw | int:
        """The draw that exact verification accepts after ``node``, or the token to end with."""
        draws = draws_at.get(node)
        if scores.sequence.params.greedy:
            token = scores.argmax(node)
            return next((draw for draw in draws or () if draw.token == token), token)
        return (
            _EXACTLY.choose(scores.tree, draws, scores.distribution.at(node), chance)
            if draws
            else exact_token(scores, node, chance)
        )

    def _standing(self, scores: TreeScores, draws_at: Mapping[int, Seq[Draw]], node: int, chance: Chance) -> list[int]:
        """A rejected draw after ``node`` that stands, and the nodes of its window; none where no draw stands."""
        draws = draws_at.get(node)
        if not draws or self.exact or scores.distribution.failure(node) is not None:
            return []
        seen = view(scores, node)
        if seen.entropy < self.settings.entropy * math.log(len(seen.probs)):
            return []
        for child in dict.fromkeys(draw.node for draw in draws if float(seen.probs[draw.token]) > 0.0):
            stands = [child]
            while len(stands) <= self.settings.window:
                chosen = self._exactly(scores, draws_at, stands[-1], chance)
                if not isinstance(chosen, Draw):
                    break
                stands.append(chosen.node)
            else:
                return stands
        return []
