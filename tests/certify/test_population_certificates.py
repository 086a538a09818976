"""Certificates of methods that decode groups; and biases that they must find."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import outpace
from outpace.certify import populations
from outpace.certify.populations import BEAM_CELLS, PARTICLE_CELLS, certify_population, is_population
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow
from outpace.core.token_distribution import DenseDistribution
from outpace.engine.method import Method
from outpace.engine.populations import beams, joint, particles
from outpace.methods.population import smcsd
from outpace.methods.registry import Context, build

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.certification
def test_dsbd_has_the_law_of_stochastic_beams() -> None:
    certificate = certify_population("dsbd")
    assert certificate.passed, certificate.verdict
    assert len(certificate.checks) == len(BEAM_CELLS)
    assert certificate.max_abs_error is not None
    assert certificate.max_abs_error < 1e-6


@pytest.mark.certification
def test_smcsd_s_weighted_averages_are_the_target_s() -> None:
    certificate = certify_population("smcsd")
    assert certificate.passed, certificate.verdict
    assert len(certificate.checks) == len(PARTICLE_CELLS)


def test_the_draft_of_dsbd_is_accepted_at_all() -> None:
    from outpace.certify.exact import tiny_context
    from outpace.core.sampling import SamplingParams
    from outpace.engine.decoder import Decoder
    from outpace.engine.request import Request

    context = tiny_context(3, 5)
    method = build("dsbd", context, {"num_beams": 2, "num_draft_tokens": 3, "max_width": 6})
    decoder = Decoder(context.target)
    one = decoder.submit(Request((0, 1), method, SamplingParams(temperature=1.0, seed=3), max_new_tokens=40))
    decoder.run()
    assert one.metrics.accepted > 0
    assert one.metrics.rounds < 40


def test_acceptance_without_rejection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = joint.ordered_draws

    def biased(p: Any, chance: Any, proposed: Any = (), q: Any = None, renewed: Any = None) -> Any:
        places = list(proposed)
        yield from places
        yield from honest(p.without(places), chance)

    monkeypatch.setattr(joint, "ordered_draws", biased)
    certificate = certify_population("dsbd", most=1)
    assert certificate.passed is False
    assert certificate.max_abs_error is not None
    assert certificate.max_abs_error > 0.01


def test_beams_that_are_dropped_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def biased(self: Any, state: Any, chosen: Any, layer: Any, scores: Any, chance: Any) -> Any:
        return honest(self, state, chosen[:1], layer, scores, chance)

    honest = beams.BeamRule._chosen
    monkeypatch.setattr(beams.BeamRule, "_chosen", biased)
    assert certify_population("dsbd", most=2).passed is False


def test_weights_that_are_left_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = particles.ParticleRule._resampled

    def biased(self: Any, found: Any, chance: Any) -> Any:
        return [replace(one, log_weight=0.0) for one in honest(self, found, chance)]

    monkeypatch.setattr(particles.ParticleRule, "_resampled", biased)
    assert certify_population("smcsd", most=1).passed is False


def test_a_resampling_that_prefers_the_first_is_found() -> None:
    from outpace.engine.populations import resampling

    def first(weights: Any, chance: Any) -> list[int]:
        return [0 for _ in weights]

    def make(context: Context, settings: Mapping[str, Any]) -> Method:
        return build("smcsd", context, settings)

    honest = resampling.SCHEMES["multinomial"]
    resampling.SCHEMES["multinomial"] = first
    try:
        found = certify_population("smcsd", {"num_particles": 2, "num_draft_tokens": 1}, most=1, make=make)
    finally:
        resampling.SCHEMES["multinomial"] = honest
    assert found.passed is False


@pytest.fixture
def part_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells alone in which the draft model lacks a token."""
    cells = tuple(one for one in PARTICLE_CELLS if one.lacking)
    assert len(cells) == 2
    monkeypatch.setattr(populations, "PARTICLE_CELLS", cells)


@pytest.mark.usefixtures("part_of_the_vocabulary")
def test_tokens_that_are_never_drafted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smcsd, "whole_logits", lambda logits, temperature, share: logits)
    certificate = certify_population("smcsd")
    assert [one.passed for one in certificate.checks] == [False, False]
    assert min(one.max_abs_error or 0.0 for one in certificate.checks) > 0.01


@pytest.mark.certification
@pytest.mark.usefixtures("part_of_the_vocabulary")
def test_another_share_in_the_weights_than_in_the_draws_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def biased(law: Any) -> QRow:
        probs = law.dense().clone()
        probs[probs.argmin()] *= 0.8
        return QRow(DenseDistribution(probs))

    monkeypatch.setattr(smcsd, "QRow", biased)
    certificate = certify_population("smcsd")
    assert [one.passed for one in certificate.checks] == [False, False]


def test_certify_tells_populations_from_other_methods() -> None:
    assert is_population("dsbd")
    assert is_population("smcsd")
    assert not is_population("pld")
    assert not is_population("copy-decode")
    certificate = outpace.certify("smcsd", cells=1)
    assert certificate.level == "population"
    assert certificate.lossless is False
    assert certificate.passed
    with pytest.raises(BadInput, match="is lossy and states no bound"):
        outpace.certify("smcsd", level="bound")


def test_an_infinite_weight_is_no_weight() -> None:
    weights, top = particles._relative([0.0, -math.inf])
    assert weights == [1.0, 0.0]
    assert top == 0.0
