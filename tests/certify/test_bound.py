"""Level 'bound': every lossy rule keeps what it promises, and promises that are broken or loose are found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

import outpace
from outpace.acceptance.base import AcceptanceRule, Verdict
from outpace.acceptance.bounds import TOTAL_VARIATION, Bound, NodeView
from outpace.acceptance.cactus import Cactus, CactusSettings
from outpace.acceptance.fly import Fly
from outpace.acceptance.gumbel_coupling import GumbelCoupling
from outpace.acceptance.lossy import Corners
from outpace.acceptance.registry import find_rule
from outpace.acceptance.relaxed_target import Proposed
from outpace.acceptance.rollback import Rollback, RollbackSettings
from outpace.acceptance.typical import Typical
from outpace.certify import bound
from outpace.certify.bound import MATRIX, cells, certify_bound, corners_of
from outpace.certify.certificate import Certificate
from outpace.certify.exact import SAMPLING
from outpace.certify.rule_findings import RuleFindings
from outpace.certify.rule_nodes import enumerate_nodes
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import DETERMINISTIC, ROOT, Draw, TokenTree
from outpace.engine.method import Method
from outpace.methods.registry import Context, build, find
from outpace.targets.base import TreeScores
from outpace.targets.table import TableTarget

pytestmark = pytest.mark.usefixtures("one_thread")

BOUNDED = ("typical", "top-beta", "cactus", "margin", "rollback", "lantern", "grouped", "importance", "target-first")


@pytest.mark.certification
@pytest.mark.parametrize("name", BOUNDED)
def test_the_promise_holds_and_is_nearly_reached(name: str) -> None:
    found = outpace.certify("draft-model", level="bound", rule=name, cells=1)
    assert found.passed, found.verdict
    assert found.lossless is False
    assert "the bound holds" in found.verdict
    lossless = [one for one in found.bounds if one.lossless]
    assert lossless or name == "typical"
    assert all(one.total_variation < 1e-6 for one in lossless)
    others = [one for one in found.bounds if not one.lossless]
    assert all(one.holds and one.nodes > 100 for one in others)
    assert max(share for one in others for share in one.nearest) > 0.9
    assert "never near" not in found.verdict, found.verdict
    assert max(one.total_variation for one in others) > 0.01


@pytest.mark.certification
@pytest.mark.parametrize("method", ["pld", "medusa"])
def test_the_promise_holds_over_other_kinds_of_trees(method: str) -> None:
    tiny = find(method).tiny
    for name in ("typical", "target-first"):
        corner = find_rule(name, find_rule(name).settings.model_dump())  # type: ignore[attr-defined]
        found = certify_bound(method, lambda context, rule: build(method, context, tiny, rule), corner, most=1, nodes=0)
        assert found.passed, found.verdict
        assert found.bounds[0].nodes >= 3
        assert found.bounds[0].total_variation > 1e-3


@pytest.mark.certification
@pytest.mark.parametrize(
    ("method", "name", "settings"),
    [
        ("rsd", "grouped", {}),  # draws without replacement
        ("specinfer", "top-beta", {"tau": 3.0}),  # several draws, with replacement
        ("specinfer", "cactus", {}),
        ("specinfer", "importance", {"relax": 1.0, "key": 1.0}),
        ("recycling", "lantern", {}),  # deterministic trees
        ("medusa", "margin", {"theta": 0.0}),
        ("mcsjd", "rollback", {}),  # draws that outlive their round
    ],
)
def test_the_promise_holds_over_other_drafters(method: str, name: str, settings: dict[str, float]) -> None:
    """Whole outputs: each rule with a kind of draft that its own tests alone do not have, and settings that relax."""
    tiny, usual = find(method).tiny, find_rule(name).settings.model_dump()  # type: ignore[attr-defined]
    corner = find_rule(name, {**usual, **settings})
    found = certify_bound(method, lambda context, rule: build(method, context, tiny, rule), corner, most=1, nodes=0)
    assert found.passed, found.verdict
    [check] = found.bounds
    assert check.nodes >= 3
    assert check.total_variation > 1e-4  # it did relax something
    assert "was not enumerated" not in check.note
    assert "nothing was drafted" not in check.note


@pytest.mark.certification
def test_a_rule_in_the_label_is_certified_at_its_corners() -> None:
    found = outpace.certify("pld@top-beta", level="bound", cells=1)
    same = outpace.certify("pld", level="bound", rule="top-beta", cells=1)
    assert found.passed and "identical in distribution with" in found.verdict
    assert (found.verdict, found.bounds) == (same.verdict, same.bounds)


@pytest.mark.certification
@pytest.mark.parametrize("name", BOUNDED)
def test_every_promise_holds_in_all_cells(name: str) -> None:
    """What ``outpace certify pld --rule NAME --level bound`` runs."""
    found = outpace.certify("pld", level="bound", rule=name)
    assert found.passed, found.verdict
    assert "the bound holds" in found.verdict
    lossless = [one.rule for one in found.bounds if one.lossless]
    assert f"identical in distribution with {', '.join(lossless)}" in found.verdict if lossless else name == "typical"


def test_all_sampling_parameters_are_enumerated_with_settings_that_relax() -> None:
    """Of each rule with any number of such corners, and greedy requests with all."""
    drawn = {name for name, one in SAMPLING.items() if not one.greedy and not one.weighting.weighs}
    for turns in (1, 2, 3, 5):
        found = [cells(3 * turn, turn=turn, turns=turns) for turn in range(turns)]
        assert {one.sampling for each in found for one in each} == {*drawn, "greedy, penalties"}
        assert all("greedy, penalties" in [one.sampling for one in each] for each in found)
    assert cells(0, {"given": SamplingParams(0.8)}, turn=4, turns=5)[0].sampling == "given"


def test_lossless_is_not_said_where_another_rule_judged_or_nothing_was_drafted() -> None:
    """At temperature 0 lossless rules are the greedy walk."""
    greedy = {"greedy, penalties": SAMPLING["greedy, penalties"]}
    tiny, rule = find("pld").tiny, find_rule("cactus", {"delta": 0.0, "divergence": "tv"})
    found = certify_bound("pld", lambda context, one: build("pld", context, tiny, one), rule, sampling=greedy, nodes=0)
    assert found.lossless is None
    assert "no draft was judged in whole outputs with cactus(delta=0" in found.verdict
    idle = certify_bound("none", lambda context, one: build("none", context, {}, one), rule, most=1, nodes=0)
    assert idle.lossless is None
    assert "nothing was drafted" in idle.bounds[0].note


def test_nothing_is_said_of_outputs_that_could_not_be_enumerated() -> None:
    tiny = {**find("rsd").tiny, "beam": 2}  # drawn with continuous noise
    rule = find_rule("top-beta", {"tau": 0.0})
    found = certify_bound("rsd", lambda context, one: build("rsd", context, tiny, one), rule, most=1, nodes=1)
    assert found.passed
    assert "identical" not in found.verdict
    assert "whole outputs could not be enumerated with top-beta(" in found.verdict
    assert "continuous noise" in found.bounds[0].note
    exact = outpace.certify("rsd", level="bound", settings={"beam": 2}, cells=1)
    assert exact.passed and exact.lossless is None


def test_a_method_that_fails_is_no_certificate() -> None:
    def broken(context: Context, rule: AcceptanceRule) -> Method:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        certify_bound("pld", broken, find_rule("top-beta", {"tau": 0.0}), most=1, nodes=0)


@pytest.mark.certification
def test_the_controller_that_is_named_decides_how_much_is_drafted() -> None:
    found = outpace.certify("draft-model", level="bound", rule="top-beta", controller="entropy", cells=1)
    assert found.passed and any(one.total_variation > 0.0 for one in found.bounds)
    with pytest.raises(BadInput, match="oracle"):
        outpace.certify("draft-model", level="bound", rule="top-beta", controller="oracle", cells=1)


def test_a_rule_without_a_promise_passes_and_is_measured() -> None:
    found = outpace.certify("draft-model", level="bound", rule="fly", cells=2)
    assert found.passed
    assert "states no bound; whole outputs differ by up to" in found.verdict
    assert "identical in distribution with fly(entropy=1" in found.verdict
    by_rule = {one.rule: one for one in found.bounds}
    assert by_rule["fly(entropy=1, window=6)"].lossless
    assert by_rule["fly(entropy=0, window=0)"].holds is None
    assert by_rule["fly(entropy=0, window=0)"].total_variation > 0.01
    default = by_rule["fly(entropy=0.3, window=6)"]  # no draft of a toy is so long
    assert default.total_variation < 1e-6
    assert "no output differed" in default.note
    assert "not tested by outputs this short: fly(entropy=0.3, window=6)" in found.verdict
    assert not by_rule["fly(entropy=0, window=0)"].note


@pytest.mark.parametrize("name", ["rejection", "gumbel-coupling", "greedy"])
def test_a_lossless_rule_promises_identity(name: str) -> None:
    """Also one whose tokens follow from noise that it shares with the drafter, and one for temperature 0 alone."""
    found = outpace.certify("draft-model", level="bound", rule=name, cells=1)
    assert found.passed, found.verdict
    assert found.lossless
    assert found.bounds[0].limit == "0"
    assert found.bounds[0].nodes > 20


class Stubborn(GumbelCoupling):
    """Accepts what was drafted first, whatever the noise says."""

    name = "stubborn"

    def decide(self, scores, chance):  # type: ignore[no-untyped-def]
        verdict = super().decide(scores, chance)
        return verdict if verdict.path or not len(scores.tree) else Verdict((0,), scores.tree.tokens[0])


def test_a_biased_rule_that_shares_noise_is_refused() -> None:
    assert planted(Stubborn).passed is False


@pytest.mark.certification
def test_settings_that_are_given_stay() -> None:
    found = outpace.certify("pld", level="bound", rule="cactus", rule_settings={"delta": 0.3}, cells=1)
    assert {one.rule for one in found.bounds} == {
        f"cactus(delta=0.3, divergence={divergence})" for divergence in ("kl", "chi2", "tv")
    }
    assert len(corners_of(find_rule("cactus"))) == len(Cactus.corners)
    assert len(corners_of(find_rule("cactus", {"delta": 0.0, "divergence": "tv"}))) == 1


def test_settings_that_mean_lossless_are_certified_as_lossless() -> None:
    found = outpace.certify("pld", level="bound", rule="cactus", rule_settings={"delta": 0.0, "divergence": "tv"})
    assert found.passed
    assert found.lossless is True
    assert "identical in distribution" in found.verdict


def test_sampling_parameters_may_be_given() -> None:
    found = outpace.certify("pld", level="bound", rule="top-beta", params=SamplingParams(0.8, top_p=0.9), cells=1)
    assert found.passed, found.verdict
    assert found.sampling


# ------------------------------------------------------------------------------------------------ planted promises


class Overdrawn(Cactus):
    """Moves twice as much as it promises."""

    name = "overdrawn"
    aliases = ()
    corners = ({"delta": 0.05},)

    @property
    def bound(self) -> Bound:
        return Bound(super().bound.measure, "delta / 2")

    def limit(self, node: NodeView) -> float:
        return self.settings.delta / 2


class Cautious(Cactus):
    """Promises ten times what it takes."""

    name = "cautious"
    aliases = ()
    corners = ({"delta": 0.01, "divergence": "tv"},)

    @property
    def bound(self) -> Bound:
        return Bound(TOTAL_VARIATION, "10 delta")

    def limit(self, node: NodeView) -> float:
        return 10 * self.settings.delta


class LooseAboveZero(Rollback):
    """Promises nothing above temperature 0 that it could break, and what it takes at 0."""

    name = "loose-above-0"
    aliases: tuple[str, ...] = ()
    corners: ClassVar[Corners] = ({"distance": 5.0},)
    Settings = RollbackSettings

    def limit(self, node: NodeView) -> float:
        return 10.0


class OnlyInGroups(Typical):
    """Promises identity at temperature 0, and has another threshold there."""

    name = "not-greedy"
    aliases = ()
    keeps_greedy = False
    corners = ({"epsilon": 0.001, "delta": 0.001},)

    def threshold(self, node: NodeView) -> float:
        return super().threshold(node) - 1.0  # below every probability


class NeverExact(Fly):
    """Takes settings for lossless that are not."""

    name = "never-exact"
    aliases = ()
    corners = ({"entropy": 0.0, "window": 0},)

    @property
    def exact(self) -> bool:
        return self.settings.window == 0 and self._asked

    _asked = True

    def decide(self, scores, chance):  # type: ignore[no-untyped-def]
        self._asked = False
        try:
            return super().decide(scores, chance)
        finally:
            self._asked = True


def planted(rule: type, sampling: Mapping[str, SamplingParams] = MATRIX) -> Certificate:
    tiny = find("pld").tiny
    return certify_bound(
        "pld", lambda context, one: build("pld", context, tiny, one), rule(), sampling=sampling, most=2, nodes=6
    )


def test_a_rule_that_breaks_its_bound_is_refused() -> None:
    found = planted(Overdrawn)
    assert found.passed is False
    assert "the bound does not hold: overdrawn(delta=0.05" in found.verdict
    assert "limit 0.025" in found.verdict
    found = planted(OnlyInGroups, {"greedy, penalties": MATRIX["greedy, penalties"]})
    assert found.passed is False
    assert "excess negative log-likelihood" in found.verdict
    found = planted(NeverExact)
    assert found.passed is False
    assert "settings that mean lossless" in found.verdict


def test_a_rule_that_counts_the_draws_which_the_first_one_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters such as swift make more draws after an unlikely one: their number is no property of the node."""
    rule = find_rule("cactus", {"delta": 0.2, "divergence": "tv"})
    sampling = {"temperature 1": SamplingParams(temperature=1.0)}
    sound, planted = RuleFindings(rule), RuleFindings(rule)
    enumerate_nodes(sound, sampling, 12)
    assert sound.worst == 0.0

    def counted(tree: TokenTree, draws: Seq[Draw], p: TokenDistribution) -> Proposed:
        found = of(tree, draws, p)
        return replace(found, draws=sum(draw.q_row != DETERMINISTIC for draw in draws))

    of = Proposed.of
    monkeypatch.setattr(Proposed, "of", counted)
    enumerate_nodes(planted, sampling, 12)
    assert planted.worst > 1e-4
    assert "as many draws as the first one says" in planted.where


