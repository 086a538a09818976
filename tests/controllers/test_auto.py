"""``auto``: the learned part, the free part, both or neither, by what they bring for what they cost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.acceptance.default import default_rule
from outpace.certify.exact import certify_exact, tiny_context
from outpace.controllers import learned_plan, yields
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.controllers.cost_model import CostModel
from outpace.controllers.draft_clock import Clock
from outpace.controllers.fixed import Fixed
from outpace.controllers.yields import PRIOR, Standings, Yield
from outpace.core.auxiliary_token import AuxiliaryToken
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.model_drafter import DraftModel
from outpace.engine.decoder import Decoder
from outpace.engine.known_answers import close_answers, known_answers
from outpace.engine.method import Method
from outpace.engine.replay import replay
from outpace.engine.request import Generation, Request
from outpace.heads.checkpoint import facts, new_head, save
from outpace.heads.head_folder import open_head
from outpace.heads.kinds import find_kind, plan
from outpace.heads.shipped import measured
from outpace.heads.untrained import random_head
from outpace.methods import registry
from outpace.methods.bindings import Binding, Bindings, draft_models
from outpace.methods.combination import auto_drafter, auto_state
from outpace.methods.combination.auto import AutoSettings, learned_methods, learned_part
from outpace.methods.combination.auto_drafter import Auto, _beside_draws
from outpace.methods.lookup.sam import SuffixLookup
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context, Parts, register
from outpace.model import Model
from outpace.targets.base import Sequence
from outpace.targets.costs import Costs as AnyCosts, FixedCosts, ForwardCosts
from outpace.targets.table import TableTarget, random_table
from support import certain_tree, greedy_is_plain
from test_combined import FEW

VOCAB = 40
LENGTH = 120
SAMPLED = SamplingParams(temperature=0.9, seed=4)


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still: what rounds take on toy targets would decide otherwise every time."""
    monkeypatch.setattr(auto_drafter, "perf_counter", lambda: 0.0)


