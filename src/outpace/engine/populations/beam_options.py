"""BeamOptions: what a caller may choose of beam search, under the names of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal

from outpace.core.errors import BadInput, shown

MOST_BEAMS = 1024


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Raises BadInput for values of a wrong type or out of range.

    num_beams: sequences that are kept at every length.
    length_penalty: a hypothesis is ranked by its log-probability / its length ** length_penalty; above 0 favours long
        ones.
    early_stopping: True ends when ``num_beams`` hypotheses have ended; False when no running beam is better than all of
        these at its present length; "never" when none could be, at any length.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if isinstance(self.num_beams, bool) or not isinstance(self.num_beams, int):
            raise BadInput(f"num_beams must be a whole number, not {shown(self.num_beams)}")
        if not 1 <= self.num_beams <= MOST_BEAMS:
            raise BadInput(f"num_beams must be between 1 and {MOST_BEAMS}, not {self.num_beams}")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, Real) or not -1e3 <= penalty <= 1e3:
            raise BadInput(f"length_penalty must be a number between -1000 and 1000, not {shown(penalty)}")
        if self.early_stopping not in (True, False, "never") or isinstance(self.early_stopping, int | float) != (
            isinstance(self.early_stopping, bool)
        ):
            raise BadInput(f'early_stopping must be True, False or "never", not {shown(self.early_stopping)}')
