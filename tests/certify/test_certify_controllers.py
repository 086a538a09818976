"""No controller changes the output of a lossless method; those that look at a drawn token are caught."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from outpace.certify.exact import NEIGHBOURS, TOLERANCE, Make, Setting, certify_exact, tiny_context
from outpace.controllers.base import Budget
from outpace.controllers.named import NamedController
from outpace.controllers.registry import ControllerChoice, controllers
from outpace.controllers.sv import AgreementTable, SpeculativeVerification
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.companion import chain_prefix, overlap
from outpace.drafting.controlled import ControlledDrafter, ControlledState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.registry import Context, MethodInfo, build, find, methods
from rotation import SEED

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "draft-model": [{}, {"topk": 2, "max_nodes": 4}, {"mode": "mixed", "topk": 2, "max_nodes": 3}],
    "eagle3": [{}, {"mode": "chain"}, {"mode": "sampled", "branching": (2,)}],
    "dflash": [{}, {"sampled": False}],
}
"""Settings that change how a method draws: each way of drawing asks the controller at another place."""

WHERE = {
    "sad": [Setting("penalties", 3, 4, (0, 1, 2, 0, 1), NEIGHBOURS[0], 20)],
    "grammar": [Setting("grammar", 3, 3, (0, 1, 2, 0, 1), NEIGHBOURS[0], 32)],
    "lookahead": [Setting("top-k 2", 4, 3, (0, 1, 2, 0, 1), NEIGHBOURS[0], 8)],
}
"""Further cells, in which methods draft that do not in those of all."""


def own() -> list[type[NamedController]]:
    """Without those that tests define."""
    return [one for one in controllers() if one.__module__.startswith("outpace.") and not one.bench_only]


def make(method: str, controller: str, settings: dict[str, Any], own: dict[str, Any] | None = None) -> Make:
    choice = ControllerChoice(controller, own or {})
    return lambda context: build(method, replace(context, controller=choice), settings)


def pairs() -> Iterator[tuple[MethodInfo, str, dict[str, Any]]]:
    """Every lossless method under every controller that fits it."""
    for info in methods():
        if not info.lossless or info.name == "none" or not info.build.__module__.startswith("outpace."):
            continue
        for kind in own():
            for variant in VARIANTS.get(info.name, [{}]):
                settings = {**info.tiny, **variant}
                try:
                    make(info.name, kind.name, settings)(tiny_context(3, 0))
                except BadInput as refusal:
                    assert f"controller '{kind.name}'" in str(refusal)
                    continue
                yield info, kind.name, settings


def cells(samplings: Seq[str], seeds: Seq[int] = (8,), neighbour: str = NEIGHBOURS[0]) -> list[Setting]:
    return [Setting(sampling, 3, 3, (0, 1, 2), neighbour, seed) for sampling in samplings for seed in seeds]


def certified(
    method: str, controller: str, settings: dict[str, Any], where: list[Setting], *, drafts: bool = True
) -> None:
    """``drafts``: whether something must be drafted in one of the cells."""
    certificate = certify_exact(method, make(method, controller, settings), where, samples=800, alpha=1e-4)
    idle = certificate.lossless is None and "drafted nothing" in certificate.verdict
    assert certificate.lossless is True or (idle and not drafts), certificate


@pytest.mark.parametrize("method", ["lookahead", "taskspec"])
def test_what_a_companion_may_not_cut_is_verified_whole(method: str) -> None:
    """Deterministic draft tokens beside auxiliary ones, and of a part of a method that also samples."""
    copies = {"parts": ("pld", "draft-model"), "policy": "ucb", "window": 64}  # the first part drafts all the time
    settings = {**find(method).tiny, **(copies if method == "taskspec" else {})}
    drafted = []
    for controller in ("sv", "gamma-star"):
        context = tiny_context(3, 8)
        decoder = Decoder(context.target)
        made = make(method, controller, settings)(context)
        one = decoder.submit(Request((0, 1, 2, 0, 1), made, SamplingParams(temperature=0.5, seed=3), 40))
        decoder.run()
        drafted.append(one.metrics.drafted)
    assert min(drafted) > 10, drafted


def test_a_slice_of_all_methods_and_controllers() -> None:
    found = list(pairs())
    assert len(found) > 120
    assert {controller for _, controller, _ in found} == {kind.name for kind in own()}
    for info, controller, settings in random.Random(SEED).sample(found, 4):
        certified(info.name, controller, settings, cells(["temperature 1"], (SEED % 50,)), drafts=False)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [pytest.param(one, id=f"{one[0].name}-{one[1]}-{one[2]}") for one in pairs()])
def test_every_method_under_every_controller(pair: tuple[MethodInfo, str, dict[str, Any]]) -> None:
    info, controller, settings = pair
    few = cells(["top-p 0.8", "greedy, penalties"], (8,)) + cells(["top-k 2"], (3,), NEIGHBOURS[1])
    certified(info.name, controller, settings, few + WHERE.get(info.name, []))


SHARP: dict[str, dict[str, Any]] = {"entropy": {"threshold": 0.62}, "learned-stop": {"threshold": 0.75, "rate": 1.0}}
"""Settings with which the rows of toy models end some drafts and not others."""


@pytest.mark.parametrize("controller", [kind.name for kind in own()])
def test_a_sampled_chain_is_exact_under_every_controller(controller: str) -> None:
    made = make("draft-model", controller, {"num_draft_tokens": 3}, SHARP.get(controller))
    certificate = certify_exact(controller, made, cells(["temperature 1", "user's processor"]))
    assert certificate.lossless is True, certificate
    assert certificate.max_abs_error is not None
    assert certificate.max_abs_error < TOLERANCE


@pytest.mark.parametrize("controller", ["entropy", "learned-stop"])
def test_policies_end_some_drafts_and_not_others(controller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise their certificates would show nothing."""
    answers = set()
    draws = Budget.draws

    def watched(budget: Budget, *asked: Any) -> bool:
        answer = draws(budget, *asked)
        answers.add(answer)
        return answer

    monkeypatch.setattr(Budget, "draws", watched)
    made = make("draft-model", controller, {"num_draft_tokens": 3}, SHARP[controller])
    assert certify_exact(controller, made, cells(["temperature 1"])).lossless is True
    assert answers == {True, False}


