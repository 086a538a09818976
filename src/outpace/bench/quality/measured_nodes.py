"""Which nodes of an answer's rounds are measured: drawn evenly among its committed tokens, while it is decoded."""

from __future__ import annotations

import random
from dataclasses import replace

from outpace.core.tree import TokenTree
from outpace.engine.request import RoundTrace

NODES = 4
"""Nodes of an answer that are measured."""


class MeasuredNodes:
    """A reservoir (Vitter 1985, algorithm R): at any time each token so far is in it with the same probability.

    The trees of rounds without a node in it are dropped: with the rows that draft tokens were drawn from, those of one
    answer take tens of megabytes. ``places``: (round, depth of the committed token).
    """

    def __init__(self, seed: int | str) -> None:
        self.places: list[tuple[int, int]] = []
        self._random = random.Random(seed)
        self._rounds = self._tokens = 0

    def follow(self, rounds: list[RoundTrace]) -> None:
        """Read the rounds that are new, and drop the trees that are not needed."""
        held = {at for at, _ in self.places}
        for at in range(self._rounds, len(rounds)):
            held.add(at)
            for depth in range(len(rounds[at].committed)):
                self._tokens += 1
                if len(self.places) < NODES:
                    self.places.append((at, depth))
                elif (slot := self._random.randrange(self._tokens)) < NODES:
                    self.places[slot] = at, depth
        self._rounds = len(rounds)
        for at in held - {at for at, _ in self.places}:
            rounds[at] = replace(rounds[at], tree=TokenTree(), path=())
