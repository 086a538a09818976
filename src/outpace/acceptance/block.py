"""Block verification of chains (Sun et al. 2024, arXiv 2403.10444, algorithm 2): the longest accepted prefix first."""

from __future__ import annotations

from outpace.acceptance.traversal import Traversal


class Block(Traversal):
    """Block verification of chains: longest accepted prefix first. Lossless; optimal accepted length for a chain."""

    name = "block"
    paper = "Sun et al. 2024, arXiv 2403.10444"
    takes_trees = False
