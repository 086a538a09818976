"""For which requests a learned drafter is asked: by what a round is worth at the pace of the request."""

from __future__ import annotations

from outpace.controllers.learned_plan import Plan, plan

FLAT = (1.0, 1.02, 1.04, 1.06, 1.08, 1.1)
"""Rows cost little."""


def planned(pace: float | None, free: tuple[float, ...] = (), drafting: float = 0.6) -> Plan:
    return plan([free], [[0.8, 0.5, 0.3]], FLAT, 1.0, lambda size: drafting * size, pace=pace)


def test_a_draft_that_beats_one_autoregressive_round_but_not_the_pace_is_not_asked_for() -> None:
    """2.6 tokens in 1.66 steps: more than a step gives, and less than copies do in the rounds to come."""
    assert planned(None).asked == planned(1.0).asked == planned(1.4).asked == (0,)
    assert planned(2.6).asked == ()


def test_beside_copies_a_draft_is_worth_what_it_adds() -> None:
    """Two tokens are copied. A draft lowers the round's own rate; at a slow pace it adds more than its time gives
    otherwise."""
    copies = (0.9, 0.8)
    assert planned(None, copies, drafting=1.0).asked == ()
    assert planned(1.1, copies, drafting=1.0).asked == (0,)


def test_the_worth_of_the_plan_is_the_most_that_any_number_of_requests_has() -> None:
    offers = [[0.8, 0.5, 0.3], [0.1], [0.7, 0.4]]
    found = plan(
        [(), (), ()], offers, tuple(1.0 + 0.02 * rows for rows in range(20)), 3.0, lambda size: 0.2 + 0.05 * size
    )
    assert found.asked == (0, 2)
