"""A thousand random mixes of methods, parameters, joins, cancels, stops and turns against autoregressive decoding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from mixes import MIX, TARGETS, Plan, Seen, run, stage
from outpace.methods.registry import methods

SEEN = Seen()


@pytest.mark.slow
@given(mix=MIX)
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
def test_mixes_are_decoded_as_alone(mix: tuple[str, list[Plan]]) -> None:
    torch.set_num_threads(1)  # tiny targets are too small to share
    run(*mix, SEEN)


@pytest.mark.slow
def test_every_method_took_part() -> None:
    """Runs after the mixes: every lossless method of the registry was in some, and drafters were right in some."""
    ours = {info.name for info in methods() if info.lossless and info.build.__module__.startswith("outpace.")}
    buildable = {name for target in TARGETS for name, _, _ in stage(target).cases}
    assert buildable == ours, {name: stage(TARGETS[0]).refused.get(name) for name in ours - buildable}
    assert sum(SEEN.requests.values()) > 1000
    assert set(SEEN.requests) == ours
    assert {name for name in ours if not SEEN.accepted[name]} == {"none"}
    assert SEEN.near_ties < 5
