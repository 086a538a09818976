"""The certificate of vLLM: its build for CPUs is refused above temperature 0, and passes with the plug-in's override.

make engines
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outpace.certify.engine_certificate import EngineCertificate
from outpace.certify.engine_prompts import engine_prompts
from outpace.certify.engines import Plan, certify_engine
from outpace.certify.server_client import Server
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.integrations.vllm.interpreter import find_interpreter
from outpace.integrations.vllm.server import running_server
from outpace.prompts.questions import load_prompts

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.model]
MODEL = "smollm2"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def baseline() -> Iterator[str]:
    """vLLM without speculation."""
    try:
        find_interpreter(None)
    except BadInput as error:
        pytest.skip(str(error))
    with running_server(MODEL, max_num_seqs=16) as address:
        yield address


def certified(address: str, baseline: str | None, **about: Any) -> EngineCertificate:
    texts = engine_prompts([one.text for one in load_prompts(None, 6)])
    plan = Plan(texts, SamplingParams(**{"temperature": 1.0, **about}), samples=900, draft_length=4)
    base = None if baseline is None else Server(baseline, MODEL, time_limit=600.0, name="the baseline")
    return certify_engine(Server(address, MODEL, time_limit=600.0), plan, baseline=base)


def test_the_build_for_cpus_is_refused(baseline: str) -> None:
    with running_server(MODEL, NGRAM, plugin=False, max_num_seqs=16) as address:
        greedy, sampled = certified(address, baseline, temperature=0.0), certified(address, None)
    assert greedy.lossless is True, greedy.verdict
    if sampled.lossless is True:
        pytest.skip("this build of vLLM has no such defect")
    assert sampled.lossless is False
    assert "rank by the engine's log-probabilities" in sampled.verdict


def test_with_the_override_it_passes(baseline: str) -> None:
    with running_server(MODEL, NGRAM, max_num_seqs=16) as address:
        found = certified(address, baseline)
    assert found.lossless is True, found.verdict
    assert found.speculation is not None and found.speculation["accepted"] > 100
    assert found.logprobs == {"kind": "raw", "top": 20}
