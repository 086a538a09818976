"""What drafts take in simulated rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from outpace.controllers.predictor import DraftCosts, ModelDraft
from outpace.simulate.acceptance import SimulatedRound
from outpace.simulate.roofline import Roofline, RooflineCosts, Work


class DraftTimes(ABC):
    """Seconds of drafting in a round."""

    described: str

    @abstractmethod
    def seconds(self, rounds: Seq[SimulatedRound], context: int) -> float:
        """Of all requests of a round; ``context``: mean number of tokens in their K/V."""

    def reading(self, rows: int, context: int) -> float:
        """Of ``rows`` tokens of a prompt after ``context`` ones, which a draft model reads, too."""
        return 0.0


class FreeDrafts(DraftTimes):
    """Tokens that are copied or looked up."""

    described = "drafting takes no time"

    def seconds(self, rounds: Seq[SimulatedRound], context: int) -> float:
        return 0.0


class RecordedDrafts(DraftTimes):
    """As long as in the trace, which was recorded on this machine. A trace notes for each request what its drafter took
    for all requests of the round; those that are simulated together come from different rounds, whose mean counts."""

    described = "drafting takes as long as in the trace"

    def seconds(self, rounds: Seq[SimulatedRound], context: int) -> float:
        return sum(one.draft_seconds or 0.0 for one in rounds) / max(1, len(rounds))


class ModelDrafts(DraftTimes):
    """A draft model by its own roofline: a forward for each level of the deepest draft, for all requests.

    The tokens of a tree are taken to be spread evenly over its levels.
    """

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self.costs = RooflineCosts(roofline)
        self.described = f"a draft model of the shape {roofline.shape.name}, {roofline.bits} bits"

    def seconds(self, rounds: Seq[SimulatedRound], context: int) -> float:
        rows = [-(-one.drafted // one.depth) for one in rounds if one.depth]
        levels = max((one.depth for one in rounds), default=0)
        return levels * self.costs.forward(rows, [context] * len(rows)) if levels else 0.0

    def reading(self, rows: int, context: int) -> float:
        return self.roofline.forward(Work.of_chunk(rows, context))

    def beside(self, target: RooflineCosts) -> DraftCosts:
        """For the predictor, beside a target's costs."""
        return ModelDraft(target, [self.costs])
