"""Speculative Jacobi decoding: whole outputs by enumeration, planted errors, and what coupling is good for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.block import Block
from outpace.acceptance.couplings import maximal_redraw
from outpace.acceptance.rejection import RecursiveRejection
from outpace.certify.exact import Setting, certify_exact
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.jacobi_window import FirstGuesses, Slot, WindowState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods import registry
from outpace.methods.jacobi.mcsjd import CoupledJacobi
from outpace.methods.registry import Context
from outpace.targets.base import Sequence, TreeScores
from outpace.targets.table import TableTarget, random_table
from support import autoregressive_distribution, distance, reference_probs, whole_law

PROMPT = (0, 1, 1, 0, 1)
WARM = SamplingParams(temperature=1.0)


def coupled(kind: type[CoupledJacobi] = CoupledJacobi, window: int = 2, rule: AcceptanceRule | None = None) -> Method:
    drafter = kind(window, "maximal", FirstGuesses("pad", 1), restart=False)
    return Method("planted", drafter, rule or RecursiveRejection(), Fixed(window))


def error(planted: Method, params: SamplingParams = WARM, length: int = 4, vocab: int = 2) -> float:
    """How far the law of whole outputs, several rounds each, is from autoregressive decoding's. The worst of two
    tables."""
    worst = 0.0
    for seed in (5, 6):
        target = TableTarget(vocab, random_table(vocab, seed))
        found = whole_law(target, [Request(PROMPT, planted, params, max_new_tokens=length)])
        proposal_distribution = {outputs[0]: weight for outputs, weight in found.items()}
        worst = max(
            worst, distance(proposal_distribution, autoregressive_distribution(target.table, params, PROMPT, length))
        )
    return worst


# ------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 2},
        {"window": 3, "guess": "pad", "restart": False},
        {"window": 2, "guess": "last", "coupling": "independent"},
    ],
)
def test_whole_outputs_are_exact(settings: dict[str, Any]) -> None:
    cells = [
        Setting("temperature 1", 3, 4, (0, 1, 2, 0, 1), "alone", 21),
        Setting("temperature 0.6", 3, 3, (1, 1, 0), "beside autoregressive decoding", 22),
        Setting("top-k 2", 4, 4, (0, 1, 2, 0, 1), "alone", 23),
        Setting("top-p 0.8", 3, 4, (1, 1, 0), "alone", 24),
        Setting("penalties", 2, 5, (0, 1, 0), "alone", 25),
        Setting("logit bias", 3, 3, (1, 1, 0), "alone", 26),
        Setting("user's processor", 3, 4, (0, 1, 2, 0, 1), "alone", 27),
        Setting("greedy, penalties", 3, 4, (1, 1, 0), "alone", 28),
    ]

    def make(context: Context) -> Method:
        return registry.build("mcsjd", context, settings)

    certificate = certify_exact("mcsjd", make, cells)
    assert certificate.lossless, certificate.verdict
    assert all(check.passed for check in certificate.checks), "exact, not sampled"


def test_gumbel_coupling_shows_no_bias() -> None:
    def make(context: Context) -> Method:
        return registry.build("mcsjd", context, {"window": 2, "coupling": "gumbel", "guess": "pad", "restart": False})

    cells = [Setting(name, 3, 4, (0, 1, 2, 0, 1), "alone", 31) for name in ("temperature 1", "penalties")]
    certificate = certify_exact("mcsjd", make, cells, samples=600)
    assert certificate.lossless, certificate.verdict
    assert all("sampled" in check.note for check in certificate.checks)


def test_two_requests_at_once() -> None:
    target = TableTarget(2, random_table(2, 3))
    one = coupled()
    proposal_distribution = whole_law(
        target, [Request((0, 1), one, WARM, max_new_tokens=3), Request((1,), one, WARM, max_new_tokens=2)]
    )
    alone = [
        autoregressive_distribution(target.table, WARM, (0, 1), 3),
        autoregressive_distribution(target.table, WARM, (1,), 2),
    ]
    assert (
        distance(proposal_distribution, {(a, b): p * q for a, p in alone[0].items() for b, q in alone[1].items()})
        < 1e-6
    )


def test_beside_other_rounds() -> None:
    """Rounds in which it is not asked, or asked and not scored, leave draws whose rows are still theirs."""

    class Sometimes(CoupledJacobi):
        def propose(self, state: WindowState, budget: Budget) -> TokenTree:
            if len(state.sequence.tokens) % 2:
                return TokenTree()
            tree = super().propose(state, budget)
            return tree if len(state.sequence.tokens) % 4 else TokenTree()

    assert error(coupled(Sometimes), length=5) < 1e-6


# -------------------------------------------------------------------------------------------------- planted errors


class OldRow(CoupledJacobi):
    """Drawn again, and judged with the row of the draw before."""

    def settle(self, sequence: Sequence, slots: Seq[Slot]) -> None:
        old = [slot.q for slot in slots]
        super().settle(sequence, slots)
        for slot, q in zip(slots, old, strict=True):
            slot.q = q or slot.q


class KeptUnlessImpossible(CoupledJacobi):
    """Not drawn again while the new row allows the token, and said to be from it."""

    def settle(self, sequence: Sequence, slots: Seq[Slot]) -> None:
        for slot in slots:
            if slot.p is not None and slot.token is not None and float(slot.p[slot.token]) > 0.0:
                slot.q, slot.p = QRow(slot.p), None
        super().settle(sequence, slots)


class ReusedNumbers(CoupledJacobi):
    """Redraws read the numbers that the rule reads."""

    def settle(self, sequence: Sequence, slots: Seq[Slot]) -> None:
        chance = sequence.chance.at(len(sequence.tokens), "accept")
        for slot in slots:
            if slot.p is not None:
                slot.token = self._redraw(slot, slot.p, chance)
                slot.q, slot.p = QRow(slot.p), None


class CutByToken(CoupledJacobi):
    """The window ends before a token that it does not like."""

    def propose(self, state: WindowState, budget: Budget) -> TokenTree:
        tree = super().propose(state, budget)
        short, node = TokenTree(), ROOT
        for draw in tree.draws:
            if draw.token == 0:
                break
            node = short.add(node, draw.token, None if draw.q_row < 0 else tree.q_rows[draw.q_row])
        return short


class ResidualTwice(CoupledJacobi):
    """The part that both rows share is kept, and the rest drawn from the whole new row."""

    def settle(self, sequence: Sequence, slots: Seq[Slot]) -> None:
        chance = sequence.chance.at(len(sequence.tokens), "redraw")
        for slot in slots:
            if slot.p is not None and slot.q is not None and slot.token is not None:
                kept = maximal_redraw(slot.p, slot.q.dense(len(slot.p)), slot.token, chance) == slot.token
                slot.token = slot.token if kept else chance.categorical(slot.p)
                slot.q, slot.p = QRow(slot.p), None
        super().settle(sequence, slots)


@pytest.mark.parametrize("planted", [OldRow, KeptUnlessImpossible, ReusedNumbers, CutByToken, ResidualTwice])
def test_planted_errors_are_caught(planted: type[CoupledJacobi]) -> None:
    assert error(coupled()) < 1e-6
    assert error(coupled(planted)) > 1e-4


def test_rules_that_look_at_later_draws_are_refused_and_would_be_wrong() -> None:
    target = TableTarget(3)
    with pytest.raises(BadInput, match="did not reach"):
        registry.build("mcsjd", Context(target), rule="block")
    assert isinstance(registry.build("mcsjd", Context(target)).rule, RecursiveRejection)

    class Unsaid(CoupledJacobi):
        proposal = replace(CoupledJacobi.proposal, keeps_unverified_draws=False)

    assert error(coupled(Unsaid)) < 1e-6
    assert error(coupled(Unsaid, rule=Block())) > 1e-4


# ------------------------------------------------------------------------------------------------------- mechanism


def decode(target: TableTarget, one: Method, length: int, params: SamplingParams, prompt: Seq[int]) -> Generation:
    decoder = Decoder(target)
    generation = decoder.submit(Request(tuple(prompt), one, params, max_new_tokens=length, trace=True))
    decoder.run()
    return generation


@pytest.mark.parametrize("params", [WARM, SamplingParams(temperature=0.8, frequency_penalty=0.5, top_k=4)])
def test_rows_are_those_of_the_scored_path(params: SamplingParams) -> None:
    """Every q row is the target's processed distribution after the guesses of the round before, as they stood."""
    target = TableTarget(6, random_table(6, 4))
    rounds = decode(target, coupled(window=3), 40, params, PROMPT).rounds
    written: list[int] = []
    path: list[int] = []  # the output as the round before saw it, guesses included
    sampled = 0
    for one in rounds:
        for depth, draw in enumerate(one.tree.draws):
            if draw.q_row >= 0:
                before = path[: len(written) + depth]
                expected = reference_probs(target.table((*PROMPT, *before)), params, PROMPT, before)
                found = one.tree.q_rows[draw.q_row].dense(6)
                torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-4)
                sampled += 1
        path = [*written, *one.tree.tokens]
        written += one.committed
    assert sampled > 30


