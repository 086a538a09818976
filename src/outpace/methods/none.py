"""Plain autoregressive decoding: the drafter that drafts nothing, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.methods.registry import Context, NoSettings, Parts, register
from outpace.targets.base import Sequence


class NoDraft(Drafter):
    """Empty trees."""

    def rewind(self, sequence: Sequence, kept: int) -> None:
        """It knows nothing to forget."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        return [TokenTree() for _ in sequences]


@register(
    "none",
    family="baseline",
    paper="-",
    summary="Plain decoding, one token a forward.",
    when_to_use="Where nothing can be foreseen, and in batches that fill the machine: every row has its price there.",
)
def build(context: Context, settings: NoSettings) -> Parts:
    """Plain decoding has no settings."""
    return Parts(NoDraft(), Fixed(0))
