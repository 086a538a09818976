"""Recommendation: one method, or none, from the predictions of all; in words, and where it would turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outpace.advice.candidates import Shape
from outpace.advice.prediction import Prediction
from outpace.advice.round_costs import RoundCosts
from outpace.controllers.predictor import Predictor, tokens_per_round

WORTH = 1.02
"""Drafting is recommended where the lower end of the interval is above this speed-up."""
_CHAIN = 3
"""Draft tokens of the chain of which it is said how often they would have to be accepted."""


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate at one batch, with its best shape. ``how``: how its acceptance was found."""

    method: str
    shape: Shape
    batch: int
    prediction: Prediction
    how: str
    tokens_per_round: float

    @property
    def pays(self) -> bool:
        """Whether its lower expectation is above :data:`WORTH`."""
        return self.prediction.interval[0] > WORTH

    def public(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "settings": dict(self.shape.settings),
            "batch": self.batch,
            **self.prediction.public(),
            "acceptance": self.how,
        }


@dataclass(frozen=True, slots=True)
class Recommendation:
    """``method`` for all batches that it pays at, "none" where it pays at none. ``rows``: its own, by batch.
    ``measured``: batches at which it was measured; of "none", at which any candidate was."""

    method: str
    rows: Mapping[int, Row]
    batches: Seq[int]
    words: list[str]
    measured: frozenset[int] = frozenset()

    @property
    def first(self) -> Row | None:
        """At the smallest batch at which it pays."""
        return next((one for _, one in sorted(self.rows.items()) if one.pays), None)

    @property
    def settings(self) -> dict[str, Any]:
        """At the smallest batch at which it pays."""
        return {} if self.first is None else dict(self.first.shape.settings)

    def public(self) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for batch in self.batches:
            row, measured = self.rows.get(batch), batch in self.measured
            if self.method == "none" or row is None:
                nothing = {"speedup": 1.0, "interval": [1.0, 1.0], "settings": {}, "use": "none"}
                entries[str(batch)] = nothing | {"measured": measured}
                continue
            entries[str(batch)] = {
                "speedup": row.prediction.speedup,
                "interval": list(row.prediction.interval),
                "settings": dict(row.shape.settings),
                "use": self.method if row.pays else "none",
                "measured": measured,
            }
        return {"method": self.method, "settings": self.settings, "batch": entries}


def recommend(rows: Seq[Row], costs: Mapping[int, RoundCosts], batches: Seq[int]) -> Recommendation:
    """The method with the largest mean (of logarithms) over the batches, where it is used at those at which it pays.
    ``costs``: of those of the ``batches`` that there was time for.

    One that was not measured at all batches counts as none there, unless it is surely better at the others. None of
    them pays: "none".
    """
    by_method: dict[str, dict[int, Row]] = {}
    for one in rows:
        by_method.setdefault(one.method, {})[one.batch] = one
    worth = {method: sum(map(_gain, mine.values())) for method, mine in by_method.items()}
    best = max(worth, key=lambda method: worth[method], default="none")
    if not worth or worth[best] <= 0.0:
        return Recommendation("none", {}, batches, _none(rows, costs, batches), frozenset(one.batch for one in rows))
    ahead = {method: _surely_ahead(mine, by_method[best]) for method, mine in by_method.items() if method != best}
    surest = max(ahead, key=lambda method: ahead[method], default=best)
    if surest != best and ahead[surest] > 0.0:
        best = surest
    chosen = by_method[best]
    return Recommendation(best, chosen, batches, _words(best, chosen, rows, costs, batches), frozenset(chosen))


def _surely_ahead(mine: Mapping[int, Row], other: Mapping[int, Row]) -> float:
    """By how much the lower ends of a method that was not measured at all batches of the ``other`` exceed the other's
    speed-ups, at those at which both were: a sum of logarithms."""
    both = mine.keys() & other.keys()
    if len(both) == len(other):
        return 0.0
    return sum(_gain(mine[batch], lower=True) - _gain(other[batch]) for batch in both)


def _gain(one: Row, *, lower: bool = False) -> float:
    """The logarithm of the speed-up, 0 where the method is not used."""
    return math.log(one.prediction.interval[0] if lower else one.prediction.speedup) if one.pays else 0.0


