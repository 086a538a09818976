"""What a request begins with: what others of its length have shown of a learned drafter, and drafts that find out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from outpace.controllers import draft_clock
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.controllers.cost_model import CostModel
from outpace.controllers.draft_clock import Aftereffect
from outpace.controllers.fixed import Fixed
from outpace.controllers.yields import LOOK_AGAIN, LOOKS, PATIENCE, SELDOM, SHORT, Standings, Yield
from outpace.core.tree import TokenTree
from outpace.drafting.base import DraftState
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.methods.combination import auto_drafter
from outpace.methods.combination.auto_state import AutoState
from outpace.targets.costs import ForwardCosts
from outpace.targets.table import TableTarget, random_table
from test_auto import Costs, Foresight, always, of, wandering

GOOD, BAD = [0.9, 0.7, 0.5], [0.1, 0.05]


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still: what rounds take on toy targets would decide otherwise every time."""
    monkeypatch.setattr(auto_drafter, "perf_counter", lambda: 0.0)


def shown(standings: Standings, tokens: int, probs: list[float], drafts: int) -> None:
    """Requests of so many tokens whose drafts say ``probs``, and are right about them."""
    for _ in range(drafts):
        Yield(standings.of(tokens)).learn(probs, sum(probs), sum(probs))


def expected(standings: Standings, tokens: int) -> float:
    return sum(Yield(standings.of(tokens)).expected(0.0))


@pytest.mark.parametrize(("tokens", "other", "same"), [
    (1, SHORT, True), (SHORT, SHORT + 1, False), (SHORT + 1, 4 * SHORT, True), (4 * SHORT, 4 * SHORT + 1, False),
    (4 * SHORT + 1, 16 * SHORT, True), (1, 64 * SHORT, False),
])  # fmt: skip
def test_texts_of_about_one_length_share_a_standing(tokens: int, other: int, same: bool) -> None:
    standings = Standings()
    assert (standings.of(tokens) is standings.of(other)) is same


def test_short_and_long_texts_do_not_tell_of_each_other_for_long() -> None:
    standings = Standings()
    shown(standings, 100, GOOD, 200)
    assert expected(standings, 1000) == pytest.approx(expected(standings, 100)), "the first long one begins with that"
    shown(standings, 1000, BAD, 20)
    assert expected(standings, 1000) < 0.5 and expected(standings, 100) > 1.5


def test_the_first_drafts_of_a_request_are_asked_for_with_hope_and_later_ones_are_not() -> None:
    standings = Standings()
    shown(standings, 100, BAD, 50)
    known = Yield(standings.of(100))
    shares = []
    for _ in range(LOOKS + 2):
        shares.append(sum(known.hoped(0.0, 0.3)) / sum(known.expected(0.0)))
        known.learn(BAD, sum(BAD), sum(BAD))
    assert shares == sorted(shares, reverse=True) and shares[0] > 1.5 and shares[LOOKS:] == [1.0, 1.0]
    for _ in range(50):
        known.learn(GOOD, sum(GOOD), 0.0)
    assert Yield(standings.of(100)).hoped(0.0, 0.3) == Yield(standings.of(100)).expected(0.0), "it is always wrong"


class Suits(Foresight):
    """Knows how good it is: right and sure of it for some requests, wrong and unsure for the others."""

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        tree = super().propose(state, budget)
        suited = state.sequence.tokens[0] == 1
        sure = 0.9 if suited else 0.15
        tree.path_acceptance_probs = [sure ** (1 + node) for node in range(len(tree))]
        if not suited:
            tree = TokenTree.chain([(token + 1) % 7 for token in tree.tokens[:1]], None, [sure])
        return tree


def test_a_request_that_the_head_suits_finds_out_where_most_are_not_worth_a_draft() -> None:
    target = wandering(lambda rows: 0.8 + 0.2 * rows)
    part = Suits(target, always)
    method = of(target, part, draft=0.25)
    asked = []
    for number in range(40):
        before = part.asked
        decoder = Decoder(target)
        one = decoder.submit(Request((2 if number % 3 else 1, number % 7, 3), method, max_new_tokens=60))
        decoder.run()
        asked.append((part.asked - before) / one.metrics.rounds)
    others = [share for number, share in enumerate(asked) if number % 3]
    assert min(asked[::3]) > 0.5
    assert sum(others) / len(others) < 0.35


def test_rounds_with_a_draft_are_compared_with_those_beside_them() -> None:
    """A long context, or a busy machine, is not what a draft does to its round."""
    seen = Aftereffect()
    for step in (1.0, 5.0, 2.0) * 4:
        assert seen.share == 0.0 or seen.share == pytest.approx(0.1)
        seen.saw(1.1 * step, step)
    assert seen.share == pytest.approx(0.1)
    seen.saw(1.0, 0.0)  # a clock that stands still says nothing
    assert seen.share == pytest.approx(0.1)


