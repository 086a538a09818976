"""Rounds of several requests draft where that was seen to be worth it, and their answers stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from itertools import pairwise
from time import sleep

import pytest

from outpace.acceptance.base import Verdict
from outpace.acceptance.margin import Margin
from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.base import Budget, Controller
from outpace.controllers.fixed import Fixed
from outpace.controllers.payoff import SOON
from outpace.core.chance import Chance
from outpace.core.metrics import RequestMetrics
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import DraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.engine.worth_drafting import payoff_of
from outpace.targets.costs import ForwardCosts
from outpace.targets.table import TableTarget, random_table
from support import Path, Toy

TABLE = random_table(9, 4)
PROMPTS = ((1, 2), (5,), (3, 3, 4))


class FreeRows(Controller):
    """States what a shared round costs: rows are free, so only what rounds show speaks against drafts."""

    def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
        return Budget(4, 4, relative_costs=(1.0,) * 20, base_tokens=batch)


class Timed(Toy):
    """Drafts the target's own answer, and takes ``seconds`` for it."""

    states_draft_steps = True

    def __init__(self, seconds: float) -> None:
        super().__init__(_own_answer, Proposal())
        self.seconds, self.proposed = seconds, 0

    def propose_batch(self, states: Seq[DraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        self.proposed += 1
        sleep(self.seconds)
        return list(super().propose_batch(states, budgets))


def _own_answer(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
    node, path = ROOT, tokens
    for _ in range(depth):
        token = int(TABLE(path).argmax())
        node, path = tree.add(node, token, path_acceptance_prob=0.9), (*path, token)


class Clocked(TableTarget):
    """A toy target whose decisions may go by a clock."""

    def __init__(self) -> None:
        super().__init__(9, TABLE)
        self.costs.fixed = False


def answers(drafter: Timed, prompts: Seq[tuple[int, ...]] = PROMPTS, length: int = 400) -> list[Generation]:
    decoder = Decoder(Clocked())
    made = Method("toy", drafter, RecursiveRejection(), FreeRows())
    found = [decoder.submit(Request(one, made, max_new_tokens=length)) for one in prompts]
    decoder.run()
    return found


def test_a_batch_gives_up_drafts_that_take_longer_than_they_save() -> None:
    slow, quick = Timed(0.02), Timed(0.0)
    given_up, kept = answers(slow), answers(quick)
    assert [one.tokens for one in given_up] == [one.tokens for one in kept]
    assert slow.proposed < 60  # 32 rounds to begin with, and a trial
    assert given_up[0].metrics.rounds > 90
    alone = Timed(0.002)
    [one] = answers(alone, PROMPTS[:1])
    assert one.tokens == kept[0].tokens
    assert alone.proposed >= one.metrics.rounds - 1  # of one request its drafter's own estimates decide


class StatedCosts(ForwardCosts):
    """Forwards whose rows cost what they are said to, where those of a plain round cost 1."""

    def __init__(self, each: float) -> None:
        super().__init__(TableTarget(3))
        self.each = each

    def forward(self, rows: Seq[int], contexts: Seq[int]) -> float:
        return 1.0 + self.each * (sum(rows) - len(rows))


SEEDED = SamplingParams(temperature=0.7, seed=3)


def seeded(drafter: Timed, each: float, prompts: Seq[tuple[int, ...]] = PROMPTS) -> list[Generation]:
    target = Clocked()
    target.__dict__["costs"] = StatedCosts(each)
    decoder = Decoder(target)
    made = Method("toy", drafter, RecursiveRejection(), FreeRows())
    found = [decoder.submit(Request(one, made, SEEDED, max_new_tokens=200)) for one in prompts]
    decoder.run()
    return found


def test_answers_that_must_repeat_rest_by_costs_alone() -> None:
    dear, slow, again = Timed(0.0), Timed(0.003), Timed(0.0)
    found = [seeded(one, each) for one, each in ((dear, 0.5), (slow, 0.0), (again, 0.0))]
    rounds = found[0][0].metrics.rounds
    assert dear.proposed < rounds / 2, "four rows a request at half a step each give at most four tokens more"
    assert slow.proposed > 0.9 * found[1][0].metrics.rounds, "no clock says that drafts take longer than they save"
    assert slow.proposed == again.proposed and [one.tokens for one in found[1]] == [one.tokens for one in found[2]]
    before = dear.proposed
    repeated = seeded(dear, 0.5)
    assert dear.proposed == 2 * before, "what an earlier batch has found does not count"
    assert [one.tokens for one in repeated] == [one.tokens for one in found[0]]


def test_a_request_that_joins_one_that_must_repeat_goes_by_what_their_batch_has_found() -> None:
    target, drafter = Clocked(), Timed(0.0)
    decoder = Decoder(target)
    made = Method("toy", drafter, RecursiveRejection(), FreeRows())
    active = [decoder.submit(Request((1,), made, SEEDED, max_new_tokens=5)) for _ in range(2)]
    known = payoff_of(target, active)
    joined, other = [decoder.submit(Request((1,), made, max_new_tokens=5)) for _ in range(2)]
    assert payoff_of(target, [joined, active[1]]) is known
    assert payoff_of(target, [joined, other]) is not known, "none of them must repeat"


def test_what_a_batch_found_is_forgotten_once_no_answer_of_it_must_repeat() -> None:
    target = Clocked()
    decoder = Decoder(target)
    made = Method("toy", Timed(0.0), RecursiveRejection(), FreeRows())
    greedy, seeded, other = [
        decoder.submit(Request((1,), made, params, max_new_tokens=5)) for params in (SamplingParams(), SEEDED, SEEDED)
    ]
    known = payoff_of(target, [greedy, seeded])
    payoff_of(target, [greedy])
    assert payoff_of(target, [greedy, other]) is not known
    known = payoff_of(target, [greedy, other])
    payoff_of(target, [greedy, decoder.submit(Request((1,), made, max_new_tokens=5))])
    assert payoff_of(target, [greedy, seeded]) is not known


def test_without_a_clock_what_a_drafter_says_of_its_drafts_counts() -> None:
    class Slow(Timed):
        def draft_steps(self, states: Seq[DraftState]) -> float:
            return 4.0

    free, slow = Timed(0.0), Slow(0.0)
    rounds = [seeded(one, 0.0)[0].metrics.rounds for one in (free, slow)]
    assert free.proposed > 0.9 * rounds[0] and slow.proposed < rounds[1] / 2


def test_batches_without_a_clock_do_not_rest_where_it_is_not_known_what_drafts_take() -> None:
    class Network(Timed):
        states_draft_steps = False

    decoder = Decoder(Clocked())
    for drafter, rests in ((Timed(0.0), True), (Network(0.0), False)):
        made = Method("toy", drafter, RecursiveRejection(), FreeRows())
        active = [decoder.submit(Request((1,), made, SEEDED, max_new_tokens=5)) for _ in range(2)]
        assert (payoff_of(decoder.target, active) is not None) is rests


def test_a_smaller_batch_finds_out_for_itself_and_a_larger_one_believes() -> None:
    slow = Timed(0.02)
    answers(slow)
    larger = slow.proposed
    answers(slow, (*PROMPTS, (7, 2)), length=SOON - 2)  # nothing yet that a trial could follow
    assert slow.proposed == larger
    answers(slow, PROMPTS[:2])
    assert slow.proposed > larger + 20  # its own first rounds, not a trial of a batch at rest


def test_rounds_without_drafts_keep_what_drafters_know() -> None:
    """Every second round, so that drafters see rounds that they did not draft for."""

    class EverySecond:
        drafts = True
        idle = 0
        clocked = True

        def __init__(self, like: object, *, clocked: bool) -> None:
            """None is known."""

        def saw(self, tokens: float, seconds: float, drafting: float, joined: float, expected: float) -> None:
            self.drafts = not self.drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.engine.worth_drafting.Payoff", EverySecond)
        drafter = Timed(0.0)
        found = answers(drafter, length=60)
    assert [one.tokens for one in found] == [one.tokens for one in answers(Timed(0.0), length=60)]
    assert 0 < drafter.proposed <= 1 + max(one.metrics.rounds for one in found) // 2


def test_a_batch_at_rest_says_for_how_long() -> None:
    """So that drafters leave out what they would read for their drafts alone."""
    told = list[tuple[int, int, int]]()

    class Reader(Timed):
        aux_hidden_state_layers = (0,)

        def observed_layers(self, states: Seq[DraftState], idle: int) -> Seq[int]:
            told.append((len(states), self.proposed, idle))
            return ()

    answers(Reader(0.02))
    rounds = [(one, other) for one, other in pairwise(told) if one[0] == other[0] == 3]
    assert all(idle == 0 for (_, before, _), (_, proposed, idle) in rounds if before < proposed), "it drafts"
    assert max(idle for *_, idle in told) > 10
    assert all(after == idle - 1 for (*_, idle), (*_, after) in rounds if idle)


@pytest.mark.parametrize("reads", [False, True])
def test_drafters_are_told_which_rounds_rested(reads: bool) -> None:
    """Those in which nobody was asked for a draft, and whose hidden states nobody read."""
    told = Counter[str]()

    class Told(Timed):
        aux_hidden_state_layers = (0,) if reads else ()

        def propose_batch(self, states: Seq[DraftState], budgets: Seq[Budget]) -> list[TokenTree]:
            told["asked"] += 1
            return super().propose_batch(states, budgets)

        def observe_batch(self, states: Seq[DraftState], verdicts: Seq[Verdict]) -> None:
            told["observed"] += 1

        def rested(self, states: Seq[DraftState], verdicts: Seq[Verdict]) -> None:
            told["rested"] += 1
            assert len(states) == len(verdicts) and not any(len(one.path) for one in verdicts)

    found = answers(Told(0.02))
    assert told["asked"] + told["rested"] <= told["observed"] + told["rested"] == found[0].metrics.rounds
    assert (told["rested"] == 0) == reads
    assert reads or told["rested"] > 50


def test_a_method_whose_controller_adapts_rests_too() -> None:
    class Adapts(Fixed):
        adapts = True

    made = [Method("toy", Timed(0.0), RecursiveRejection(), one(3)) for one in (Fixed, Adapts)]
    decoder = Decoder(Clocked())
    for method, rests in zip(made, (False, True), strict=True):
        active = [decoder.submit(Request((1,), method, max_new_tokens=5)) for _ in range(2)]
        assert (payoff_of(decoder.target, active) is not None) == rests
        active = [decoder.submit(Request((1,), method, SEEDED, max_new_tokens=5)) for _ in range(2)]
        assert payoff_of(decoder.target, active) is None, "without a clock it is not known what its drafts take"


def test_where_nothing_is_measured() -> None:
    target, drafter = Clocked(), Timed(0.0)
    decoder = Decoder(target)
    adaptive = Method("toy", drafter, RecursiveRejection(), FreeRows())
    fixed = Method("toy", Timed(0.0), RecursiveRejection(), Fixed(3))
    other = Method("toy", Timed(0.0), RecursiveRejection(), FreeRows())

    def of(*methods: Method, temperature: float = 0.0, repeats: bool = True, at: Clocked = target) -> bool:
        params = SamplingParams(temperature=temperature)
        asked = [Request((1,), one, params, max_new_tokens=5, repeats=repeats) for one in methods]
        active = [decoder.submit(one) for one in asked]
        return payoff_of(at, active) is not None

    assert of(adaptive, adaptive)
    assert of(adaptive, adaptive, temperature=0.8, repeats=False)
    assert of(adaptive, adaptive, temperature=0.8)
    lossy = Method("toy", Timed(0.0), Margin(), FreeRows())
    assert of(lossy, lossy, temperature=0.8, repeats=False)
    assert of(lossy, lossy)
    assert not of(adaptive)
    assert not of(fixed, fixed)
    assert not of(adaptive, other)
    nominal = Clocked()
    nominal.costs.fixed = True
    assert not of(adaptive, adaptive, at=nominal)


def test_greedy_answers_of_lossy_rules_do_not_depend_on_what_others_did() -> None:
    """Which rounds rest would decide them."""
    decoder = Decoder(Clocked())
    lossy = Method("toy", Timed(0.0), Margin(), FreeRows())

    def known() -> object:
        return payoff_of(decoder.target, [decoder.submit(Request((1,), lossy, max_new_tokens=5)) for _ in range(2)])

    assert known() is not known()


def test_a_round_that_measures_costs_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the measuring takes is no draft's time, and no forward's."""
    target = Clocked()
    seen: list[float] = []
    told: list[int] = []

    class Watched:
        drafts = True
        idle = 0
        clocked = True

        def __init__(self, like: object, *, clocked: bool) -> None:
            """None is known."""

        def saw(self, tokens: float, seconds: float, drafting: float, joined: float, expected: float) -> None:
            seen.append(seconds)

    class Measuring(FreeRows):
        """Measures when it is first asked, as costs of a new size of batch are."""

        measured = 0

        def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
            if not self.measured:
                self.measured = 1
                sleep(0.2)
            return super().budget(metrics, batch, repeatable)

    controller = Measuring()
    costs = type(target.costs)
    monkeypatch.setattr(costs, "measurements", property(lambda _: controller.measured))
    monkeypatch.setattr(costs, "took", lambda _, rows, *rest, **named: told.append(rows))
    monkeypatch.setattr("outpace.engine.worth_drafting.Payoff", Watched)
    decoder = Decoder(target)
    made = Method("toy", Timed(0.0), RecursiveRejection(), controller)
    found = [decoder.submit(Request(one, made, max_new_tokens=40)) for one in PROMPTS]
    decoder.run()
    rounds = max(one.metrics.rounds for one in found)
    assert len(seen) == len(told) == rounds - 1
    assert max(seen) < 0.2


def test_no_request_beside_one_that_must_repeat_goes_by_a_clock() -> None:
    """Their rows are shared out together."""
    asked: list[bool] = []

    class Asked(FreeRows):
        def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
            asked.append(repeatable)
            return super().budget(metrics, batch, repeatable)

    decoder = Decoder(Clocked())
    made = Method("toy", Timed(0.0), RecursiveRejection(), Asked())
    decoder.submit(Request((1, 2), made, max_new_tokens=12))
    decoder.submit(Request((5,), made, SamplingParams(temperature=0.8, seed=1), max_new_tokens=2))
    decoder.step()
    assert len(asked) > 1 and all(asked)
    decoder.run()
    assert asked[-1] is False
