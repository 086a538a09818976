"""Relaxed acceptance by neighbors in embedding space (LANTERN: Jang et al. 2025, arXiv 2410.03355, section 4).

LANTERN treats near tokens of the embedding space as interchangeable: a draft token is judged with the target
probability of its nearest neighbors added to its own, as long as the total variation stays within a cap. Here the
mass is moved before anything is judged: tokens that the drafter proposes more often than the target would take them
receive probability from their ``neighbors`` nearest tokens by Euclidean distance, the nearest first, up to ``cap`` in
total. A token gives at most what the target has there beyond what the drafter proposes. The rule then verifies
against the result.

The paper decides the neighborhood for the token that was drawn, and bounds the total variation of each of these
distributions; where tokens are sampled, the committed token's distribution is a mixture of them that may be further
away.

Promise: the total variation is at most ``cap`` at every node. With cap 0 the rule is recursive rejection.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pydantic import Field

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.bounds import TOTAL_VARIATION, Bound, NodeView
from outpace.acceptance.relaxed_target import Proposed, RelaxedTarget
from outpace.core.errors import BadInput
from outpace.core.lru import Lru
from outpace.core.validation import StrictModel
from outpace.targets.base import Target

if TYPE_CHECKING:
    from torch import Tensor

_RECEIVERS = 8
"""Tokens of a sampled row that receive at a node: those that lack most."""
_KEPT = 4096
"""Tokens whose neighbors are kept."""
MOST_NEIGHBORS = 256
"""Each is asked for in Python at every node, while other requests wait for the round."""


class LanternSettings(StrictModel):
    """Settings of ``lantern``."""

    cap: float = Field(0.1, ge=0, le=1, description="largest total variation at a node; 0 is lossless")
    neighbors: int = Field(
        10, ge=1, le=MOST_NEIGHBORS, description="how many nearest tokens give probability to a draft token"
    )


class Neighbors:
    """The nearest tokens of each token by their input embeddings, found when asked for; the last ones asked for stay.

    ``rows``: float32 embeddings (V, hidden) of all tokens, kept.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._squares = rows.square().sum(-1)
        self._found: Lru[tuple[int, int], list[int]] = Lru(_KEPT)

    def of(self, tokens: Seq[int], count: int) -> list[list[int]]:
        """The ``count`` nearest other tokens of each of ``tokens``, the nearest first."""
        import torch

        known = {token: self._found.get((token, count)) for token in tokens}
        if asked := [token for token, near in known.items() if near is None]:
            # |x - y|^2 - |x|^2: one product for all of them, and no copy of the vocabulary.
            distances = torch.addmm(self._squares, self._rows[asked], self._rows.T, alpha=-2.0)
            distances[range(len(asked)), asked] = float("inf")
            nearest = distances.topk(min(count, len(self._rows) - 1), largest=False).indices.tolist()
            for token, near in zip(asked, nearest, strict=True):
                known[token] = near
                self._found.put((token, count), near)
        return [near for near in known.values() if near is not None]


_NEIGHBORS: WeakKeyDictionary[Target, Neighbors] = WeakKeyDictionary()


def neighbors_of(target: Target) -> Neighbors:
    """Those of a target, which all requests share."""
    import torch

    found = _NEIGHBORS.get(target)
    if found is None:
        ids = torch.arange(target.vocab_size, device=target.device)
        found = _NEIGHBORS[target] = Neighbors(target.embed(ids).float())
    return found


class Lantern(RelaxedTarget[LanternSettings]):
    """Moves probability to draft tokens from their neighbors in embedding space, up to a cap on total variation."""

    name = "lantern"
    paper = "Jang et al. 2025, arXiv 2410.03355"
    Settings = LanternSettings
    corners = ({}, {"cap": 0.0}, {"cap": 0.02}, {"cap": 1.0, "neighbors": 1}, {"cap": 0.5, "neighbors": 4})

    def __init__(self, settings: LanternSettings | None = None, target: Target | None = None) -> None:
        super().__init__(settings)
        self._target = target

    def for_target(self, target: Target) -> AcceptanceRule:
        return Lantern(self.settings, target)

    @property
    def bound(self) -> Bound:
        return Bound(TOTAL_VARIATION, "cap")

    @property
    def exact(self) -> bool:
        return self.settings.cap == 0.0

    def limit(self, node: NodeView) -> float:
        return self.settings.cap

    def relaxed(self, p: Tensor, proposed: Proposed) -> Tensor | None:
        import torch

        if self._target is None:
            raise BadInput("rule 'lantern' reads the target's embeddings: build the method with the rule's name")
        wanted = torch.zeros_like(p) if proposed.q is None else proposed.q.to(p.dtype).clone()
        wanted[list(proposed.tokens)] = 1.0
        lack = (wanted - p).masked_fill(p <= 0, 0.0)
        most = lack.topk(min(len(proposed.tokens) + (_RECEIVERS if proposed.q is not None else 0), len(p)))
        surplus = (p - wanted).clamp_(min=0.0)
        wishes = zip(most.indices.tolist(), most.values.tolist(), strict=True)
        receivers = [(token, missing) for token, missing in wishes if missing > 0.0]
        near = neighbors_of(self._target).of([token for token, _ in receivers], self.settings.neighbors)
        h, left = p.clone(), self.settings.cap
        for (token, missing), others in zip(receivers, near, strict=True):
            wish = missing
            for other in others:
                if wish <= 0.0 or left <= 0.0:
                    break
                moved = min(wish, left, float(surplus[other]))
                h[token] += moved
                h[other] -= moved
                surplus[other] -= moved
                wish, left = wish - moved, left - moved
            if left <= 0.0:
                break
        return h.clamp_(min=0.0)