def _words(
    method: str, mine: Mapping[int, Row], rows: Seq[Row], costs: Mapping[int, RoundCosts], batches: Seq[int]
) -> list[str]:
    paying = [batch for batch, one in sorted(mine.items()) if one.pays]
    shapes = {mine[batch].shape.words for batch in paying}
    found = [f"Use {method}, " + " or ".join(sorted(shapes)) + "."]
    for batch in batches:
        row = mine.get(batch)
        if row is not None and row.pays:
            own = f", {row.shape.words}" if len(shapes) > 1 else ""
            found.append(f"Batch {batch}: {_expected(row.prediction)}{own}.")
        elif row is None:
            found.append(f"Batch {batch}: {method} was not measured: the time was over. Give more --minutes.")
        elif (best := _best(batch, rows)) is not None and best.pays:
            found.append(f"Batch {batch}: not {method} ({_figures(row.prediction)}). {_best_of(batch, rows)}")
        else:
            found.append(f"Batch {batch}: none. {_best_of(batch, rows)}{_needed(costs.get(batch))}")
    if (turn := _turn(mine)) is not None:
        found.append(turn)
    found.append(_limits(mine[paying[0]]))
    better = [
        f"batch {batch}: {best.method} ({best.prediction.speedup:.2f}x)"
        for batch in paying
        if (best := _best(batch, rows)) is not None
        and best.method != method
        and best.prediction.speedup > 1.03 * mine[batch].prediction.speedup
    ]
    if better:
        found.append("If you decode at one batch alone, better still: " + "; ".join(better) + ".")
    return found


def _none(rows: Seq[Row], costs: Mapping[int, RoundCosts], batches: Seq[int]) -> list[str]:
    found = ["Use none: no candidate is sure to be faster than autoregressive decoding."]
    found += [f"Batch {batch}: {_best_of(batch, rows)}{_needed(costs.get(batch))}" for batch in batches]
    return found


def _best(batch: int, rows: Seq[Row]) -> Row | None:
    return max((one for one in rows if one.batch == batch), key=lambda one: one.prediction.speedup, default=None)


def _best_of(batch: int, rows: Seq[Row]) -> str:
    best = _best(batch, rows)
    if best is None:
        return "Nothing was measured: the time was over. Give more --minutes."
    unsure = best.prediction.speedup >= WORTH and not best.pays
    more = f", whose lower end is not above {WORTH:.2f}x" if unsure else ""
    tokens, steps = best.prediction.forecast
    why = f"It commits {tokens:.2f} tokens in a round that takes {steps:.2f} autoregressive ones"
    if not unsure and WORTH * steps > tokens:
        why += f", and would gain with {WORTH * steps:.2f} tokens, or rounds below {tokens / WORTH:.2f}"
    return f"The best, {best.method}, is expected at {_figures(best.prediction)}{more}. {why}."


def _needed(costs: RoundCosts | None) -> str:
    """How often draft tokens would have to be accepted for a short chain that takes no time to draft."""
    if costs is None:
        return ""
    steps = Predictor(costs).verification(_CHAIN, costs.batch)
    share = acceptance_for(WORTH * steps, _CHAIN)
    if share is None:
        return f" {_CHAIN} draft tokens for each request would not pay even if all were accepted."
    return f" Chains of {_CHAIN} free draft tokens would pay from {100 * share:.0f} % acceptance on."


def acceptance_for(tokens: float, length: int) -> float | None:
    """The acceptance rate with which chains of ``length`` commit ``tokens`` tokens a round; None: no rate does."""
    if tokens > length + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(middle, length) < tokens else (low, middle)
    return high


def _turn(mine: Mapping[int, Row]) -> str | None:
    """Between which batches it ceases to pay, and about where; or begins to."""
    found = []
    for (small, before), (large, after) in pairwise(sorted(mine.items())):
        if after.pays and not before.pays:
            found.append(f"It begins to pay between batch {small} and {large}.")
        elif before.pays and not after.pays:
            high, low = math.log(before.prediction.speedup), math.log(after.prediction.speedup)
            limit, about = math.log(WORTH), ""
            if high > limit >= low:
                about = f", at about {small * (large / small) ** ((high - limit) / (high - low)):.0f}"
            found.append(f"It ceases to pay between batch {small} and {large}{about}.")
    return " ".join(found) or None


def _limits(row: Row) -> str:
    """Up to which acceptance and costs it pays: a speed-up is tokens of a round over what the round takes."""
    tokens, steps = row.prediction.forecast
    costs = f"if rounds took more than {tokens / WORTH:.2f} autoregressive ones ({steps:.2f} are expected)."
    if WORTH * steps <= 1.0:  # by noise: a round commits a token at least
        return f"At batch {row.batch} it would cease to pay {costs}"
    least = f"below {WORTH * steps:.2f} tokens a round ({tokens:.2f} are expected), or {costs}"
    return f"At batch {row.batch} it would cease to pay {least}"


def _expected(one: Prediction) -> str:
    return f"{_figures(one)} as fast as autoregressive decoding"


def _figures(one: Prediction) -> str:
    return f"{one.speedup:.2f}x (90 % interval {one.interval[0]:.2f} to {one.interval[1]:.2f})"
