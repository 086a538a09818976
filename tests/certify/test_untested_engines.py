"""What a certificate of a server does not pass: no test of what was asked for, and a reference that drafts as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from live_support import live
from outpace.certify.endpoint import Endpoint
from outpace.certify.engine_plan import Plan
from outpace.certify.engines import certify_engine
from outpace.certify.server_client import Server
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from planted_server import planted
from serving_support import service
from test_engines import TEXTS, certified


def test_valid_structured_outputs_alone_are_no_certificate() -> None:
    with planted(processed=True, formats="valid") as address:
        found = certified(address, temperature=0.0)
    assert found.checks[-1].passed is True
    assert found.lossless is None and found.inconclusive
    assert "no answer was compared; give --baseline" in found.verdict


def test_sampling_that_no_test_covered_is_not_called_lossless() -> None:
    """Raw log-probabilities do not show what top-p leaves."""
    with planted(bias=0.6) as address:
        found = certified(address, top_p=0.9)
    assert all(one.passed is not False for one in found.checks)
    assert found.lossless is None and found.inconclusive
    assert "no sampled token was tested; give --baseline" in found.verdict and "--target-model" in found.verdict


def test_too_few_draws_for_any_test_are_not_called_lossless() -> None:
    with planted(drafted=False) as base, planted(bias=0.6, logprobs=0) as address:
        found = certified(address, base, samples=1)
    assert found.lossless is None and found.inconclusive
    assert "no sampled token was tested; raise --samples" in found.verdict


def test_a_baseline_tests_what_raw_log_probabilities_do_not() -> None:
    with planted(drafted=False) as base, planted(bias=0.6) as address:
        assert certified(address, base, top_p=0.9).lossless is False


@pytest.mark.parametrize("written", [lambda url: url + "/v1/", lambda url: url.replace("127.0.0.1", "localhost")])
def test_a_server_is_not_its_own_baseline(written: Callable[[str], str]) -> None:
    with planted(bias=0.6, logprobs=0) as address, pytest.raises(BadInput, match="the endpoint itself"):
        certified(address, written(address))


def test_a_baseline_that_drafts_is_refused() -> None:
    with planted(bias=0.6, logprobs=0) as address, planted(bias=0.6, logprobs=0) as base:
        with pytest.raises(BadInput, match=r"the baseline .* drafted \d+ tokens"):
            certified(address, base)
        with pytest.raises(BadInput, match=r"the baseline .* drafted \d+ tokens"):
            certified(address, base, temperature=0.0)


def test_a_baseline_that_counts_nothing_is_remarked_on() -> None:
    with planted(drafted=False, metrics=False) as base, planted() as address:
        unknown = certified(address, base, samples=300)
    with planted(drafted=False) as base, planted() as address:
        known = certified(address, base, samples=300)
    said = "whether the baseline drafts is not known"
    assert any(said in one for one in unknown.remarks)
    assert not any(said in one for one in known.remarks)


def test_vllm_counts_drafts_only_where_it_makes_them() -> None:
    with planted(drafted=False, metrics="vllm:num_requests_running 0.0\n") as address:
        assert Endpoint(Server(address, "toy")).speculated() == (0, 0)
    with planted(metrics="other_requests 0.0\n") as address:
        assert Endpoint(Server(address, "toy")).speculated() is None


def test_our_own_server_is_told_to_draft_nothing() -> None:
    """Its counters are those of the endpoint too, so they do not refuse it."""
    with live(service()) as address:
        plan = Plan(TEXTS, SamplingParams(temperature=1.0), 600, 3, seed=1)
        with pytest.raises(BadInput, match="leave out --baseline"):
            certify_engine(Server(address, "toy"), plan, baseline=Server(address, "toy", name="the baseline"))
        assert certify_engine(Server(address, "toy"), plan).lossless is True
