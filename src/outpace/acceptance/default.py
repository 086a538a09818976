"""The rule that a method gets when nobody chooses: the best lossless one for its kind of tree, by accepted length.

``python benchmarks/rules.py`` measures all of them on the same trees; LOG.md has the table. Bottom-up rules accept
more than top-down ones wherever draws are sampled. For deterministic draft tokens all of them accept alike, and
recursive rejection reads p only along the path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.block import Block
from outpace.acceptance.rejection import RecursiveRejection
from outpace.acceptance.traversal import Traversal
from outpace.acceptance.univer import UniVer

if TYPE_CHECKING:
    from outpace.core.proposal import Proposal


def default_rule(proposal: Proposal) -> AcceptanceRule:
    """A lossless rule that takes ``proposal``."""
    if not proposal.sampled or proposal.keeps_unverified_draws:
        return RecursiveRejection()
    if not proposal.tree:
        return Block()
    return UniVer() if proposal.one_sampled_sibling else Traversal()
