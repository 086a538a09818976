"""A thousand random mixes of methods, parameters, joins, cancels, stops and turns against autoregressive decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from mixes import COMMON, MIX, TARGETS, Plan, Seen, names, run, stage
from outpace.core.tree import ROOT
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.model_drafter import DraftModel


@pytest.mark.slow
def test_a_thousand_mixes_are_decoded_as_alone() -> None:
    """And every lossless method of the registry took part in some, and most were right now and then."""
    torch.set_num_threads(1)  # tiny targets are too small to share
    buildable = {name for target in TARGETS for name in stage(target).cases}
    assert buildable == set(names()), stage(TARGETS[0]).refused
    seen = Seen()

    @given(mix=MIX)
    @settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    def mixes(mix: tuple[str, list[Plan]]) -> None:
        run(*mix, seen)

    mixes()
    assert sum(seen.requests.values()) > 1000 and set(seen.requests) == set(names())
    never = {name for name in names() if not seen.accepted[name]}
    assert "none" in never and len(never) < len(names()) / 3, never
    assert seen.near_ties < 5


def plan(method: str, **changes: Any) -> Plan:
    """A request that repeats two tokens, so that drafts are accepted. A draft model, which takes as long as the target
    here, drafts a fixed length."""
    variant = 2 if method == "draft-model" else 0
    some = Plan(method, variant, COMMON[:2] * 6, 0, 12, "two tokens", frozenset(), (), (), "", None, ())
    return replace(some, **changes)


def test_a_mix_that_is_right_passes() -> None:
    seen = Seen()
    plans = [plan("sam"), plan("rest", joins=2, cancelled=3), plan("draft-model", turns=((1, COMMON[:2]),), joins=1)]
    run("dense biases", plans, seen)
    assert seen.requests == {"sam": 1, "rest": 1, "draft-model": 2} and seen.accepted["draft-model"] > 0


def test_a_wrong_token_after_an_accepted_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TreeDistribution.argmax
    monkeypatch.setattr(
        TreeDistribution, "argmax", lambda self, node: right(self, node) if node == ROOT else right(self, node) ^ 4
    )
    with pytest.raises(AssertionError, match="draft-model"):
        run("dense biases", [plan("draft-model")], Seen())


def test_kv_that_are_left_open_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftModel, "end", lambda self, state: None)
    with pytest.raises(AssertionError, match="left open"):
        run("dense biases", [plan("sam"), plan("draft-model")], Seen())
