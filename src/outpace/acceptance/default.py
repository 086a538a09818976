"""The rule that a method gets when nobody chooses: the best lossless one for its kind of tree, by accepted length.

Bottom-up rules accept more than top-down ones wherever draws are sampled (``python benchmarks/rules.py``; LOG.md). For
deterministic draft tokens all of them accept alike, and recursive rejection reads p only along the path.
"""

from __future__ import annotations

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.block import Block
from outpace.acceptance.rejection import RecursiveRejection
from outpace.acceptance.traversal import Traversal
from outpace.acceptance.univer import UniVer
from outpace.core.proposal import Proposal


def default_rule(proposal: Proposal) -> AcceptanceRule:
    """A lossless rule that takes ``proposal``."""
    if not proposal.sampled or proposal.keeps_unverified_draws:
        return RecursiveRejection()
    if not proposal.tree:
        return Block()
    return UniVer() if proposal.one_sampled_sibling else Traversal()