def test_what_drafts_do_to_rounds_is_read_within_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose rounds take ten times as long have drafts in most rounds, the others in few."""
    now = [1.0]
    monkeypatch.setattr(auto_drafter, "perf_counter", lambda: now[0])
    target = wandering()
    part = Foresight(target, lambda at: at % 4 > 1)
    method = of(target, part)
    drafter = method.drafter
    assert isinstance(drafter, auto_drafter.Auto)
    score, turn, slow = target.score, [0], [False]

    def timed(batch: object, *rest: object, **named: object) -> object:
        now[0] += 10.0 if slow[0] else 1.0
        return score(batch, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "score", timed)

    def decide(known: Yield, copied: float, steps: float) -> list[float]:
        turn[0] += 1
        asks = turn[0] % 6 > 0 if slow[0] else turn[0] % 6 == 0
        return [1.0, 0.9, 0.8] if asks else []

    monkeypatch.setattr(Yield, "hoped", decide)
    for first in (1, 2) * 6:
        slow[0] = first == 2
        decoder = Decoder(target)
        decoder.submit(Request((first, 2, 3), method, max_new_tokens=40))
        decoder.run()
    after = drafter.times.shared(False).after
    assert len(after._ratios) >= draft_clock._LEAST_PAIRS
    assert after.share < 0.2


def test_what_others_do_between_two_rounds_belongs_to_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their turns come after rounds with a draft more often than not, as those of a bench's other methods may."""
    now = [1.0]
    monkeypatch.setattr(auto_drafter, "perf_counter", lambda: now[0])
    target = wandering()
    method = of(target, Foresight(target, lambda at: True))
    drafter = method.drafter
    assert isinstance(drafter, auto_drafter.Auto)
    score, turn = target.score, [0]

    def timed(batch: object, *rest: object, **named: object) -> object:
        now[0] += 1.0
        return score(batch, *rest, **named)  # type: ignore[arg-type]

    def decide(known: Yield, copied: float, steps: float) -> list[float]:
        turn[0] += 1
        return [1.0, 0.9, 0.8] if turn[0] % 3 == 0 else []

    monkeypatch.setattr(target, "score", timed)
    monkeypatch.setattr(Yield, "hoped", decide)
    decoder = Decoder(target)
    decoder.submit(Request((1, 2, 3), method, max_new_tokens=200))
    while decoder.step():
        if turn[0] % 3 == 0:
            now[0] += 100.0
    after = drafter.times.shared(False).after
    assert len(after._ratios) >= draft_clock._LEAST_PAIRS
    assert after.share < 0.2


def test_a_batch_does_not_ask_for_drafts_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(known: Yield, copied: float, steps: float) -> list[float]:
        raise AssertionError("a draft would be paid for by all requests of the batch")

    monkeypatch.setattr(Yield, "hoped", alone)
    target = wandering()
    target.__dict__["costs"] = ForwardCosts(target)
    method = of(target, Foresight(target, always))
    decoder = Decoder(target)
    running = [decoder.submit(Request((1, number, 3), method, max_new_tokens=1 + 8)) for number in range(3)]
    decoder.step()
    assert all(len(one.tokens) >= 1 for one in running)


def test_requests_of_a_namespace_go_by_the_length_of_their_own_texts() -> None:
    target = wandering()
    method = of(target, Foresight(target, always))
    drafter = method.drafter
    assert isinstance(drafter, auto_drafter.Auto)
    standings = drafter.times.shared(False).standings
    short = drafter.begin(sequence := target.sequence((1, 2, 3), namespace="ours"))
    long = drafter.begin(target.sequence([1, 2, 3] * 200, namespace="ours"))
    assert short.known is long.known and sequence.timed
    assert long.known.standing is standings.of(600) and standings.of(600) is not standings.of(3)


def rounds_of(known: Yield, asked_in: Sequence[bool], probs: list[float]) -> None:
    for asked in asked_in:
        known.passed(asked=asked, read=True)
        if asked:
            known.learn(probs, sum(probs), sum(probs))


