"""One definition of each figure, checked on rounds that can be counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.metrics import PHASES, CacheUse, RequestMetrics, ratio, total
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import DraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.targets.table import TableTarget, random_table
from support import CERTAIN_TREE, CHAIN, Path, Q, Toy, certain_tree, method, sampled_chain

TABLE = random_table(5, 3)
GREEDY_TOKEN = {path: int(TABLE(path).argmax()) for path in [(a, b) for a in range(5) for b in range(5)]}


def run(
    one: Method, length: int, params: SamplingParams | None = None, stops: frozenset[int] = frozenset()
) -> Generation:
    decoder = Decoder(TableTarget(5, TABLE))
    request = Request((1, 2), one, params or SamplingParams(), max_new_tokens=length, stop_ids=stops, trace=True)
    generation = decoder.submit(request)
    decoder.run()
    return generation


def right_then_wrong(right: int, wrong: int) -> Method:
    """Drafts a chain whose first ``right`` tokens are the target's own and whose next ``wrong`` are not."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        node, path = ROOT, tokens
        for index in range(min(depth, right + wrong)):
            token = GREEDY_TOKEN[path[-2], path[-1]]
            if index >= right:
                token = (token + 1) % 5
            node, path = tree.add(node, token), (*path, token)

    return method(grow, Proposal(), length=right + wrong)


def test_plain_decoding_commits_exactly_one_token_a_round() -> None:
    for params in (SamplingParams(), SamplingParams(1.0, seed=3)):
        figures = run(method(None), 9, params).metrics.figures()
        assert figures["mean_acceptance_length"] == 1.0
        assert figures["acceptance_rate"] is None
        assert figures["per_position_acceptance"] == []
        assert figures["tokens"] == 9


def test_figures_of_rounds_counted_by_hand() -> None:
    """Two accepted of three, and a bonus: three tokens a round, four rounds."""
    generation = run(right_then_wrong(2, 1), 12)
    metrics = generation.metrics
    assert [len(one.committed) for one in generation.rounds] == [3, 3, 3, 3]
    figures = metrics.figures()
    assert (metrics.rounds, metrics.committed, metrics.accepted) == (4, 12, 8)
    assert metrics.drafted == 11, "in the last round there is room for two draft tokens only"
    assert figures["mean_acceptance_length"] == 3.0
    assert figures["acceptance_rate"] == pytest.approx(8 / 11)
    assert figures["per_position_acceptance"] == [1.0, 1.0]
    assert figures["drafting_rounds"] == 1.0
    assert figures["drafting_acceptance_length"] == 3.0
    assert metrics.prompt_tokens == 2


