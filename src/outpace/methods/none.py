"""Autoregressive decoding: the drafter that drafts nothing, the baseline of every comparison."""

from __future__ import annotations

from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.methods.registry import Context, NoSettings, Parts, register
from outpace.targets.base import Sequence


class NoDraft(Drafter[None]):
    """Drafts empty trees."""

    def begin(self, sequence: Sequence) -> None:
        return None

    def propose(self, state: None, budget: Budget) -> TokenTree:
        return TokenTree()


@register(
    "none",
    family="baseline",
    paper="-",
    summary="Autoregressive decoding: one token per forward pass, without a draft.",
    when_to_use="Texts whose draft tokens are hardly ever accepted, and batches that already use the whole "
    "machine: there every draft token costs time.",
    aliases=("autoregressive", "baseline", "plain", "greedy", "off"),
)
def build(context: Context, settings: NoSettings) -> Parts:
    """Autoregressive decoding has no settings."""
    return Parts(NoDraft(), Fixed(0))