class Unlimited(Cactus):
    """Promises what is no number, or nothing at all."""

    name = "unlimited"
    aliases = ()
    corners = ({"delta": 0.05, "divergence": "tv"},)
    most = math.nan

    def limit(self, node: NodeView) -> float:
        return self.most


def test_a_limit_that_is_no_number_is_refused_and_an_infinite_one_is_never_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = planted(Unlimited)
    assert found.passed is False
    assert "a limit that is no number" in found.verdict
    monkeypatch.setattr(Unlimited, "most", math.inf)
    found = planted(Unlimited)
    assert found.passed
    assert "never near its limit" in found.verdict


class Lawless(Rollback):
    """Takes a token that a grammar forbids, where there is one."""

    name = "lawless"
    aliases: tuple[str, ...] = ()
    corners: ClassVar[Corners] = ({"distance": 5.0},)
    bounded = True

    @property
    def bound(self) -> Bound | None:  # type: ignore[override]
        return super().bound if self.bounded else None

    def greedy_limit(self, node: NodeView) -> float:
        return math.inf

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        return Verdict((), int(scores.distribution.processed([ROOT])[0].argmin()))


@pytest.mark.parametrize("bounded", [True, False])
def test_a_rule_that_commits_what_is_forbidden_is_refused(bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it promises, and though nothing of what it promises is broken."""
    monkeypatch.setattr(Lawless, "bounded", bounded)
    forbidding = {name: one for name, one in MATRIX.items() if name == "greedy, grammar"}
    tiny = find("pld").tiny
    found = certify_bound("pld", lambda context, one: build("pld", context, tiny, one), Lawless(), sampling=forbidding)
    assert found.passed is False
    assert "a token that cannot follow is committed" in found.verdict


def test_each_corner_that_relaxes_has_its_share_of_the_sampling_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, str]] = []
    monkeypatch.setattr(
        bound, "_enumerate_outputs", lambda found, make, cell, params: seen.append((found.rule.exact, cell.sampling))
    )
    for name in ("margin", "importance", "cactus"):
        seen.clear()
        certify_bound("pld", lambda context, one: build("pld", context, {}, one), find_rule(name), nodes=0)
        relaxed = {sampling for exact, sampling in seen if not exact}
        assert relaxed == {one for one, params in MATRIX.items() if not params.weighting.weighs}


def test_settings_that_mean_lossless_are_compared_in_total_variation() -> None:
    """Other divergences are squares of it: what is within rounding of 0 there may not be here."""
    scores = root_of([0.0, 0.1, 0.2], SamplingParams(temperature=1.0))
    committed = scores.p(ROOT).double() + torch.tensor([3e-4, -3e-4, 0.0])
    for divergence in ("chi2", "kl"):
        findings = RuleFindings(find_rule("cactus", {"delta": 0.0, "divergence": divergence}))
        findings.see(scores, committed, "here")
        assert findings.check().holds is False
        assert "a total variation of 0.0003" in findings.where


def test_a_distribution_that_is_no_number_breaks_the_bound() -> None:
    findings = RuleFindings(find_rule("cactus"))
    scores = root_of([0.0, 1.0, 2.0], SamplingParams(temperature=1.0))
    findings.see(scores, torch.cat([scores.p(ROOT)[:2], torch.tensor([math.nan])]), "here")
    assert findings.check().holds is False
    assert "no finite number" in findings.where


def test_what_rollback_relaxes_beside_a_certain_token_has_its_limit() -> None:
    """1 - max p is 0 in float32 there, and the other tokens' probabilities are not."""
    scores = root_of([20.0, 1.5, -2.0], SamplingParams())
    for distance, token in ((20.0, 1), (25.0, 2)):
        findings = RuleFindings(find_rule("rollback", {"distance": distance}))
        committed = torch.zeros(3, dtype=torch.float64)
        committed[token] = 1.0
        findings.see(scores, committed, "there")
        assert findings.check().holds is True, findings.where


def root_of(logits: list[float], params: SamplingParams) -> TreeScores:
    """The target's scores of a text that nothing is drafted for."""
    rows = torch.tensor([logits])
    target = TableTarget(len(logits), lambda _: rows[0])
    return TreeScores(target.sequence([0], params), TokenTree(), rows, {})


def test_a_bound_that_is_never_near_its_limit_is_reported() -> None:
    found = planted(Cautious)
    assert found.passed
    assert "never near its limit" in found.verdict
    [share] = found.bounds[0].nearest
    assert share == pytest.approx(0.1, abs=0.01)
    found = planted(LooseAboveZero)
    assert found.passed and "never near its limit" in found.verdict
    assert not [one for one in planted(Exactly).bounds if min(one.nearest, default=0.0) < 0.9]


class Exactly(Cactus):
    """Cactus as it is."""

    name = "exactly"
    aliases = ()
    corners = ({"delta": 0.05},)
    Settings = CactusSettings


@pytest.mark.parametrize("method", ["sprinter", "pad", "bild"])
def test_methods_with_gates_are_tested_where_they_are_lossless(method: str) -> None:
    found = outpace.certify(method, level="bound", cells=1)
    assert found.passed, found.verdict
    assert [one.lossless for one in found.bounds] == [True]
    assert ("states no bound" in found.verdict) == (method != "bild")
    assert "0 nodes" not in found.verdict


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("level", ["exact", "statistical", "greedy"])
def test_a_lossy_rule_is_refused_at_a_lossless_level(level: str) -> None:
    with pytest.raises(BadInput, match=f"rule 'typical' is lossy, and level '{level}' tests .*use --level bound"):
        outpace.certify("pld", level=level, rule="typical")


def test_settings_without_a_rule_are_refused() -> None:
    with pytest.raises(BadInput, match="settings of a rule belong to a rule that is given by name"):
        outpace.certify("pld", level="bound", rule_settings={"delta": 1})