def test_rounds_without_a_draft_are_told_apart() -> None:
    """A draft of two right tokens in every other round: 3, 1, 3, 1, ... tokens."""
    right, asked = right_then_wrong(2, 0), 0

    def every_other(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        nonlocal asked
        asked += 1
        if asked % 2:
            assert isinstance(right.drafter, Toy)
            right.drafter.grow(tree, tokens, depth, chance)

    figures = run(method(every_other, Proposal(), length=2), 8).metrics.figures()
    assert figures["mean_acceptance_length"] == 2.0
    assert figures["drafting_rounds"] == 0.5
    assert figures["drafting_acceptance_length"] == 3.0


def test_drafting_takes_its_share_of_the_time_in_every_round() -> None:
    figures = RequestMetrics(
        rounds=4, phase_seconds={"draft": 0.01, "score": 0.03, "accept": 0.0, "other": 0.0}
    ).figures()
    assert figures["draft_ms"] == pytest.approx(2.5)


class Keeper(Toy):
    """A drafter with a cache: of every request's tokens the last three."""

    def caches(self, state: DraftState) -> tuple[CacheUse, ...]:
        count = len(state.sequence.tokens)
        return (CacheUse("tokens", min(3, count), 3, max(0, count - 3)),)


def test_caches_are_reported_as_they_were_at_the_end() -> None:
    keeper = Method("keeper", Keeper(certain_tree(0, 5), CERTAIN_TREE), RecursiveRejection(), Fixed(2))
    metrics = run(keeper, 9).metrics
    assert metrics.figures()["caches"] == [{"name": "tokens", "entries": 3, "bound": 3, "evicted": 8}]
    assert total([metrics, run(keeper, 2).metrics]).figures()["caches"][0]["evicted"] == 1, "the last one's"
    assert run(method(None), 3).metrics.figures()["caches"] == []


def test_every_node_of_a_tree_counts_as_drafted() -> None:
    generation = run(method(certain_tree(4, 5, nodes=6), CERTAIN_TREE, length=3), 15)
    metrics = generation.metrics
    assert metrics.drafted == sum(len(one.tree) for one in generation.rounds)
    assert metrics.accepted == sum(len(one.path) for one in generation.rounds)
    assert metrics.figures()["per_position_acceptance"] == [
        sum(len(one.path) > depth for one in generation.rounds) / metrics.rounds
        for depth in range(len(metrics.accepted_at_depth))
    ]


@given(st.integers(0, 200), st.sampled_from([0.0, 1.0]), st.sets(st.integers(0, 4), max_size=1))
def test_identities_between_the_figures(seed: int, temperature: float, stops: set[int]) -> None:
    one = method(sampled_chain(Q(random_table(5, seed))), CHAIN, length=4)
    generation = run(one, 1 + seed % 20, SamplingParams(temperature, seed=seed), frozenset(stops))
    metrics, figures = generation.metrics, generation.metrics.figures()
    assert metrics.tokens == len(generation.tokens)
    assert metrics.committed == metrics.tokens + (generation.finish_reason == "stop")
    assert metrics.committed == len(generation.sequence.tokens) - 2
    assert sum(metrics.accepted_at_depth) == metrics.accepted
    assert metrics.accepted <= metrics.drafted
    assert metrics.drafting == sum(len(one.tree) > 0 for one in generation.rounds)
    lengths = [len(one.committed) for one in generation.rounds if len(one.tree)]
    assert figures["drafting_acceptance_length"] == (pytest.approx(sum(lengths) / len(lengths)) if lengths else None)
    assert metrics.committed - metrics.rounds <= metrics.accepted <= metrics.committed
    assert figures["mean_acceptance_length"] >= 1
    falling = figures["per_position_acceptance"]
    assert falling == sorted(falling, reverse=True)
    assert all(0 <= share <= 1 for share in falling)
    assert sum(figures["time_split"].values()) == pytest.approx(1)
    assert all(share >= 0 for share in figures["time_split"].values())
    assert metrics.answered == (metrics.tokens > 0)
    assert 0 <= metrics.first_token_seconds <= metrics.seconds
    assert_no_nan(figures)


def assert_no_nan(value: Any) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            assert_no_nan(one)
    assert not (isinstance(value, float) and not math.isfinite(value))


def test_rates_are_what_they_say() -> None:
    metrics = RequestMetrics(tokens=21, answered=1, seconds=5.0, first_token_seconds=1.0, first_tokens=3)
    figures = metrics.figures()
    assert figures["ttft_ms"] == 1000
    assert figures["tokens_per_second"] == pytest.approx(21 / 5)
    assert figures["decode_tokens_per_second"] == pytest.approx(18 / 4), "three came with the first"
    assert figures["seconds"] == 5.0


def test_undefined_figures_are_none() -> None:
    figures = RequestMetrics().figures()
    for name in ("tokens_per_second", "decode_tokens_per_second", "ttft_ms", "mean_acceptance_length", "draft_ms"):
        assert figures[name] is None
    assert figures["time_split"] == dict.fromkeys(PHASES)
    one = RequestMetrics(tokens=1, answered=1, seconds=0.5, first_token_seconds=0.5, first_tokens=1).figures()
    assert one["decode_tokens_per_second"] is None, "no token came after the first"
    assert ratio(0, 0) is None
    assert ratio(0, 2) == 0


def test_an_answer_that_ends_at_once_has_no_rates_of_tokens() -> None:
    first = GREEDY_TOKEN[1, 2]
    generation = run(right_then_wrong(2, 0), 9, stops=frozenset({first}))
    figures = generation.metrics.figures()
    assert (generation.tokens, figures["tokens"], figures["ttft_ms"]) == ([], 0, None)
    assert figures["decode_tokens_per_second"] is None
    assert generation.metrics.accepted == 1, "the end of the answer was drafted and accepted"


def test_a_total_adds_counters_and_weighs_figures_by_them() -> None:
    runs = (run(right_then_wrong(2, 1), 12), run(right_then_wrong(0, 2), 5), run(method(None), 4))
    parts = [generation.metrics for generation in runs]
    both = total(parts)
    for name in ("tokens", "rounds", "committed", "drafting", "drafted", "accepted", "prompt_tokens", "answered"):
        assert getattr(both, name) == sum(getattr(part, name) for part in parts)
    assert both.rounds == 4 + 5 + 4
    assert both.seconds == pytest.approx(sum(part.seconds for part in parts))
    assert both.figures()["mean_acceptance_length"] == pytest.approx(21 / 13)
    assert both.figures()["per_position_acceptance"] == pytest.approx([4 / 13, 4 / 13])
    assert both.figures()["ttft_ms"] == pytest.approx(sum(1e3 * part.first_token_seconds for part in parts) / 3)
    assert sum(both.figures()["time_split"].values()) == pytest.approx(1)
    assert total([]).figures() == RequestMetrics().figures()
    assert parts[0].accepted_at_depth == [4, 4], "the parts stay as they were"