def test_coupled_windows_settle_and_are_accepted_more_often() -> None:
    """One position's new token leaves the window behind it as it was, where it would be drawn afresh otherwise."""
    target = TableTarget(24, random_table(24, 1, order=1, sharpness=1.2))
    accepted = {}
    for coupling in ("maximal", "gumbel", "independent"):
        settings = {"window": 16, "coupling": coupling, "guess": "last", "restart": False}
        one = registry.build("mcsjd", Context(target), settings)
        runs = [decode(target, one, 100, SamplingParams(temperature=1.0, seed=seed), (0,)) for seed in range(2)]
        accepted[coupling] = sum(run.metrics.accepted for run in runs)
    assert accepted["maximal"] > 1.3 * accepted["independent"]
    assert accepted["gumbel"] > 1.3 * accepted["independent"]


def test_at_temperature_0_it_is_jacobi_decoding() -> None:
    target = TableTarget(6, random_table(6, 7))
    context = Context(target)
    settings = {"window": 3, "guess": "pad", "restart": False}
    sampled, jacobi = (registry.build(name, context, settings) for name in ("mcsjd", "jacobi"))
    one, other = (decode(target, each, 30, SamplingParams(), PROMPT) for each in (sampled, jacobi))
    assert [(r.tree.tokens, r.committed) for r in one.rounds] == [(r.tree.tokens, r.committed) for r in other.rounds]
    assert all(r.tree.is_deterministic for r in one.rounds)


def test_a_seed_reproduces_an_answer() -> None:
    target = TableTarget(12, random_table(12, 2))
    params = SamplingParams(temperature=0.9, seed=5)
    one, again = (decode(target, coupled(window=4), 40, params, PROMPT) for _ in range(2))
    assert one.tokens == again.tokens


def test_scores_after_the_round_follow_the_history_of_the_round() -> None:
    """Penalties count committed tokens in place; a row that is read only now must not count them twice."""
    target = TableTarget(5, random_table(5, 9))
    params = SamplingParams(temperature=1.0, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2)
    sequence = target.sequence(PROMPT, params)
    tree = TokenTree.chain([2, 2, 4])
    scored: TreeScores = target.score([(sequence, tree)])[0]
    scored.p(ROOT)
    sequence.sampler.extend([2, 2])
    expected = reference_probs(target.table((*PROMPT, 2, 2, 4)), params, PROMPT, (2, 2, 4))
    torch.testing.assert_close(scored.p(2).double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-4)
