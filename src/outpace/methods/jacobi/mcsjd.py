"""Speculative Jacobi decoding with coupled redraws: Jacobi iteration on samples.

A window of draft tokens follows the last committed one, each drawn from the target's own distribution as it was after
the draft tokens before it in the previous round. The round's forward gives newer distributions; the window is verified
from the left by rejection, and what the verdict did not reach is drawn again from the newer ones. Drawn independently
(speculative Jacobi decoding, Teng et al. 2024, arXiv 2410.01699) a token changes although its distribution hardly did,
and with it every context behind it. MC-SJD (So et al. 2025, arXiv 2510.24211) couples the new token with the old one,
maximally or by Gumbel noise, so that the window settles. At temperature 0 it is Jacobi decoding (``jacobi.py``).

Why the output has the target's distribution. Take one position, and condition on everything that happened at the
positions before it, in all rounds: the draft tokens there, the verdicts on them, the random numbers that decided them.
This fixes which distributions the position was drawn from, in which rounds, and in which round it is judged: a row
depends on the draft tokens before it alone, and rejection judges a draw without a look at later ones. Its first draw is
distributed as its row; a coupled redraw turns a draw from the old row into a draw from the new one, with random numbers
that no other position uses; so what is judged in the end is a draw from the very row that it is judged with. This holds
as long as no decision about a position (to keep it, to cut the window before it, to start afresh) depends on its own
token or on later ones. For that reason the redraw is conditioned on the draft tokens as they were scored, the rejected
one included, and not on the recovered token.

In a combination, no other part may learn from scored draft tokens that were not committed and draft from them: that
would reveal the token at a later position.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from outpace.acceptance.couplings import gumbel_redraw, maximal_redraw
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.validation import StrictModel
from outpace.drafting.jacobi_window import (
    OLDEST,
    FirstGuesses,
    GuessSetting,
    Iterated,
    PadSetting,
    RestartSetting,
    Slot,
    first_guesses,
)
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, TreeScores

if TYPE_CHECKING:
    from torch import Tensor

Coupling = Literal["maximal", "gumbel", "independent"]


class CoupledJacobi(Iterated):
    """A window of samples, redrawn where it was not reached.

    A guess's kind is the number of rounds that its position has been iterated. It does not depend on the token: it may
    be known before the token is drawn.
    """

    proposal = Proposal(sampled=True, keeps_unverified_draws=True)

    def __init__(self, window: int, coupling: Coupling, first: FirstGuesses, *, restart: bool = True) -> None:
        super().__init__(first, restart=restart)
        self.window, self.coupling = window, coupling

    def size(self, sequence: Sequence) -> int:
        return self.window

    def renew(self, slot: Slot | None, scores: TreeScores, node: int) -> Slot:
        age = 0 if slot is None else min(max(slot.kind, -1) + 1, OLDEST)
        if scores.sequence.params.greedy:
            return Slot(scores.argmax(node), age)
        # Drawn when it is needed: the window may not be asked for again.
        p = scores.p(node)
        return Slot(None, age, p=p) if slot is None else Slot(slot.token, age, slot.q, p)

    def settle(self, sequence: Sequence, slots: Seq[Slot]) -> None:
        chance = sequence.chance.at(len(sequence.tokens), f"{self.purpose}/redraw")
        for slot in slots:
            if slot.p is not None:
                slot.token = self._redraw(slot, slot.p, chance)
                slot.q, slot.p = QRow(slot.p), None

    def _redraw(self, slot: Slot, p: Tensor, chance: Chance) -> int:
        # A deterministic token is coupled maximally with a fresh draw: they agree with probability p(token).
        if slot.token is None or slot.q is None or self.coupling == "independent":
            return chance.categorical(p)
        redraw = maximal_redraw if self.coupling == "maximal" else gumbel_redraw
        return redraw(p, slot.q.dense(len(p)), slot.token, chance)


class CoupledSettings(StrictModel):
    """Settings of ``mcsjd``."""

    window: int = Field(3, ge=0, le=512, description="draft tokens per round")
    coupling: Coupling = Field(
        "maximal", description="coupling of a new draw with the old one: maximal, gumbel, or independent (plain SJD)"
    )
    guess: GuessSetting = "lookup"
    pad: PadSetting = 0
    restart: RestartSetting = True


@register(
    "mcsjd",
    family="jacobi",
    paper="So et al. 2025, arXiv 2510.24211; Teng et al. 2024, arXiv 2410.01699",
    summary="Jacobi decoding with samples: draft tokens that were not reached are redrawn, coupled with the old ones.",
    when_to_use="When a forward pass over a few rows costs no more than over one row and neighboring tokens "
    "depend little on each other, as in images. On text few draws are accepted.",
    aliases=("sjd",),
    tiny={"window": 2},
)
def build(context: Context, settings: CoupledSettings) -> Parts:
    """Speculative Jacobi decoding."""
    first = first_guesses(settings.guess, settings.pad, context.target.vocab_size)
    drafter = CoupledJacobi(settings.window, settings.coupling, first, restart=settings.restart)
    return Parts(drafter, Fixed(settings.window, max_nodes=settings.window))