@pytest.mark.parametrize("looks", [1, LOOKS], ids=["fails at once", "looks to the end"])
def test_where_looking_leads_to_no_more_drafts_few_requests_look(looks: int) -> None:
    standing = Standings().of(100)
    looked = []
    for _ in range(10 * LOOK_AGAIN):
        known = Yield(standing)
        looked.append(known.looks(0.3))
        rounds_of(known, [turn < looks for turn in range(40)], BAD)
    assert looked[0] and sum(looked[-4 * LOOK_AGAIN :]) == 4
    for _ in range(3):  # requests that draft to the end
        rounds_of(Yield(standing), [True] * 40, GOOD)
    assert Yield(standing).looks(0.3) and Yield(standing).looks(0.3)
    assert not Yield(standing).looks(3.0), "a draft that takes ten times as long must be followed more often"


def test_long_answers_that_the_head_does_not_suit_leave_others_to_look() -> None:
    standing = Standings().of(100)
    looked = []
    for number in range(60):
        known = Yield(standing)
        looked.append(known.looks(0.3))
        suited = number % 3 == 0 and known.looks(0.3)
        rounds_of(known, [suited or turn < LOOKS for turn in range(500)], GOOD if suited else BAD)
    assert sum(looked) > 50


def test_only_requests_that_may_look_take_turns_at_it() -> None:
    standing = Standings().of(100)
    ours = Yield(standing)
    ours.learn(BAD, sum(BAD), sum(BAD))
    before, looks = standing.requests, ours.looks(0.3)
    ours.join(standing)
    assert standing.requests == before and ours.looks(0.3) is looks


def test_rounds_without_a_draft_are_the_same_one_at_a_time_and_at_once() -> None:
    """What is known in between does not depend on being asked for."""
    standing = Standings().of(100)
    shown_before = Yield(standing)
    for _ in range(20):
        shown_before.learn(BAD, sum(BAD), sum(BAD))
    curious, other = Yield(standing), Yield(standing)
    for known in (curious, other):
        known.learn(GOOD, sum(GOOD), sum(GOOD))
    for _ in range(12):
        for known in (curious, other):
            known.passed(asked=False)
        curious.expected(0.0)
    assert curious.expected(0.0) == pytest.approx(other.expected(0.0))


@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_trials_are_attempted_again_however_many_requests_share_what_is_known(together: int) -> None:
    known = Yield()
    attempts, last = 0, 0
    for number in range(200):
        attempt = known.due()
        if attempt:
            assert not attempts or number - last >= SELDOM // together
            attempts, last = attempts + 1, number
        for _ in range(together):
            known.passed(asked=False)
    assert attempts >= 200 // SELDOM - PATIENCE


def test_a_request_that_a_draft_does_not_pay_for_decides_in_few_rounds_and_goes_on_copying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = wandering(lambda rows: 0.8 + 0.2 * rows)
    part = Foresight(target, lambda at: False)
    method = of(target, part, draft=0.3)
    drafter = method.drafter
    assert isinstance(drafter, auto_drafter.Auto)
    decided: list[int] = []
    decide = drafter._decide

    def counted(states: Sequence[AutoState], *rest: object) -> None:
        decided.append(len(states[0].sequence.tokens))
        decide(states, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter, "_decide", counted)
    decoder = Decoder(target)
    one = decoder.submit(Request((1, 2, 3), method, max_new_tokens=200))
    decoder.run()
    assert part.asked and len(decided) < 0.5 * one.metrics.rounds
    assert one.metrics.parts["sam"] > 0
    longest = max(after - before for before, after in pairwise(decided))
    assert longest <= 8 * (1 + auto_drafter.MOST_QUIET), "the text has not come to copy itself for good"


def test_copies_of_a_fixed_length_are_cut_in_rounds_that_do_not_decide_as_in_others() -> None:
    target = TableTarget(5, random_table(5, 3, order=1), context_length=1000)  # it repeats itself
    target.__dict__["costs"] = Costs(float)
    method = of(target, Foresight(target, lambda at: False), draft=0.3)
    controller = CombinedController([Fixed(8), CostModel(target.costs)], united=True)
    decoder = Decoder(target)
    one = decoder.submit(Request((1, 2, 3), replace(method, controller=controller), max_new_tokens=80))
    decoder.run()
    assert one.metrics.rounds > 70 and one.metrics.drafted < 0.1 * one.metrics.rounds


def test_whether_a_draft_was_a_trial_is_its_own_and_not_that_of_the_round() -> None:
    """Requests of one namespace share what is known: another one may be passed over after the trial was decided."""
    known = Yield(Standings().of(100))
    for _ in range(3):
        known.passed(asked=True, trial=True)
        known.passed(asked=False)
        known.learn(BAD, sum(BAD), 0.0, trial=True)
    assert known.standing is not None and known.standing.failures == 3
    assert known.patience == 8 * PATIENCE
    known.learn(BAD, sum(BAD), 0.0)
    assert known.standing.failures == 3
