"""What a round takes in vLLM, by its own metrics: its server is started without and with speculation.

With speculation vLLM's ngram drafter copies from prompts that repeat themselves, so that nearly every step verifies
``DRAFTED`` tokens for each request. A step's seconds follow from vLLM's counters of decoding time, tokens, and draft
tokens that it proposed and accepted. Between the two sizes costs are taken as linear.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from outpace.advice.round_costs import RoundCosts
from outpace.core.errors import BadInput, OutpaceError
from outpace.core.loopback import urlopen
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.integrations.vllm.server import running_server

DRAFTED = 4
_TOKENS = 32
_REPEATS = 4
"""Measurements of each batch; one before them is not counted."""
_PATIENCE = 240.0
_START = 600.0
"""Seconds for a server to start, which compiles the model as ``vllm serve`` does."""
_TEXT = "The red fox sees the blue bird, and the blue bird sees the red fox. " * 6
_COUNTERS = {
    "seconds": "request_decode_time_seconds_sum",
    "tokens": "generation_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "drafted": "spec_decode_num_draft_tokens_total",
}


class Step(NamedTuple):
    """``seconds`` of a step, and the ``draft_tokens`` that it verified for each request."""

    seconds: float
    draft_tokens: float


def measure_vllm_rounds(
    model: str,
    batches: Seq[int],
    params: SamplingParams,
    *,
    python: str | None = None,
    threads: int | None = None,
    dtype: str = "bfloat16",
) -> dict[int, RoundCosts]:
    """Costs of rounds of each batch. Raises BadInput where vLLM is not installed, EngineFailed where it does not
    start."""
    speculative = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    found: list[dict[int, list[Step]]] = []
    for config in (None, speculative):
        with (
            stage("measuring rounds in vLLM", brief=True),
            running_server(
                model,
                config,
                dtype=dtype,
                python=python,
                threads=threads,
                max_num_seqs=max(batches),
                eager=False,
                patience=_START,
                name="model",
            ) as url,
        ):
            found.append({batch: _steps(url, batch, params) for batch in batches})
    return {batch: _costs(batch, found[0][batch], found[1][batch]) for batch in batches}


def _costs(batch: int, plain: Seq[Step], drafting: Seq[Step]) -> RoundCosts:
    drafted = float(np.mean([one.draft_tokens for one in drafting]))
    if drafted < 0.5:
        raise BadInput("vLLM drafted almost nothing while its rounds were measured; costs of drafts are not known")
    blocks = [[one.seconds, other.seconds] for one, other in zip(plain, drafting, strict=True)]
    return RoundCosts(batch, [0, batch * drafted], np.array(blocks))


def _steps(url: str, batch: int, params: SamplingParams) -> list[Step]:
    found = []
    for number in range(1 + _REPEATS):
        before = counters(_read(url))
        _ask(url, batch, params, number)
        if number:
            found.append(step_between(before, counters(_read(url)), batch))
    return found


def counters(text: str) -> dict[str, float]:
    """The counters that are needed, from the text of vLLM's ``/metrics``; 0 where one is missing."""
    return {
        name: sum(float(one) for one in re.findall(rf"^vllm:{key}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))
        for name, key in _COUNTERS.items()
    }


def step_between(before: Mapping[str, float], after: Mapping[str, float], requests: int) -> Step:
    """The mean step of ``requests`` requests that were answered in between. Raises OutpaceError where the counters have
    not moved."""
    grown = {name: after[name] - before[name] for name in _COUNTERS}
    # A step commits a token of its own and what it accepted; the first token comes with the prompt.
    steps = grown["tokens"] - requests - grown["accepted"]
    if steps <= 0 or grown["seconds"] <= 0:
        raise OutpaceError("vLLM's metrics did not count the answers: costs cannot be measured by them")
    return Step(grown["seconds"] / steps, grown["drafted"] / steps)


def _ask(url: str, batch: int, params: SamplingParams, number: int) -> None:
    """``batch`` answers at once."""

    def one(place: int) -> None:
        _post(
            f"{url}/v1/completions",
            {
                "model": "model",
                "prompt": f"{number} {place}. {_TEXT}",
                "max_tokens": _TOKENS,
                "temperature": params.temperature,
                "seed": place,
                "ignore_eos": True,
            },
        )

    with ThreadPoolExecutor(batch) as pool:
        list(pool.map(one, range(batch)))


def _post(url: str, body: Mapping[str, Any]) -> None:
    import json
    import urllib.request

    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urlopen(request, timeout=_PATIENCE) as reply:
        reply.read()


def _read(url: str) -> str:
    with urlopen(f"{url}/metrics", timeout=30) as reply:
        text: str = reply.read().decode("utf-8", "replace")
    return text
