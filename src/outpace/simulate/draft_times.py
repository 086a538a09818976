"""What drafts take in simulated rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence as Seq

from outpace.controllers.predictor import DraftCosts, ModelDraft
from outpace.core.errors import BadInput
from outpace.methods.registry import find
from outpace.simulate.acceptance import SimulatedRound
from outpace.simulate.roofline import Roofline, RooflineCosts, Work

_FREE_FAMILIES = ("baseline", "model-free")


def looks_up(method: str) -> bool:
    """Whether a method copies its drafts, looks them up, or has none, so that no network takes time for them."""
    try:
        return find(method).family in _FREE_FAMILIES
    except BadInput:  # of another package
        return False


class DraftTimes(ABC):
    """Seconds of drafting in a round."""

    described: str

    @abstractmethod
    def seconds(self, method: str, rounds: Seq[SimulatedRound], context: int) -> float:
        """Of all requests of one method in a round; ``context``: mean number of tokens in the K/V."""

    def reading(self, method: str, rows: int, context: int) -> float:
        """Of ``rows`` tokens of a prompt after ``context`` ones, which a draft model reads, too."""
        return 0.0


class FreeDrafts(DraftTimes):
    """Tokens that are copied or looked up."""

    described = "drafting takes no time"

    def seconds(self, method: str, rounds: Seq[SimulatedRound], context: int) -> float:
        return 0.0


class RecordedDrafts(DraftTimes):
    """As long as in the trace, which was recorded on this machine. A trace notes for each request what its drafter took
    for all its requests of the round; those that are simulated together come from different rounds, whose mean
    counts. Where only some of them draft, the others' rounds say nothing of it."""

    described = "drafting takes as long as in the trace"

    def seconds(self, method: str, rounds: Seq[SimulatedRound], context: int) -> float:
        telling = [one for one in rounds if one.drafted] or rounds
        return sum(one.draft_seconds or 0.0 for one in telling) / max(1, len(telling))


class ModelDrafts(DraftTimes):
    """A draft model by its own roofline: a forward for each level of the deepest draft, for all requests of a method.
    The methods in ``free`` draft without it, in no time.

    The tokens of a tree are taken to be spread evenly over its levels.
    """

    def __init__(self, roofline: Roofline, free: Container[str] = ("none",)) -> None:
        self.roofline, self.free = roofline, free
        self.costs = RooflineCosts(roofline)
        self.described = f"a draft model of the shape {roofline.shape.name}, {roofline.bits} bits"

    def seconds(self, method: str, rounds: Seq[SimulatedRound], context: int) -> float:
        if method in self.free:
            return 0.0
        rows = [-(-one.drafted // one.depth) for one in rounds if one.depth]
        levels = max((one.depth for one in rounds), default=0)
        return levels * self.costs.forward(rows, [context] * len(rows)) if levels else 0.0

    def reading(self, method: str, rows: int, context: int) -> float:
        return 0.0 if method in self.free else self.roofline.forward(Work.of_chunk([rows], [context]))

    def beside(self, target: RooflineCosts) -> DraftCosts:
        """For the predictor, beside a target's costs."""
        return ModelDraft(target, [self.costs])
