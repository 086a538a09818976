"""Jacobi decoding: greedy decoding as a system of equations, solved for many positions at once.

Every token is the target's choice after the tokens before it: as many equations as tokens. Santilli et al. (2023,
arXiv 2305.10427) solve them by fixed-point iteration: guess all tokens, replace each by the target's choice after the
guesses before it, all in one forward, until nothing changes.

Here the guesses are a draft chain. Those that the target confirms are committed in every round; its choice after each
guess that was not reached is the next guess for the following position. The first equation is solved in every round, so
it never takes more rounds than autoregressive decoding. The method is lossless at any temperature: guesses depend on
earlier rounds alone, so that rejection judges them as deterministic draft tokens.

Their three algorithms, as ``mode``:

- ``jacobi`` (PJ): one system. ``window`` positions of it are iterated, those right after the last token; with a window
  as long as the answer it is the paper's.
- ``gs`` (PGJ, Gauss-Seidel-Jacobi): blocks of ``block`` tokens; the next is begun when one is solved. The first token
  of a block follows from what is solved, so that at most ``block - 1`` guesses are drafted.
- ``hybrid`` (HGJ): such blocks for the first ``window`` tokens of the answer, autoregressive decoding after them.

The paper's first guess is a padding token (``guess=pad``, ``restart=false`` is the paper's algorithm). A copy of what
followed the last tokens earlier in the text is right more often, also than most iterated guesses: those were made after
a token that turned out wrong.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.controllers.fixed import Fixed
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

Mode = Literal["jacobi", "gs", "hybrid"]


class Jacobi(Iterated):
    """Guesses are the target's choices after earlier guesses: a deterministic chain. Their kind is for how many rounds
    they have stayed the same."""

    learns_from_rejected = True

    def __init__(self, mode: Mode, window: int, block: int, first: FirstGuesses, *, restart: bool = True) -> None:
        super().__init__(first, restart=restart)
        self.mode, self.window, self.block = mode, window, block

    def size(self, sequence: Sequence) -> int:
        written = len(sequence.tokens) - sequence.prompt_length
        if self.mode == "jacobi":
            return self.window
        unsolved = self.block - written % self.block
        if self.mode == "hybrid":
            unsolved = min(unsolved, self.window - written)
        return unsolved - 1

    def renew(self, slot: Slot | None, scores: TreeScores, node: int) -> Slot:
        token = scores.argmax(node)
        same = slot is not None and slot.token == token
        return Slot(token, min(max(slot.kind, 0) + 1, OLDEST) if slot is not None and same else 0)


class JacobiSettings(StrictModel):
    """Settings of ``jacobi``."""

    mode: Mode = Field(
        "jacobi",
        description="one moving window (jacobi), consecutive blocks (gs), or blocks at the start of the answer "
        "followed by autoregressive decoding (hybrid)",
    )
    window: int = Field(3, ge=0, le=512, description="guesses per round (jacobi); tokens in blocks (hybrid)")
    block: int = Field(4, ge=1, le=512, description="tokens of a block (gs, hybrid)")
    guess: GuessSetting = "lookup"
    pad: PadSetting = 0
    restart: RestartSetting = True


@register(
    "jacobi",
    family="jacobi",
    paper="Santilli et al. 2023, arXiv 2305.10427",
    summary="Iterates on guesses for the next tokens until the target confirms them (Jacobi, Gauss-Seidel, hybrid).",
    when_to_use="When a forward pass over a few rows costs no more than over one row. Few guesses are accepted.",
    aliases=("jacobi-decoding", "santilli"),
    tiny={"window": 2},
)
def build(context: Context, settings: JacobiSettings) -> Parts:
    """Jacobi, Gauss-Seidel-Jacobi or hybrid decoding."""
    first = first_guesses(settings.guess, settings.pad, context.target.vocab_size)
    drafter = Jacobi(settings.mode, settings.window, settings.block, first, restart=settings.restart)
    most = settings.window if settings.mode == "jacobi" else settings.block
    return Parts(drafter, Fixed(most, max_nodes=most))
