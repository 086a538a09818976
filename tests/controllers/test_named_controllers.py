"""Controllers that users name: found, checked, refused where they do not fit, and deciding as they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from outpace.certify.exact import tiny_context
from outpace.controllers.acceptance_ema import AcceptanceEma
from outpace.controllers.acceptance_record import AcceptanceRecord
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.controllers.learned_stop import StopClassifier
from outpace.controllers.named import NamedController, Setup
from outpace.controllers.oracle import Oracle, best_lengths
from outpace.controllers.policy import RankedRow, WholeRow
from outpace.controllers.predictor import (
    FreeDraft,
    GivenDraft,
    LevelSteps,
    ModelDraft,
    Predictor,
    RecordedDraft,
    nominal_costs,
    speedups,
    tokens_per_round,
)
from outpace.controllers.registry import ControllerChoice, configured, controllers, find_controller
from outpace.controllers.sv import AgreementTable, VerificationPolicy, kind_of
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.registry import build
from outpace.targets.costs import FixedCosts
from test_draft_length import flat

NAMES = {"smart", "sv", "gamma-star", "entropy", "acceptance-ema", "fallback", "learned-stop", "oracle"}


def test_all_are_found_by_name_and_alias() -> None:
    found = {kind.name: kind for kind in controllers() if kind.__module__.startswith("outpace.")}
    assert set(found) == NAMES
    written = [name for kind in found.values() for name in (kind.name, *kind.aliases)]
    assert len(written) == len(set(written))
    assert find_controller("Gamma_Star") is found["gamma-star"]
    assert find_controller("IMCSD") is found["learned-stop"]


def test_an_unknown_name_or_setting_is_refused_in_words() -> None:
    with pytest.raises(BadInput, match=r"unknown controller 'smrt'; did you mean 'smart'\?"):
        find_controller("smrt")
    with pytest.raises(BadInput, match="controller 'entropy', setting 'threshold'"):
        configured(ControllerChoice("entropy", {"threshold": "2"}))
    with pytest.raises(BadInput, match="controller 'entropy', setting 'limit'"):
        configured(ControllerChoice("entropy", {"limit": 1}))
    for name, setting in (("acceptance-ema", "initial"), ("entropy", "factor"), ("gamma-star", "c")):
        with pytest.raises(BadInput, match=f"controller '{name}', setting '{setting}': .*finite"):
            configured(ControllerChoice(name, {setting: "inf"}))
    with pytest.raises(BadInput, match="for 'outpace bench' alone"):
        configured(ControllerChoice("oracle"))


@pytest.mark.parametrize(
    ("method", "controller", "why"),
    [
        ("pld", "entropy", "no distribution to stop by"),
        ("auto", "learned-stop", "several drafters"),
        ("sampled-tree", "sv", "it samples trees"),
        ("jacobi", "smart", "neither estimates acceptance nor"),
    ],
)
def test_a_controller_that_does_not_fit_is_refused(method: str, controller: str, why: str) -> None:
    context = replace(tiny_context(3, 0), controller=ControllerChoice(controller))
    with pytest.raises(BadInput, match=f"controller '{controller}' does not fit method '{method}': .*{why}"):
        build(method, context)


def test_sv_verifies_more_of_a_draft_that_has_taken_long() -> None:
    """Of goodput the draft's time is a part, whatever is verified of it."""

    def verified(spent: float) -> int:
        policy = VerificationPolicy(AgreementTable(), lambda _: spent)
        policy.budget(Budget(8, 8, relative_costs=tuple(1.0 + 0.3 * rows for rows in range(9))))
        return next((kept for kept in range(8) if not policy.keeps(kept + 1, 0.75)), 8)

    assert 0 < verified(0.0) < verified(2.0)


def test_sv_learns_of_the_rank_that_a_token_was_drafted_with() -> None:
    """What is verified is sorted anew: the second sibling comes first where the companion prefers it."""
    table = AgreementTable()
    policy = VerificationPolicy(table, lambda _: 0.0)
    tree = TokenTree()
    for token in (3, 5):
        tree.add(ROOT, token)
    for _ in range(30):
        policy.budget(Budget(4, 4))
        kept = policy.kept(tree.only(range(2)), [(0.41, False), (0.49, False)])
        policy.learn(kept, [5])
    kind = kind_of(0.45, likeliest=False)
    assert table.rate(kind, 1, 1) > table.rate(kind, 1, 0) + 0.2