class Costs(ForwardCosts):
    """Forwards that cost what they are said to, as do drafts in a rehearsal."""

    def __init__(self, cost: Callable[[int], float], draft: float = 0.1) -> None:
        super().__init__(TableTarget(3))
        self._cost, self._draft = cost, draft

    def once(self, name: str, measure: Callable[[], float]) -> float:
        return self._draft

    def seconds(self, rows: int, context: int = 0) -> float:
        return self._cost(rows)

    def even(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return self._cost(rows)

    def forward(self, rows: Seq[int], contexts: Seq[int]) -> float:
        return self._cost(sum(rows))


def cheap(rows: int) -> float:
    return 1.0 + 0.02 * rows


def proportional(rows: int) -> float:
    return float(rows)


def wandering(cost: Callable[[int], float] = cheap) -> TableTarget:
    """A target that hardly repeats itself."""
    target = TableTarget(VOCAB, random_table(VOCAB, 3, order=5), context_length=1000)
    target.__dict__["costs"] = Costs(cost)
    return target


class Foresight(Drafter[DraftState]):
    """Knows the target's table, and is right at positions that ``knows`` accepts; counts how often it was asked."""

    def __init__(self, target: TableTarget, knows: Callable[[int], bool], length: int = 3) -> None:
        self.target, self.knows, self.length = target, knows, length
        self.asked = 0

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        self.asked += 1
        tree, path, node = TokenTree(), tuple(state.sequence.tokens), ROOT
        for depth in range(min(self.length, budget.depth)):
            row = self.target.table(path)
            token = int(row.argmax() if self.knows(len(path)) else row.argmin())
            node = tree.add(node, token, path_acceptance_prob=0.8 ** (depth + 1))
            path = (*path, token)
        return tree


class Still(Clock):
    """A clock that always shows the same."""

    def __init__(self, shows: float) -> None:
        super().__init__()
        self.shows = shows

    def seconds(self, count: int) -> float | None:
        return self.shows


def of(target: TableTarget, learned: Drafter[Any] | None = None, draft: float = 0.1) -> Method:
    """``auto`` of the suffix automaton and ``learned``, whose drafts take ``draft`` seconds; an autoregressive step
    takes one."""
    parts: list[Drafter[Any]] = [SuffixLookup()] if learned is None else [SuffixLookup(), learned]
    drafter = Auto(parts, ["sam", "learned"][: len(parts)], target)
    drafter.times.shared(False).clock = Still(draft)
    controllers = [CostModel(target.costs) for _ in parts]
    return Method("auto", drafter, default_rule(drafter.proposal), CombinedController(controllers, united=True))


def reset_clock(method: Method) -> Clock:
    """``auto``'s clock of greedy drafts, which has seen nothing and reads real times."""
    assert isinstance(method.drafter, Auto)
    clock = method.drafter.times.shared(False).clock = Clock()
    return clock


def answer(
    target: TableTarget,
    method: Method,
    prompt: Seq[int] = (1, 2, 3),
    params: SamplingParams | None = None,
    length: int = LENGTH,
) -> Generation:
    decoder = Decoder(target)
    generation = decoder.submit(
        Request(tuple(prompt), method, params or SamplingParams(), max_new_tokens=length, trace=True)
    )
    decoder.run()
    return generation


def plain(target: TableTarget, prompt: Seq[int] = (1, 2, 3), length: int = LENGTH) -> list[int]:
    return answer(target, registry.build("none", Context(target)), prompt, length=length).tokens


def always(position: int) -> bool:
    return True


def never(position: int) -> bool:
    return False


# -------------------------------------------------------------------------------------------------- what is chosen


def test_a_learned_part_that_is_right_drafts() -> None:
    target = wandering()
    found = answer(target, of(target, Foresight(target, always)))
    assert found.tokens == plain(target)
    assert found.metrics.committed / found.metrics.rounds > 3.5
    assert found.metrics.parts["learned"] > 0.9 * found.metrics.rounds


def test_one_that_is_wrong_is_left_in_peace_and_tried_ever_less() -> None:
    target = wandering()
    asked = {}
    for length in (60, 240):
        wrong = Foresight(target, never)
        found = answer(target, of(target, wrong), length=length)
        assert found.tokens == plain(target, length=length)
        asked[length] = wrong.asked
    assert 1 <= asked[60] < 20
    assert asked[240] - asked[60] < 0.04 * 180


def test_where_rows_cost_in_proportion_decoding_is_plain() -> None:
    target = wandering(proportional)
    right = Foresight(target, always)
    found = answer(target, of(target, right))
    assert found.tokens == plain(target)
    assert found.metrics.drafted == 0
    assert right.asked < 0.25 * LENGTH
    assert found.metrics.parts == {"sam": 0, "learned": 0}


def test_a_draft_that_takes_longer_than_it_saves_is_not_asked_for() -> None:
    target = wandering()
    counts = {}
    for draft in (0.1, 5.0):
        part = Foresight(target, always)
        answer(target, of(target, part, draft))
        counts[draft] = part.asked
    assert counts[5.0] < 0.2 * LENGTH
    assert counts[0.1] >= 0.9 * LENGTH / 4


def test_copying_alone_does_where_text_repeats() -> None:
    target = TableTarget(VOCAB, random_table(VOCAB, 3, order=1))  # order 1: it runs in circles soon
    target.__dict__["costs"] = Costs(cheap)
    prompt = (1, 2, 3, *plain(target))
    part = Foresight(target, always)
    found = answer(target, of(target, part), prompt)
    assert found.tokens == plain(target, prompt)
    assert found.metrics.parts == {"sam": found.metrics.drafting, "learned": 0}
    assert found.metrics.drafting >= found.metrics.rounds - 1, "the last token has no room for a draft"
    assert part.asked == 0, "where copying promises more, the learned part rests"
    alone = answer(target, of(target))
    assert alone.metrics.parts == {"sam": alone.metrics.drafting}


def test_both_bring_more_than_either() -> None:
    """Half of the answer is in the prompt, the other half the learned part knows."""
    target = wandering()
    said = plain(target, length=80)
    prompt = (*said[:40], 0, 1, 2, 3)
    copied = TableTarget(VOCAB, lambda path: target.table(path[44:] if len(path) > 44 else (7,)))
    copied.__dict__["costs"] = Costs(cheap)
    rounds = {}
    for name, made in {"both": of(copied, Foresight(copied, lambda at: at > 84)), "copying": of(copied)}.items():
        found = answer(copied, made, (*prompt[:44],), length=80)
        rounds[name] = found.metrics.rounds
        if name == "both":
            assert found.metrics.parts["learned"] > 3
            assert found.tokens == plain(copied, prompt[:44], 80)
    assert rounds["both"] < rounds["copying"]


def test_trees_are_united_and_cut_by_what_pays() -> None:
    target = wandering()
    method = of(target, Foresight(target, always))
    sequence = target.sequence((1, 2, 3, 4, 2))
    state = method.drafter.begin(sequence)

    def drafted(cost: float) -> TokenTree:
        budget = Budget(6, 6, relative_costs=tuple(1.0 + cost * count for count in range(7)))
        return method.drafter.propose_batch([state], [budget])[0]

    copied, read = 3, int(target.table(tuple(sequence.tokens)).argmax())
    tree = drafted(0.01)
    assert tree.child(ROOT, copied) is not None and tree.child(ROOT, read) is not None
    assert len(tree) <= 6
    tree = drafted(0.07)
    assert tree.child(ROOT, read) is not None
    assert tree.child(ROOT, copied) is None, "after a short match, beside a head that expects another token"
    assert len(drafted(4.0)) == 0


def test_copies_beside_draws_are_as_many_whatever_was_drawn_and_fewer_where_more_is_drawn() -> None:
    """A draw's chance of being accepted would depend on what it is, if the copies beside it did."""
    free = TokenTree.chain([1, 2, 3, 4, 5, 6], path_acceptance_probs=[0.5**depth for depth in range(1, 7)])
    budget = Budget(8, 8, relative_costs=tuple(1.0 + 0.02 * rows**2 for rows in range(9)))
    counts = []
    for drawn in range(5):
        known = Yield()
        for _ in range(40):
            known.learn([0.4] * drawn, 0.4 * drawn, 0.4 * drawn)
        counts.append(len(_beside_draws(free, budget, known)))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    assert len(_beside_draws(free, replace(budget, relative_costs=(), max_nodes=4), Yield())) == 4


def test_a_greedy_request_s_drafts_may_be_cut_whatever_the_drafter_does_when_requests_sample() -> None:
    part = Foresight(wandering(), always)
    part.proposal = replace(part.proposal, sampled=True)
    tree = TokenTree.chain([1, 2])
    assert part.may_be_cut(tree, greedy=True)
    assert not part.may_be_cut(tree, greedy=False), "whether it came out deterministic may depend on its draws"
    tree.auxiliary_tokens.append(AuxiliaryToken(0, 1))
    assert not part.may_be_cut(tree, greedy=True)


# --------------------------------------------------------------------------------------------- when it asks again


def rounds_until_due(known: Yield) -> int:
    for waited in range(1000):
        if known.due():
            return waited
        known.passed(asked=False)
    raise AssertionError("it is never due")


def test_waits_grow_with_trials_that_do_not_gain_and_end_with_one_that_does() -> None:
    known = Yield()
    waits = []
    for _ in range(4):
        waits.append(rounds_until_due(known))
        known.passed(asked=True, trial=True)
        known.learn([0.1], 0.1, 0, trial=True)
    assert waits == [yields.PATIENCE * factor for factor in (1, 2, 4, 8)]
    rounds_until_due(known)
    known.passed(asked=True, trial=True)
    known.learn([0.9, 0.8, 0.7], 2.4, 3, trial=True)
    assert known.due(), "one that gains is followed by another at once"
    for _ in range(3):
        known.passed(asked=True, trial=True)
        known.learn([0.9, 0.8, 0.7], 2.4, 3, trial=True)
    assert sum(known.expected(0.0)) > 2.0


def test_what_drafts_promise_is_corrected_by_what_they_add() -> None:
    honest, boastful = Yield(), Yield()
    for _ in range(6):
        honest.learn([0.5, 0.25], 0.75, 1)
        boastful.learn([0.9, 0.8, 0.7], 2.4, 0)
    assert sum(honest.expected(0.0)) == pytest.approx(0.9, abs=0.3)
    assert sum(boastful.expected(0.0)) < 0.6
    assert sum(honest.expected(0.9)) == pytest.approx(0.1 * sum(honest.expected(0.0))), "where copying is likely right"


# ------------------------------------------------------------------------------------------- one plan for a batch

CHEAP_ROWS = [1.0 + 0.02 * count for count in range(40)]
DEAR_ROWS = [1.0 + 0.4 * count for count in range(40)]


def test_the_learned_part_is_asked_where_the_batch_commits_more_per_time() -> None:
    good, bad = [0.9, 0.8, 0.7], [0.02, 0.01]
    assert learned_plan.plan([[], []], [good, bad], CHEAP_ROWS, 2.0, lambda size: 0.1 * size).asked == (0,)
    assert learned_plan.plan([[], []], [good, good], CHEAP_ROWS, 2.0, lambda size: 0.1 * size).asked == (0, 1)
    assert learned_plan.plan([[], []], [good, ()], CHEAP_ROWS, 2.0, lambda size: 0.1).asked == (0,), (
        "the other cannot be asked"
    )
    assert learned_plan.plan([[], []], [good, good], CHEAP_ROWS, 2.0, lambda size: 3.0).asked == ()
    assert learned_plan.plan([[], []], [good, good], DEAR_ROWS, 2.0, lambda size: 0.5).asked == ()


def test_a_plan_s_rounds_are_those_of_all_options_in_one_measure() -> None:
    copies, offer = [0.9, 0.8], [0.5, 0.3]
    found = learned_plan.plan([copies], [offer], CHEAP_ROWS, 1.0, lambda size: 0.2)
    assert found.asked == (0,) and found.drafting == 0.2
    assert found.alone.tokens == pytest.approx(1 + 1.7) and found.alone.steps == pytest.approx(1.04)
    assert found.best.tokens == pytest.approx(1 + 2.5) and found.best.steps == pytest.approx(1.08 + 0.2)


def test_a_token_that_a_draft_seldom_has_is_not_set_against_a_whole_row() -> None:
    """Half of the drafts have one token, half have three: their rows are two in the mean."""
    costs = [1.0, 1.15, 1.3, 1.45, 1.6]
    offer, shares = [0.7, 0.3, 0.25], [1.0, 0.5, 0.5]
    found = learned_plan.plan([[]], [offer], costs, 1.0, lambda size: 0.1, [shares])
    assert found.asked == (0,)
    assert found.best.tokens == pytest.approx(2.25) and found.best.steps == pytest.approx(1.3 + 0.1)
    whole = learned_plan.plan([[]], [offer], costs, 1.0, lambda size: 0.1)
    assert whole.best.speedup < found.best.speedup


def test_what_is_known_of_a_draft_is_how_often_it_has_each_token_too() -> None:
    known = Yield()
    for at in range(40):
        known.learn([0.6, 0.4, 0.3] if at % 2 else [0.6], 0.9, 1)
    assert known.shares[0] == pytest.approx(1.0, abs=0.01)
    assert known.shares[1] == known.shares[2] == pytest.approx(0.5, abs=0.1)
    assert len(known.shares) == len(known.expected(0.0))


def test_in_a_large_batch_as_few_requests_are_asked_for_as_are_worth_it() -> None:
    offers: list[list[float]] = [[0.9, 0.85, 0.8]] * 2 + [[0.05]] * 14
    found = learned_plan.plan(
        [[]] * 16, offers, [1.0 + 0.01 * count for count in range(80)], 16.0, lambda size: 0.02 * size
    )
    assert found.asked == (0, 1)
    assert learned_plan.plan([[]] * 16, [[0.4]] * 16, DEAR_ROWS, 16.0, lambda size: 0.3).asked == ()


def test_a_poor_part_becomes_good_when_the_text_does() -> None:
    target = wandering()
    part = Foresight(target, lambda at: at > 150)
    found = answer(target, of(target, part), length=400)
    assert part.asked < found.metrics.rounds
    assert sum(len(one.committed) for one in found.rounds[-20:]) > 3 * 20


def test_the_clock_shows_the_usual_time() -> None:
    clock = Clock()
    assert clock.seconds(1) is None
    for seconds in (1.0, 1.0):
        clock.read(1, seconds)
    assert clock.seconds(1) is None, "too few to tell"
    for seconds in (50.0, 1.0):
        clock.read(1, seconds)
    assert clock.seconds(1) == 1.0
    assert clock.seconds(4) is None


def test_reading_a_text_takes_what_texts_of_its_length_took() -> None:
    clock = Clock()
    for _ in range(3):
        clock.read(1, 1.0)
    assert clock.reading(10) == 0.0, "nothing was read yet"
    for tokens, seconds in ((10, 1.0), (12, 1.0), (300, 3.0)):
        clock.read_text(tokens, seconds)
    assert clock.seconds(1) == 1.0
    assert clock.reading(9) == 1.0
    assert clock.reading(400) == 3.0, "not thirty times what ten tokens take"
    assert clock.reading(1000) == 6.0


def test_reading_is_timed_where_every_draft_reads_a_text_first() -> None:
    target = wandering()
    method = of(target, Foresight(target, always))
    assert isinstance(method.drafter, Auto)
    times = method.drafter.times
    reset_clock(method)
    usual = times._rehearsed(1, False)
    times.took(1, 500, usual + 2.0, sampled=False)
    assert times.shared(False).clock.reading(500) == pytest.approx(2.0)


def test_a_draft_after_rounds_without_one_is_no_slower_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what was committed meanwhile. Were that a draft's time, a part that is asked now and then would be given
    up for being slow."""
    target = wandering()
    now = [0.0]

    class Reader(Foresight):
        """Takes a second to draft, and one more for each token beyond those of a round."""

        read = 2

        def propose(self, state: DraftState, budget: Budget) -> TokenTree:
            length = len(state.sequence.tokens)
            now[0] += 1.0 + max(0, length - self.read - auto_state.BESIDE)
            self.read = length
            return super().propose(state, budget)

    monkeypatch.setattr(auto_drafter, "perf_counter", lambda: now[0])
    method = of(target, Reader(target, lambda at: at % 24 < 8))
    clock = reset_clock(method)
    answer(target, method, length=400)
    assert clock.seconds(1) == 1.0
    assert clock.reading(8) > 0.0


@pytest.mark.parametrize("resting", [False, True])
def test_where_rounds_seldom_draft_no_long_text_is_read_for_it(resting: bool) -> None:
    """Reading takes eight steps, which twenty drafts repay, and few do not."""
    target = wandering()
    part = Foresight(target, always)
    method = of(target, part)
    assert isinstance(method.drafter, Auto)
    shared = method.drafter.times.shared(False)
    shared.clock.read_text(512, 16.0)
    for _ in range(200):
        shared.saw_round(drafting=not resting)
    answer(target, method, prompt=[1, 2, 3, 5] * 100, length=40)
    assert (part.asked == 0) is resting


def test_rounds_that_draft_are_told_from_those_that_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    target = wandering()
    method = of(target, Foresight(target, always))
    assert isinstance(method.drafter, Auto)
    answer(target, method)
    assert method.drafter.times.shared(False).drafting == 1.0
    monkeypatch.setattr(CostModel, "budget", lambda *given: Budget(0))
    answer(target, method)
    assert method.drafter.times.shared(False).drafting < 0.3


def test_a_first_draft_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the prompt, which no later one will."""
    ticks = iter(range(1000))
    monkeypatch.setattr(auto_drafter, "perf_counter", lambda: float(next(ticks)))
    target = wandering()
    method = of(target, Foresight(target, always))
    clock = reset_clock(method)
    answer(target, method, length=1)
    assert clock.seconds(1) is None
    answer(target, method, length=24)
    assert clock.seconds(1) == 1.0


def test_drafts_of_a_replay_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward runs between them: they take a third of what they take in decoding."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(auto_drafter, "perf_counter", lambda: float(next(ticks)))
    target = wandering()
    method = of(target, Foresight(target, never))
    clock = reset_clock(method)
    assert isinstance(method.drafter, Auto)
    shared, turns = method.drafter.times.shared(False), count()
    monkeypatch.setattr(Yield, "hoped", lambda known, copied, steps: [0.9, 0.8] if next(turns) % 2 else [])
    answers = known_answers(target, [Request((1, 2, 3), method, max_new_tokens=LENGTH)])
    replay(target, answers, method)
    assert method.drafter.parts[1].asked > 3  # type: ignore[attr-defined]
    assert clock.seconds(1) is None and not shared.after._ratios
    answer(target, method)
    assert clock.seconds(1) is not None and shared.after._ratios
    close_answers(target, answers)


def test_what_is_known_stays_in_its_namespace() -> None:
    target = wandering()
    wrong = Foresight(target, never)
    method = of(target, wrong)
    asked = []
    for namespace in ("ours", "ours", "theirs", "", ""):
        before = wrong.asked
        decoder = Decoder(target)
        decoder.submit(Request((1, 2), method, SAMPLED, max_new_tokens=30, namespace=namespace))
        decoder.run()
        asked.append(wrong.asked - before)
    assert asked[1] < asked[0] == asked[2] == asked[3] == asked[4]


# -------------------------------------------------------------------------------------------------------- batches


def test_in_a_batch_only_the_request_that_copies_drafts() -> None:
    """Rows are dear, and the learned part's draft takes longer than a step."""
    rows = torch.eye(VOCAB)
    other = random_table(VOCAB, 3, order=5)
    target = TableTarget(
        VOCAB, lambda path: rows[(path[-1] + 1) % 7] if path[0] == 9 else other(path), context_length=400
    )
    target.__dict__["costs"] = Costs(lambda rows: 1.0 + 0.12 * rows)
    part = Foresight(target, never)
    method = of(target, part, draft=1.5)
    decoder = Decoder(target)
    copying = decoder.submit(Request((9, *range(7), *range(7)), method, max_new_tokens=40))
    others = [decoder.submit(Request((1, at), method, max_new_tokens=40)) for at in (0, 20, 39)]
    decoder.run()
    assert copying.metrics.accepted > 20
    assert sum(one.metrics.drafted for one in others) < 0.3 * copying.metrics.drafted
    assert part.asked <= 3


@pytest.mark.parametrize("batch", [2, 8, 32])
def test_a_batch_whose_rows_cost_in_proportion_drafts_nothing(batch: int) -> None:
    target = wandering(proportional)
    part = Foresight(target, always)
    method = of(target, part, draft=2.0)
    decoder = Decoder(target)
    running = [decoder.submit(Request((1, one), method, max_new_tokens=20)) for one in range(batch)]
    decoder.run()
    assert all(one.metrics.drafted == 0 for one in running)
    assert part.asked == 0, "not even a trial could gain"


def test_in_a_batch_the_learned_part_drafts_where_rows_are_free() -> None:
    target = wandering(lambda rows: 1.0 + 0.001 * rows)
    method = of(target, Foresight(target, always), draft=0.1)
    decoder = Decoder(target)
    running = [decoder.submit(Request((1, one), method, max_new_tokens=40)) for one in range(4)]
    decoder.run()
    assert [one.tokens for one in running] == [plain(target, (1, one), 40) for one in range(4)]
    assert all(one.metrics.committed > 3 * one.metrics.rounds for one in running)


class Watched(Foresight):
    """Reads hidden states, and notes for how many rounds it was told that it need not."""

    aux_hidden_state_layers = (0,)

    def __init__(self, target: TableTarget) -> None:
        super().__init__(target, always)
        self.idle: list[int] = []

    def observed_layers(self, states: Seq[DraftState], idle: int) -> Seq[int]:
        self.idle.append(idle)
        return ()


def test_a_batch_that_never_asks_decides_ever_less_and_says_when_it_will(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engine.round.payoff_of", lambda target, active: None)
    target = wandering()
    part = Watched(target)
    method = of(target, part, draft=50.0)
    drafter = method.drafter
    assert isinstance(drafter, Auto)
    decided, decide = list[int](), drafter._decide

    def noted(*given: Any) -> None:
        decided.append(len(part.idle))
        decide(*given)

    monkeypatch.setattr(drafter, "_decide", noted)
    decoder = Decoder(target)

    def batch(length: int) -> None:
        for one in range(4):
            decoder.submit(Request((1, one), method, max_new_tokens=length))
        decoder.run()

    for _ in range(3):  # requests that join do not begin anew
        batch(60)
    assert part.asked == 0 and len(part.idle) > 120
    waits = [after - before for before, after in pairwise(decided)]
    assert waits[0] == 1 and waits[-1] > 20 and waits == sorted(waits)
    assert [part.idle[at] for at in decided[:-1]] == [wait - 1 for wait in waits]
    shared = drafter.times.shared(False)
    assert part.idle[-1] == shared.rounds.rests[4].left
    shared.clock = Still(0.01)
    drafter.times._steps.clear()
    batch(400)
    assert part.asked > 20, "where it gains it is asked, after the rest that was under way"


def test_a_greedy_request_beside_sampled_ones_rests_by_the_rounds_of_their_batch() -> None:
    """Greedy and sampled requests count rounds apart; a batch of both has one rest."""
    target = wandering()
    part = Watched(target)
    method = of(target, part, draft=0.1)
    drafter = method.drafter
    assert isinstance(drafter, Auto)
    drafter.times.shared(False).rounds.now = 500
    rest = drafter.times.shared(True).rounds.rest_of(2)
    rest.until = 30
    decoder = Decoder(target)
    decoder.submit(Request((1, 2), method, max_new_tokens=60))
    decoder.submit(Request((1, 3), method, SAMPLED, max_new_tokens=60, repeats=False))
    decoder.step()
    assert part.idle[0] == rest.until - 1 and part.asked == 0


def test_requests_that_must_repeat_do_not_rest_because_others_did() -> None:
    target = wandering()
    part = Watched(target)
    method = of(target, part, draft=0.1)
    drafter = method.drafter
    assert isinstance(drafter, Auto)
    drafter.times.shared(True).rounds.rest_of(2).until = 1 << 20
    decoder = Decoder(target)

    def batch() -> int:
        before = part.asked
        for one in range(2):
            decoder.submit(Request((1, one), method, SAMPLED, max_new_tokens=40))
        decoder.run()
        return part.asked - before

    asked = batch()
    idle, part.idle[:] = part.idle.copy(), []
    assert asked > 5 and batch() == asked
    assert part.idle == idle and max(idle) < 10, "both batches rest by their own rounds"


def test_a_count_of_rounds_that_must_repeat_ends_with_its_batch_also_where_the_next_rounds_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a round rests depends on a clock: what a seeded request finds may not depend on that."""
    target = wandering()
    method = of(target, Watched(target), draft=50.0)
    resting = [False]

    class Resting:
        drafts, clocked, idle = False, True, 0

        def saw(self, *of_a_round: float) -> None: ...

    monkeypatch.setattr("outpace.engine.round.payoff_of", lambda *_: Resting() if resting[0] else None)
    decoder = Decoder(target)
    greedy = decoder.submit(Request((1, 2), method, max_new_tokens=400))
    seeded = decoder.submit(Request((1, 3), method, SAMPLED, max_new_tokens=60))
    while seeded.finish_reason is None:
        decoder.step()
    assert greedy.draft_state.rounds_together is not None
    resting[0] = True
    decoder.submit(Request((1, 4), method, max_new_tokens=400))
    decoder.step()
    assert greedy.draft_state.rounds_together is None


def test_a_request_that_must_repeat_beside_another_method_s_is_decided_about_again() -> None:
    """Its round is one of several requests, and its drafter sees it alone."""
    target = wandering()
    part = Watched(target)
    method = of(target, part, draft=0.1)
    none = Method("none", NoDraft(), method.rule, Fixed(0))
    decoder = Decoder(target)
    decoder.submit(Request((1, 2), none, SAMPLED, max_new_tokens=100))
    decoder.submit(Request((1, 3), method, SAMPLED, max_new_tokens=60))
    decoder.run()
    assert part.asked > 5


def test_a_batch_that_shrinks_from_one_for_which_no_draft_gains_does_not_rest_for_what_its_head_has_not_read() -> None:
    class Late(Watched):
        """Reads what it is given from the round on in which it was told that the next may draft."""

        def ready(self, state: DraftState) -> bool:
            return bool(self.idle) and self.idle[-1] == 0

    target = wandering(lambda rows: 1.0 + 0.02 * rows if rows < 6 else 10.0 * rows)
    part = Late(target)
    method = of(target, part, draft=0.1)
    decoder = Decoder(target)
    for at in range(6):
        decoder.submit(Request((1, at), method, SAMPLED, max_new_tokens=120 if at < 2 else 40))
    decoder.run()
    shrunk = next(at for at, idle in enumerate(part.idle) if idle < 128)
    assert max(part.idle[:shrunk]) > 128, "of six requests no hidden states are read"
    assert part.asked > 5 and max(part.idle[shrunk:]) < 40


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("learned", [never, always])
def test_the_best_of_the_four_options_is_found_within_a_few_rounds(
    learned: Callable[[int], bool], copies: bool
) -> None:
    target = TableTarget(VOCAB, random_table(VOCAB, 3, order=1 if copies else 5), context_length=1000)
    target.__dict__["costs"] = Costs(cheap)
    prompt = (1, 2, 3, *plain(target)) if copies else (1, 2, 3)
    part = Foresight(target, learned)
    found = answer(target, of(target, part, draft=0.3), prompt, length=300)
    late = found.rounds[3:]
    tokens = sum(len(one.committed) for one in late)
    seconds = sum(cheap(1 + len(one.tree)) for one in late) + 0.3 * part.asked
    if copies:
        assert tokens / seconds > 10 and part.asked == 0
    elif learned is always:
        assert tokens / seconds > 2.5 and part.asked >= 0.9 * len(late)
    else:
        assert tokens / seconds > 0.94 / cheap(1), "nearly as fast as without any draft"


def test_a_worthless_drafter_takes_part_in_hardly_a_round_of_all() -> None:
    target = wandering()
    asked = rounds = 0
    for number in range(12):
        wrong = Foresight(target, never)
        rounds += answer(target, identified(target, wrong, "random"), (1, 2, number), length=100).metrics.rounds
        asked += wrong.asked
    assert asked <= 0.012 * rounds


# --------------------------------------------------------------------------------------- a part that adds nothing


def identified(target: TableTarget, learned: Drafter[Any], name: str) -> Method:
    """``auto`` as it is built anew for every request that names no namespace, with the part that ``name`` tells."""
    drafter = Auto([SuffixLookup(), learned], ["sam", "learned"], target, identity=lambda: name)
    drafter.times.shared(False).clock = Still(0.1)
    controllers = [CostModel(target.costs) for _ in range(2)]
    return Method("auto", drafter, default_rule(drafter.proposal), CombinedController(controllers, united=True))


def noisy(monkeypatch: pytest.MonkeyPatch, target: TableTarget) -> None:
    """Every round takes between 0.7 and 1.3 autoregressive steps, whoever drafts."""
    now, noise, score = [1.0], random.Random(3), target.score
    monkeypatch.setattr(auto_drafter, "perf_counter", lambda: now[0])

    def timed(batch: object, *rest: object, **named: object) -> object:
        now[0] += noise.uniform(0.7, 1.3)
        return score(batch, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "score", timed)


def test_a_head_without_training_is_left_out_after_a_few_rounds_whatever_the_clock_s_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It repeats itself now and then: copying is right.
    target = TableTarget(VOCAB, random_table(VOCAB, 5, order=4), context_length=1000)
    target.__dict__["costs"] = Costs(cheap)
    prompt = (1, 2, 3, *plain(target, length=100)[30:], 1, 2)
    expected = plain(target, prompt, 300)
    noisy(monkeypatch, target)
    wrong = Foresight(target, never)
    found = answer(target, identified(target, wrong, "random"), prompt, length=300)
    assert found.tokens == expected
    assert found.metrics.rounds > 100
    assert wrong.asked < 0.06 * found.metrics.rounds


def test_that_a_head_adds_nothing_is_remembered_across_requests_without_a_namespace() -> None:
    target = wandering()
    asked = []
    for number in range(30):
        wrong = Foresight(target, never)
        answer(target, identified(target, wrong, "random"), (1, 2, number), length=40)
        asked.append(wrong.asked)
    assert asked[0] <= 5
    assert sum(asked[3:]) <= 6, "1,080 rounds, and trials after growing intervals"
    other = Foresight(target, always)
    answer(target, identified(target, other, "another head"), length=40)
    assert other.asked >= 8, "another head's standing is its own"


def test_a_head_that_gains_is_tried_again_and_takes_part_once_more() -> None:
    target = wandering()
    for number in range(6):
        answer(target, identified(target, Foresight(target, never), "one"), (1, 2, number), length=40)
    better = Foresight(target, always)
    for _ in range(12):
        answer(target, identified(target, better, "one"), length=40)
    before = better.asked
    found = answer(target, identified(target, better, "one"), length=40)
    assert better.asked - before > 0.8 * found.metrics.rounds


@pytest.mark.parametrize("namespace", ["", "ours"])
def test_what_greedy_requests_saw_of_a_head_does_not_change_a_sampled_answer(namespace: str) -> None:
    answers = []
    for before in (0, 5):
        target = wandering()
        for number in range(before):
            answer(target, identified(target, Foresight(target, never), "one"), (1, number), length=60)
        method = identified(target, Foresight(target, lambda at: at % 2 > 0), "one")
        decoder = Decoder(target)
        found = decoder.submit(Request((1, 2), method, SAMPLED, max_new_tokens=60, namespace=namespace, trace=True))
        decoder.run()
        answers.append([(one.tree.tokens, one.committed) for one in found.rounds])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("repeats", [False, True])
def test_only_a_sampled_answer_that_must_repeat_ignores_how_long_drafts_take(repeats: bool) -> None:
    drafts = []
    for seconds in (0.1, 50.0):
        target = wandering()
        part = Foresight(target, always)
        method = identified(target, part, "one")
        assert isinstance(method.drafter, Auto)
        method.drafter.times.shared(True).clock = Still(seconds)
        decoder = Decoder(target)
        found = decoder.submit(Request((1, 2), method, SAMPLED, max_new_tokens=60, repeats=repeats, trace=True))
        decoder.run()
        drafts.append([(one.tree.tokens, one.committed) for one in found.rounds])
    assert (drafts[0] == drafts[1]) is repeats


def test_sampled_requests_learn_of_each_other_and_not_of_greedy_ones() -> None:
    target = wandering()

    def standing(sampled: bool) -> float:
        drafter = identified(target, Foresight(target, never), "one").drafter
        assert isinstance(drafter, Auto)
        return sum(Yield(drafter.times.shared(sampled).standings.of(2)).expected(0.0))

    before = standing(False), standing(True)
    decoder = Decoder(target)
    method = identified(target, Foresight(target, never), "one")
    decoder.submit(Request((1, 2), method, SAMPLED, max_new_tokens=60, repeats=False))
    decoder.run()
    assert standing(False) == before[0] and standing(True) < before[1]


def test_the_free_part_s_luck_is_not_the_head_s() -> None:
    target = TableTarget(VOCAB, random_table(VOCAB, 3, order=1))  # order 1: it runs in circles soon
    target.__dict__["costs"] = Costs(cheap)
    wrong = Foresight(target, never)
    method = identified(target, wrong, "random")
    assert isinstance(method.drafter, Auto)
    found = answer(target, method, (1, 2, 3, *plain(target)))
    assert found.metrics.committed > 2 * found.metrics.rounds
    assert sum(Yield(method.drafter.times.shared(False).standings.of(4)).expected(0.0)) <= sum(PRIOR)


def test_a_draft_is_rehearsed_once_and_leaves_no_trace() -> None:
    target = TableTarget(VOCAB, random_table(VOCAB, 3, order=5), context_length=1000)
    target.__dict__["costs"] = ForwardCosts(target)
    part = Foresight(target, always)
    method = identified(target, part, "one")
    first = answer(target, method, params=SAMPLED, length=20)
    asked = part.asked
    assert answer(target, method, params=SAMPLED, length=20).tokens == first.tokens
    rehearsal = asked - 2 * (part.asked - asked) + (part.asked - asked)
    assert 0 < rehearsal <= 16, "one rehearsal of a few rounds, in the first request"


@pytest.mark.parametrize(("sampled", "kinds"), [(True, {True}), (False, {False}), (None, {False, True})])
def test_drafts_of_greedy_and_of_sampled_requests_are_measured_as_they_are_needed(
    sampled: bool | None, kinds: set[bool]
) -> None:
    named: list[str] = []

    class Named(Costs):
        def once(self, name: str, measure: Callable[[], float]) -> float:
            named.append(name)
            return super().once(name, measure)

    target = wandering()
    target.__dict__["costs"] = Named(cheap)
    of(target, Foresight(target, always)).drafter.measure(2, sampled=sampled)
    assert {"sampled" in name for name in named} == kinds and all("for 2 " in name for name in named)


# ---------------------------------------------------------------------------------------------------- losslessness


@pytest.mark.parametrize("draft", [0.01, 3.0])
@pytest.mark.parametrize("costs", [Costs(cheap), Costs(proportional), FixedCosts()])
def test_a_seed_reproduces_its_answer_whatever_clocks_say(
    costs: AnyCosts, draft: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one table of costs; and greedy requests before it, which go by the clock, do not matter."""
    seen = []
    for seconds, clock in ((0.1, 0.0), (draft, 7.0)):
        ticks = count(step=clock)
        monkeypatch.setattr(auto_drafter, "perf_counter", partial(next, ticks))
        target = wandering()
        target.__dict__["costs"] = costs
        method = of(target, Foresight(target, lambda at: at % 3 > 0), seconds)
        for _ in range(int(clock)):
            answer(target, method, length=40)
        found = answer(target, method, params=SAMPLED, length=60)
        seen.append([(one.tree.tokens, one.committed) for one in found.rounds])
    assert seen[0] == seen[1]


def test_at_temperature_0_it_is_plain_decoding() -> None:
    greedy_is_plain("auto", {})


class Guess(Drafter[DraftState]):
    """A certain tree, another one for every context."""

    proposal = Proposal(tree=True)

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        tree, sequence = TokenTree(), state.sequence
        certain_tree(5, 3, 3)(tree, tuple(sequence.tokens), budget.depth, self.chance(sequence))
        return tree


def certain(context: Context) -> Drafter[Any]:
    return Guess()


def sampled(context: Context) -> Drafter[Any]:
    return DraftModel(context.draft())


@pytest.mark.parametrize("learned", [certain, sampled])
def test_outputs_have_the_target_s_law(learned: Callable[[Context], Drafter[Any]]) -> None:
    def make(context: Context) -> Method:
        drafter = Auto([SuffixLookup(), learned(context)], ["sam", "learned"], context.target)
        controller = CombinedController([CostModel(context.target.costs, 4), Fixed(2, max_nodes=3)], united=True)
        return Method("auto", drafter, default_rule(drafter.proposal), controller)

    certificate = certify_exact("auto", make, FEW)
    assert certificate.lossless, certificate.verdict
    assert all(check.max_abs_error is not None for check in certificate.checks), "enumerated, every one"


def test_with_a_trained_method_as_it_is_registered() -> None:
    name = learned_methods()[0]
    tiny = {name: dict(registry.find(name).tiny)}

    def make(context: Context) -> Method:
        return registry.build("auto", context, {"learned": [name], "settings": tiny})

    assert tuple(make(tiny_context(3, 0)).drafter.names) == ("sam", name)  # type: ignore[attr-defined]
    certificate = certify_exact("auto", make, FEW[:1])
    assert certificate.lossless, certificate.verdict


def test_requests_side_by_side_say_what_they_say_alone() -> None:
    target = wandering()
    target.__dict__["costs"] = FixedCosts()  # measured ones depend on the batch
    method = of(target, Foresight(target, lambda at: at % 4 > 0))
    prompts = [(1, 2), (5, 6, 7, 5, 6, 7, 5), (9,)]
    decoder = Decoder(target)
    running = [decoder.submit(Request(one, method, max_new_tokens=50)) for one in prompts]
    running.append(decoder.submit(Request((3,), method, SAMPLED, max_new_tokens=50)))
    decoder.run()
    assert [one.tokens for one in running[:3]] == [plain(target, one, 50) for one in prompts]
    assert running[3].tokens == answer(target, method, (3,), SAMPLED, 50).tokens


# ---------------------------------------------------------------------------------------------- which parts it has


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those that there are, two trained methods of toy kinds."""
    registry.methods()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    def declare(name: str, kind: str) -> None:
        @register(name, family="toy", paper="none", summary="toy", head=kind)
        def build(context: Context, settings: registry.NoSettings) -> Parts:
            context.head(kind)
            return Parts(Guess(), Fixed(2))

    declare("toy-one", "one")
    declare("toy-two", "two")


def context(
    have: Seq[str] = (), named: Seq[str] = (), *, draft: bool = False, speeds: dict[str, float] | None = None
) -> Context:
    """What is shipped or named: heads by kind. ``speeds``: what was measured, by method."""
    target = TableTarget(6)

    def bound(kind: str) -> Binding:
        return Binding(kind, kind, object, speedup=(speeds or {}).get)

    def default(kind: str, name: str) -> list[Binding]:
        return [bound(kind)] if kind in have and name in ("", kind) else []

    drafts = draft_models({"small": target} if draft else {})
    return Context(target, Bindings([*drafts, *map(bound, named)], default))


def chosen(context: Context, **settings: Any) -> str | None:
    found = learned_part(context, AutoSettings(**settings))
    return found and found[0]


def test_parts_are_what_was_named_then_what_is_shipped(methods: None) -> None:
    assert chosen(context()) is None
    assert chosen(context(["one", "two"])) == "toy-one"
    assert chosen(context(["two"])) == "toy-two"
    assert chosen(context(["one"], named=["two"])) == "toy-two"
    assert chosen(context(["one"], draft=True)) == "draft-model"
    assert chosen(context(["one"], named=["two"], draft=True)) == "toy-two"
    assert chosen(context(["one", "two"]), learned=("toy-two",)) == "toy-two"
    assert chosen(context(["one", "two"]), learned=()) is None
    assert chosen(context(["two"]), learned=("toy-one", "toy-two")) == "toy-two"


def test_of_several_heads_the_one_that_measured_best_drafts(methods: None) -> None:
    both, speeds = ["one", "two"], {"toy-one": 1.1, "toy-two": 1.3}
    assert chosen(context(both, speeds=speeds)) == "toy-two"
    assert chosen(context(both, speeds={"toy-two": 1.1})) == "toy-two"
    assert chosen(context(both, speeds=speeds), learned=("toy-one",)) == "toy-one"
    assert chosen(context(named=both, speeds=speeds)) == "toy-two"


def test_a_head_that_was_measured_not_to_gain_is_left_out(methods: None) -> None:
    both, slow = ["one", "two"], {"toy-one": 0.97, "toy-two": 1.0}
    assert chosen(context(both, speeds=slow)) is None
    assert chosen(context(named=["one"], speeds=slow)) is None
    assert chosen(context(named=["one"], draft=True, speeds=slow)) == "draft-model"
    assert chosen(context(both, speeds={"toy-one": 0.9})) == "toy-two"
    assert chosen(context(both, speeds=slow), learned=("toy-one",)) == "toy-one", "it was asked for"


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        (context(named=["three"]), {}, "of kind three"),
        (context(), {"learned": ["toy-one"]}, "'toy-one' drafts with a trained head, and none is shipped"),
        (context(), {"learned": ["nonesuch"]}, "unknown method 'nonesuch'"),
        (context(), {"settings": {"pld": {"num_draft_tokens": 2}}}, "none of auto's parts"),
        (context(), {"settings": {"sam": {"lenth": 2}}}, "lenth"),
        (context(["one"]), {"learned": ["toy-one"], "settings": {"toy-one": {"x": 1}}}, "no setting 'x'"),
        (context(), {"free": "nonesuch"}, "unknown method"),
        (context(draft=True), {"free": "draft-model"}, "samples, or runs"),
    ],
)
def test_what_cannot_be_is_refused(methods: None, given: Context, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        registry.build("auto", given, settings)


def test_a_rule_that_changes_the_output_is_refused(methods: None) -> None:
    lossy: Any = SimpleNamespace(name="lenient", lossless=False)

    @register("toy-lossy", family="toy", paper="none", summary="toy", head="one")
    def build(context: Context, settings: registry.NoSettings) -> Parts:
        return Parts(Guess(), Fixed(2), lossy)

    with pytest.raises(BadInput, match="changes the output"):
        registry.build("auto", context(["one"]), {"learned": ["toy-lossy"]})


def test_what_was_measured_is_read_beside_the_head(tmp_path: Path) -> None:
    target = wandering()
    config = plan(find_kind("eagle3"), facts(target, "toy"), size="tiny", vocabulary=16)
    rows = [{"method": "eagle3", "speedup": speed} for speed in (1.4, 1.2)] + [{"method": "other", "speedup": 2.0}]
    save(new_head(config, target, torch.arange(16)), tmp_path / "head", {})
    kept = {"weights": open_head(tmp_path / "head").files.fingerprint, "drafters": rows}
    (tmp_path / "head" / "training.json").write_text(json.dumps({"measured": {"temperature 0": kept}}))
    save(new_head(config, target, torch.arange(16)), tmp_path / "bare", {"measured": "never"})
    assert measured(open_head(tmp_path / "head"), "eagle3") == 1.4
    assert measured(open_head(tmp_path / "head"), "eagle2") is None
    for gains, expected in ((False, 0.0), (True, None)):
        folder = tmp_path / f"gains {gains}"
        save(new_head(config, target, torch.arange(16)), folder, {"trial": {"gains": gains}})
        assert measured(open_head(folder), "eagle3") == expected
    assert measured(open_head(tmp_path / "bare"), "eagle3") is None


def test_without_a_head_it_is_the_suffix_automaton_alone() -> None:
    method = registry.build("auto", context())
    assert method.drafter.names == ("sam",)  # type: ignore[attr-defined]
    assert not method.drafter.aux_hidden_state_layers
    assert not method.drafter.proposal.tree


def test_a_head_that_was_named_drafts_and_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = wandering()
    model = Model("toy", target, None, frozenset())  # type: ignore[arg-type]
    config = plan(find_kind("eagle3"), facts(target, "toy"), size="tiny", vocabulary=16)
    save(random_head(["eagle3"], target), tmp_path / "other", {})
    save(new_head(config, target, torch.arange(16)), tmp_path / "fits", {})
    method = model.method("auto", head=tmp_path / "fits")
    assert method.drafter.names == ("sam", "eagle3")  # type: ignore[attr-defined]
    assert answer(target, method, length=30).tokens == plain(target, length=30)
    with pytest.raises(BadInput, match="made for other"):
        model.method("auto", head=tmp_path / "other")
    with pytest.raises(BadInput, match="no such folder"):
        model.method("auto", head=tmp_path / "nowhere")


def test_a_round_that_rests_does_not_count_the_time_of_another() -> None:
    target = TableTarget(7, seed=3)
    standing = Standings().of(4)
    sequence = target.sequence([1, 2, 3])
    state = auto_state.AutoState(sequence, [], known=Yield(standing), began=3, most_read=None)
    state.steps = 2.0
    state.paced(1)
    seen, pace = list(state.seen), standing.pace
    state.paced(1)
    assert (state.seen, standing.pace) == (seen, pace)