# ------------------------------------------------------------------------------------------------------ planted


class _Peeking(ControlledDrafter):
    """Cuts a sampled chain at the first token that the companion finds less likely than the drafter."""

    def _cut(self, state: ControlledState, found: TreeDistribution) -> TokenTree:
        tree = state.tree
        for at, draw in enumerate(tree.draws):
            if at and tree.q_rows[draw.q_row].prob(draw.token) > found.at(draw.parent)[draw.token]:
                return chain_prefix(tree, at)
        return tree


class _OwnToken(_Peeking):
    """The same for the first token, so that its own value decides whether it is verified."""

    def _cut(self, state: ControlledState, found: TreeDistribution) -> TokenTree:
        draw = state.tree.draws[0]
        q = state.tree.q_rows[draw.q_row]
        return chain_prefix(state.tree, 0) if q.prob(draw.token) > found.at(draw.parent)[draw.token] else state.tree


class _LooksAhead(ControlledDrafter):
    """Cuts a chain to the length with the largest overlaps of all: those behind a draw depend on the draw."""

    def _cut(self, state: ControlledState, found: TreeDistribution) -> TokenTree:
        tree = state.tree
        rows = [(tree.q_rows[draw.q_row], found.at(draw.parent)) for draw in tree.draws]
        overlaps = [overlap(after, q.distribution(after)) for q, after in rows]
        return tree if len(overlaps) > 1 and overlaps[1] > overlaps[0] else chain_prefix(tree, 0)


class _Honest(ControlledDrafter):
    """Cuts each draw by the overlap before it."""

    def _cut(self, state: ControlledState, found: TreeDistribution) -> TokenTree:
        tree = state.tree
        for at, draw in enumerate(tree.draws):
            after = found.at(draw.parent)
            if overlap(after, tree.q_rows[draw.q_row].distribution(after)) < 0.6:
                return chain_prefix(tree, at)
        return tree


def planted(kind: type[ControlledDrafter]) -> Make:
    def made(context: Context) -> Method:
        honest = make("draft-model", "sv", {"num_draft_tokens": 2})(context)
        drafter, controller = honest.drafter, honest.controller
        assert isinstance(drafter, ControlledDrafter)
        assert isinstance(controller, SpeculativeVerification)
        return replace(honest, drafter=kind(drafter.inner, controller, drafter.companion))

    return made


TABLES = cells(["top-k 2"], (3, 8, 9))


@pytest.mark.parametrize("kind", [_Peeking, _OwnToken, _LooksAhead])
def test_a_controller_that_looks_at_what_was_drawn_is_caught(kind: type[ControlledDrafter]) -> None:
    certificate = certify_exact(kind.__name__, planted(kind), TABLES)
    assert certificate.lossless is False, certificate
    assert certificate.max_abs_error is not None
    assert certificate.max_abs_error > 20 * TOLERANCE


def test_the_same_cut_by_what_is_known_before_the_draw_passes() -> None:
    certificate = certify_exact("honest", planted(_Honest), TABLES)
    assert certificate.lossless is True, certificate


def test_sv_cuts_some_drafts_and_not_others_and_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    class Watched(ControlledDrafter):
        def _cut(self, state: ControlledState, found: TreeDistribution) -> TokenTree:
            whole = len(state.tree)
            cut = super()._cut(state, found)
            seen.append((whole, len(cut)))
            return cut

    # With nominal costs a row is so cheap that only unlikely draft tokens are left out.
    monkeypatch.setattr(AgreementTable, "rate", lambda table, kind, depth, rank=0: 0.9 if kind[1] > 3 else 0.01)
    certificate = certify_exact("watched", planted(Watched), TABLES)
    assert certificate.lossless is True, certificate
    assert any(cut < whole for whole, cut in seen)
    assert any(cut == whole > 1 for whole, cut in seen)