def test_sv_needs_a_second_draft_model() -> None:
    context = replace(tiny_context(3, 0), controller=ControllerChoice("sv", {"companion": "one"}))
    with pytest.raises(BadInput, match="needs a draft model named 'one' that the method does not draft with"):
        build("draft-model", context)


def test_autoregressive_decoding_keeps_its_own() -> None:
    assert build("none", replace(tiny_context(3, 0), controller=ControllerChoice("smart"))).controlled_by is None


# --------------------------------------------------------------------------------------------------- predictor


def test_steps_are_measured_only_as_far_as_asked_and_anew_after_an_interruption() -> None:
    asked: list[tuple[int, int, int]] = []

    def begin(batch: int, context: int) -> Iterator[float]:
        for level in range(1, 5):
            asked.append((batch, context, level))
            if len(asked) == 3:
                raise KeyboardInterrupt
            yield float(level)

    steps = LevelSteps(begin)
    assert list(islice(steps.of(1, 16), 2)) == [1.0, 2.0] and asked == [(1, 16, 1), (1, 16, 2)]
    with pytest.raises(KeyboardInterrupt):
        list(steps.of(1, 16))
    assert list(steps.of(1, 16)) == list(steps.of(1, 16)) == [1.0, 2.0, 3.0, 4.0]
    assert asked[3:] == [(1, 16, level) for level in range(1, 5)]
    assert next(steps.of(2, 16)) == 1.0 and asked[-1] == (2, 16, 1)


def test_a_draft_s_time_is_in_rounds_of_the_batch_or_nominal() -> None:
    measured, fixed = Predictor(flat(2.0)), Predictor(FixedCosts())
    step = flat(2.0).round_seconds(4, 16)
    assert measured.draft_steps(lambda: 0.5, 0.25, 4, 16, live=False) == pytest.approx(0.5 / step)
    assert fixed.draft_steps(lambda: 0.5, 0.25, 4, 16, live=False) == 0.25
    assert nominal_costs(9) == tuple(FixedCosts().relative(count) for count in range(10))


def test_forecasts_are_leviathan_s() -> None:
    """Equation 1 and theorem 3.8 of the paper, with a forward that costs the same for all numbers of rows."""
    alpha, c, gamma = 0.8, 0.1, 5
    predictor = Predictor(flat(1.0), ModelDraft(flat(1.0), [flat(c)]))
    found = predictor.forecast([alpha**at for at in range(1, gamma + 1)], drafted=gamma * c)
    assert found.tokens == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
    assert found.tokens == pytest.approx(tokens_per_round(alpha, gamma))
    assert found.speedup == pytest.approx((1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1)))


def test_speedups_end_behind_the_best() -> None:
    found = speedups((0.5**at for at in range(1, 100)), (1.0 + 0.2 * at for at in range(1, 100)))
    assert len(found) < 12
    assert found[0] == 1.0
    assert max(found) in found[1:4]


def test_a_record_knows_what_was_seen_and_guesses_the_rest() -> None:
    record = AcceptanceRecord(0.5)
    for _ in range(100):
        record.add(1.0, 1, task="code")
        record.add(0.0, 2, task="chat")
    assert record.rate(1, task="code") > 0.95
    assert record.rate(2, task="chat") < 0.05
    assert record.rate(1, task="code") > record.rate(3) > record.rate(2, task="chat")
    chain = record.chain(3, task="code")
    assert chain == sorted(chain, reverse=True)


# ------------------------------------------------------------------------------------------------------ policies


def setup(own: Fixed, *, tree: bool = False) -> Setup:
    return Setup("any", FixedCosts(), own, FreeDraft(), Proposal(tree=tree))


def test_the_moving_average_follows_acceptance() -> None:
    controller = AcceptanceEma(setup(Fixed(12, max_nodes=12)), AcceptanceEma.Settings.model_validate({}))
    policy = controller.policy(None, sampled=False)
    assert policy is not None

    def depth() -> int:
        return policy.budget(Budget(12, 12)).depth

    before = depth()
    for _ in range(20):
        policy.learn(TokenTree.chain(range(8)), [*range(8), 99])
    assert depth() == 9 > before
    for _ in range(20):
        policy.learn(TokenTree.chain(range(8)), [99])
    assert depth() == 1


