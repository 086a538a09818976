"""The certificate of vLLM: its build for CPUs is refused above temperature 0, and passes with the plug-in's override.

make engines
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from engine_results import keep
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
PYTHON = os.environ.get("OUTPACE_VLLM_PYTHON")
found: dict[str, Any] = {}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def baseline() -> Iterator[str]:
    """vLLM without speculation."""
    try:
        find_interpreter(PYTHON)
    except BadInput as error:
        pytest.skip(str(error))
    with running_server(MODEL, python=PYTHON, max_num_seqs=16) as address:
        yield address


@pytest.fixture(scope="module", autouse=True)
def written() -> Iterator[None]:
    """What was found, for the table."""
    yield
    if found:
        keep("vllm", {"version": find_interpreter(PYTHON).version, "certificates": found})


def certified(label: str, address: str, baseline: str | None, **about: Any) -> EngineCertificate:
    """The certificate of a server, kept for the table under a label."""
    texts = engine_prompts([one.text for one in load_prompts(None, 6)])
    plan = Plan(texts, SamplingParams(**{"temperature": 1.0, **about}), samples=900, draft_length=4)
    base = None if baseline is None else Server(baseline, MODEL, time_limit=600.0, name="the baseline")
    certificate = certify_engine(Server(address, MODEL, time_limit=600.0), plan, baseline=base)
    found[label] = {"lossless": certificate.lossless, "speculation": certificate.speculation}
    return certificate


def test_the_build_for_cpus_is_refused(baseline: str) -> None:
    with running_server(MODEL, NGRAM, python=PYTHON, plugin=False, max_num_seqs=16) as address:
        greedy = certified("n-gram, as released, greedy", address, baseline, temperature=0.0)
        sampled = certified("n-gram, as released, temperature 0.7", address, None, temperature=0.7)
    assert greedy.lossless is True, greedy.verdict
    if sampled.lossless is True:
        pytest.skip("this build of vLLM has no such defect")
    assert sampled.lossless is False
    assert "rank by the engine's log-probabilities" in sampled.verdict


def test_with_the_override_it_passes(baseline: str) -> None:
    with running_server(MODEL, NGRAM, python=PYTHON, max_num_seqs=16) as address:
        mended = certified("n-gram, with the override, temperature 0.7", address, baseline, temperature=0.7)
    assert mended.lossless is True, mended.verdict
    assert mended.speculation is not None
    assert mended.speculation["accepted"] > 100
    assert mended.logprobs == {"kind": "raw", "top": 20}
