"""Constrained acceptance (Cactus: Hao and Mou 2026, arXiv 2604.04987): accept as much as a divergence allows.

Among the distributions h with D_f(h, p) <= delta, the rule verifies against the one that accepts most draft tokens,
that is, with the largest sum of min(h, w), w being the probability that the drafter proposes a token. The
stationarity conditions of this convex program say that h / p is constant wherever h is below w and wherever it is
above: for every f the solution is

    h = clip(w, b p, a p)    with b <= 1 <= a, sum h = 1, and D_f(h, p) = delta (or h = w, where that is nearer).

For a deterministic draft token, w is 1 there and 0 elsewhere: h(x) = gamma, and everything else is scaled by (1 -
gamma) / (1 - p(x)). For half the chi-square divergence gamma = p + sqrt(2 delta p (1 - p)), the paper's closed form,
which it derives as a second-order approximation of KL. After a rejection the token comes from norm(max(0, h - q)).

The paper takes this h(x) for the token x that was drawn, even where x was sampled from q. The committed token then
follows a mixture of the h of all x, for which the divergence is not bounded by delta (and the approximation exceeds a
KL budget where p(x) is large). Here h depends on p and q alone, so that the committed token has the distribution h.

Promise: D_f(h, p) <= delta at every node. With delta 0 the rule is recursive rejection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from outpace.acceptance.bounds import HALF_CHI_SQUARE, KL, TOTAL_VARIATION, Bound, NodeView
from outpace.acceptance.lossy import Corners
from outpace.acceptance.relaxed_target import MOST, Proposed, RelaxedTarget
from outpace.core.validation import StrictModel

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Row = npt.NDArray[Any]

_STEPS = 60
_NAMES = {"kl": KL, "chi2": HALF_CHI_SQUARE, "tv": TOTAL_VARIATION}


class CactusSettings(StrictModel):
    """Settings of ``cactus``."""

    delta: float = Field(0.1, ge=0, allow_inf_nan=False, description="largest divergence at a node; 0 is lossless")
    divergence: Literal["kl", "chi2", "tv"] = Field(
        "kl", description="KL divergence in nats, half the chi-square divergence, or total variation"
    )


class Cactus(RelaxedTarget[CactusSettings]):
    """Verifies against the distribution within a divergence delta of the target's that accepts most draft tokens."""

    name = "cactus"
    aliases: tuple[str, ...] = ("constrained-acceptance",)
    paper = "Hao and Mou 2026, arXiv 2604.04987"
    Settings = CactusSettings
    corners: ClassVar[Corners] = (
        {},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": 0.001},
        {"delta": 0.1, "divergence": "chi2"},
        {"delta": 0.01, "divergence": "chi2"},
        {"delta": 0.2, "divergence": "tv"},
    )

    @property
    def bound(self) -> Bound:
        return Bound(_NAMES[self.settings.divergence], "delta")

    @property
    def exact(self) -> bool:
        return self.settings.delta == 0.0

    def limit(self, node: NodeView) -> float:
        return self.settings.delta

    def relaxed(self, p: Tensor, proposed: Proposed) -> Tensor | None:
        import numpy as np

        drafted = list(proposed.tokens)
        if proposed.q is None:
            inside = float(p[drafted].double().sum())
            if not 0.0 < inside < 1.0:
                return None
            ratio = self._ratios(np.array([inside, 1.0 - inside]), np.array([1.0, 0.0]))
            h = p * float(ratio[1])
            h[drafted] = p[drafted] * float(ratio[0])
            return h
        wanted = 1.0 - (1.0 - proposed.q.double()).clamp_(0.0, 1.0) ** proposed.draws
        wanted[drafted] = 1.0
        ids = wanted.masked_fill(p <= 0, -1.0).topk(min(MOST, len(p))).indices
        ids = ids[p[ids] > 0]
        masses, wishes = p[ids].double().cpu().numpy(), wanted[ids].cpu().numpy()
        rest = max(0.0, 1.0 - float(masses.sum()))  # all other tokens, as one
        left = max(0.0, float(wanted[p > 0].sum()) - float(wishes.sum()))
        apart = rest > 1e-12
        if apart:
            masses, wishes = np.append(masses, rest), np.append(wishes, left)
        ratios = self._ratios(masses, wishes)
        h = p * float(ratios[-1] if apart else 1.0)
        h[ids] = p[ids] * p.new_tensor(ratios[: len(ids)])
        return h

    def _ratios(self, p: Row, wanted: Row) -> Row:
        return best_ratios(p, wanted, self.settings.delta, self.settings.divergence)


def best_ratios(p: Row, wanted: Row, delta: float, divergence: str) -> Row:
    """h / p, (n,), of the distribution h that maximizes sum min(h, wanted) within the divergence ``delta`` of ``p``.

    ``p`` (n,) positive, of sum 1; ``wanted`` (n,) not negative. Parametrized by the mass that h moves: the upper ratio
    takes it, the lower one gives it, and each is a piecewise linear function of it.
    """
    import numpy as np

    ratio = wanted / p
    over, under = ratio > 1.0, ratio < 1.0
    gained, upper = _levels(ratio[over], p[over], up=True)
    lost, lower = _levels(ratio[under], p[under], up=False)

    def at(mass: float) -> Row:
        a, b = np.interp(mass, gained, upper), np.interp(mass, lost, lower)
        found: Row = np.clip(ratio, b, a)
        return found

    measure = _DIVERGENCES[divergence]
    low, high = 0.0, float(min(gained[-1], lost[-1]))
    if measure(p, at(high)) <= delta:
        return at(high)
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if measure(p, at(middle)) <= delta:
            low = middle
        else:
            high = middle
    return at(low)


def _levels(ratio: Row, p: Row, *, up: bool) -> tuple[Row, Row]:
    """Mass that is moved when the ratio of these tokens is limited at a level, and the levels: both ascending in mass.

    ``up``: to at most a level above 1, their own ratios being above it; else to at least a level below 1.
    """
    import numpy as np

    order = np.argsort(ratio if up else -ratio)
    levels = np.concatenate([[1.0], ratio[order]])
    # Between two levels the tokens that are not yet at their own ratio move, in proportion to p.
    moving = p[order][::-1].cumsum()[::-1]
    masses = np.concatenate([[0.0], (np.abs(np.diff(levels)) * moving).cumsum()])
    return masses, levels


def _kl(p: Row, ratio: Row) -> float:
    import numpy as np

    kept = ratio > 0.0
    return float((p[kept] * ratio[kept] * np.log(ratio[kept])).sum())


_DIVERGENCES: dict[str, Callable[[Any, Any], float]] = {
    "kl": _kl,
    "chi2": lambda p, ratio: float((0.5 * p * (ratio - 1.0) ** 2).sum()),
    "tv": lambda p, ratio: float(0.5 * (p * abs(ratio - 1.0)).sum()),
}