def test_rows_state_what_policies_ask() -> None:
    import torch

    whole = WholeRow(lambda: torch.tensor([0.1, 0.6, 0.3, 0.0]))
    ranked = RankedRow([0.6, 0.3])  # the rest, 0.1, counts as one token
    for row in (whole, ranked):
        assert row.highest == pytest.approx(0.6)
        assert row.margin == pytest.approx(0.3)
        assert row.entropy == pytest.approx(0.8979, abs=1e-4)


def run(method: Method, length: int = 24) -> Any:
    context = tiny_context(5, 2)
    decoder = Decoder(context.target)
    generation = decoder.submit(Request((0, 1, 2), method, SamplingParams(), max_new_tokens=length))
    decoder.run()
    return generation


def made(controller: str, settings: dict[str, Any] | None = None, *, bench: bool = False) -> Method:
    context = replace(tiny_context(5, 2), controller=ControllerChoice(controller, settings or {}, bench=bench))
    return build("draft-model", context, {"num_draft_tokens": 8})


@pytest.mark.parametrize("steps", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.2, 1.9, 4.0], [1.0, 2.5, 3.0, 9.0]])
def test_the_oracle_s_lengths_take_the_least_time(steps: list[float]) -> None:
    accepted = {0: 3, 4: 0, 5: 2, 8: 1, 10: 0}
    able = {0: 3, 1: 2, 2: 1, 3: 0, 4: 0, 5: 2, 6: 1, 7: 0, 8: 1, 9: 0, 10: 0}

    def least(place: int) -> float:
        if place >= 11:
            return 0.0
        return min(steps[length] + least(place + length + 1) for length in range(able[place] + 1))

    found, place, spent = best_lengths(accepted, steps), 0, 0.0
    while place < 11:
        assert found[place] <= able[place]
        spent += steps[found[place]]
        place += found[place] + 1
    assert spent == pytest.approx(least(0))
    assert best_lengths({}, steps) == {}


def test_the_oracle_drafts_what_is_accepted_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Oracle, "_steps", lambda self: [1.0] * 17)
    method = made("oracle", bench=True)
    first: list[Any] = []
    controller = method.controller
    assert hasattr(controller, "rehearse")
    controller.rehearse(lambda: first.append(run(method)))
    again = run(method)
    assert again.tokens == first[0].tokens
    assert again.metrics.rounds == first[0].metrics.rounds
    assert again.metrics.drafted == again.metrics.accepted == first[0].metrics.accepted
    assert first[0].metrics.drafted > first[0].metrics.accepted > 0
    with pytest.raises(BadInput, match="for temperature 0"):
        method.rule_for(SamplingParams(temperature=1.0))


def test_the_oracle_drafts_less_where_drafts_take_longer_than_they_save() -> None:
    method = made("oracle", bench=True)
    controller = method.controller
    assert isinstance(controller, Oracle)
    controller.setup = replace(controller.setup, drafting=GivenDraft(3.0))
    controller.rehearse(lambda: run(method))
    assert run(method).metrics.drafted == 0


def test_a_threshold_of_entropy_ends_drafts() -> None:
    broad, narrow = run(made("entropy", {"threshold": 0.0})), run(made("entropy", {"threshold": 1.0}))
    assert broad.tokens == narrow.tokens
    assert narrow.metrics.drafted == 0 < broad.metrics.drafted


def test_smart_drafts_less_where_rows_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = run(made("smart"))
    monkeypatch.setattr("outpace.targets.cost_protocol.NOMINAL", 0.6)
    dear = run(made("smart"))
    assert dear.tokens == cheap.tokens
    assert dear.metrics.drafted < cheap.metrics.drafted


@pytest.mark.parametrize(("together", "goes_on"), [(False, False), (True, True)])
def test_smart_charges_a_parallel_draft_once(*, together: bool, goes_on: bool) -> None:
    costs = FixedCosts()
    one = replace(
        setup(Fixed(8, max_nodes=8)), asks_policy=True, drafting=RecordedDraft(costs, lambda: 1.0, together=together)
    )
    kind = find_controller("smart")
    controller = kind(one, kind.Settings())
    policy = controller.policy(controller.memory(), sampled=False)
    assert policy is not None
    policy.budget(replace(controller.budget(RequestMetrics(), 1), level_steps=0.5))
    policy.draws(ROOT, None, 1, RankedRow([0.95]))
    # Half a step for a second level is more than it brings; there is none to pay where it has been drafted already.
    assert policy.runs(2) == goes_on


def test_the_classifier_of_learned_stop_begins_with_the_largest_probability_and_learns_from_verdicts() -> None:
    classifier = StopClassifier(0.1)
    sure, unsure = (classifier.features(RankedRow([highest, 0.1]), 2) for highest in (0.8, 0.2))
    assert classifier.probability(sure) == pytest.approx(0.8)
    assert classifier.probability(unsure) == pytest.approx(0.2)
    for _ in range(400):
        classifier.learn(sure, accepted=False)
        classifier.learn(unsure, accepted=True)
    assert classifier.probability(sure) < 0.2 < 0.8 < classifier.probability(unsure)
    kept = StopClassifier(0.0)
    kept.learn(sure, accepted=False)
    assert kept.probability(sure) == pytest.approx(0.8)


def test_gamma_star_reads_alpha_and_c() -> None:
    kind = find_controller("gamma-star")

    def length(**given: float) -> int:
        return kind(setup(Fixed(16, max_nodes=16)), kind.Settings(**given)).budget(RequestMetrics(), 1).depth

    assert length(alpha=0.9, c=0.01) > length(alpha=0.6, c=0.01) > length(alpha=0.6, c=0.2) > 0
    assert length(alpha=0.1, c=0.5) == 0
    # With a c that is given, too, 4 % more tokens are not enough to draft.
    free = replace(setup(Fixed(16, max_nodes=16)), target=flat(1.0))
    for given in ({}, {"c": 0.0}):
        assert kind(free, kind.Settings(alpha=0.04, **given)).budget(RequestMetrics(), 1).depth == 0


def test_every_controller_says_what_it_is() -> None:
    for kind in controllers():
        assert issubclass(kind, NamedController)
        public = kind.public()
        assert public["summary"].endswith(".") and public["fits"] and public["paper"]
        assert all(one["meaning"] for one in public["settings"].values())


def test_fallback_ends_a_draft_by_its_whole_probability_and_follows_what_was_accepted() -> None:
    kind = find_controller("llmcad")
    asking = replace(setup(Fixed(16, max_nodes=16)), asks_policy=True)
    controller = kind(asking, kind.Settings.model_validate({"threshold": 0.3}))
    policy = controller.policy(controller.memory(), sampled=False)
    assert policy is not None
    for broad in (0.1, 0.9):  # the first token is drafted whatever it is
        policy.budget(controller.budget(RequestMetrics(), 1))
        assert policy.draws(ROOT, None, 1, RankedRow([broad]))
    assert policy.draws(0, ROOT, 2, RankedRow([0.5]))  # 0.45
    assert not policy.draws(1, 0, 3, RankedRow([0.6]))  # 0.27
    tree = TokenTree.chain([5, 6])

    def threshold(committed: tuple[int, ...], drafted: TokenTree = tree) -> float:
        policy.learn(drafted, committed)
        return float(policy.threshold)  # type: ignore[attr-defined]

    assert threshold((5, 6, 7)) == pytest.approx(0.15)
    assert threshold((5, 9)) == pytest.approx(0.15 / 0.5**0.5)
    assert threshold((3,), TokenTree()) == pytest.approx(0.15 / 0.5**0.5)
    for _ in range(20):
        threshold((9,))
    assert threshold((9,)) == 0.95


def test_fallback_drafts_less_with_a_higher_threshold() -> None:
    bold = run(made("fallback", {"threshold": 0.01, "factor": 1}))
    careful = run(made("fallback", {"threshold": 0.9, "factor": 1}))
    assert bold.tokens == careful.tokens
    assert 0 < careful.metrics.drafted < bold.metrics.drafted
