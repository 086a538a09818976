"""Groups of sequences: gathering K/V by ancestor, joint draws, resampling, particles, siblings."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from outpace.certify.distributions import autoregressive_distribution
from outpace.certify.exact import tiny_context
from outpace.core.chance import ChanceSource, Enumeration
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.populations.gather import gather
from outpace.engine.populations.joint import ordered_draws
from outpace.engine.populations.resampling import SCHEMES, effective_sample_size
from outpace.engine.request import Generation, Request
from outpace.methods.population.smcsd import whole_logits
from outpace.methods.registry import build
from outpace.targets.table import TableTarget, random_table


def test_k_v_goes_to_heirs_by_ancestor() -> None:
    target = TableTarget(6)
    sequences = [target.sequence(prompt) for prompt in ((1, 2), (3, 4), (5, 0))]
    target.prefill(sequences)
    trees = [TokenTree() for _ in sequences]
    for token in (0, 1):
        trees[0].add(-1, token)
    trees[2].add(-1, 3)
    scores = target.score(list(zip(sequences, trees, strict=True)))
    found = gather(target, sequences, [(0, [0]), (2, []), (0, [1]), (0, [])], scores)
    assert found == [[1, 2, 0], [5, 0], [1, 2, 1], [1, 2]]
    assert len({id(one) for one in found}) == 4


def test_without_a_forward_nothing_is_committed() -> None:
    target = TableTarget(6)
    sequences = [target.sequence((1, 2, 3))]
    target.prefill(sequences)
    assert gather(target, sequences, [(0, []), (0, [])], None) == [[1, 2], [1, 2]]


def test_there_are_never_more_sequences_than_the_group_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableTarget(6)
    sequences = [target.sequence((1, token)) for token in range(4)]
    target.prefill(sequences)
    held = most = 4
    fork, close = target.fork, target.close

    def forked(*given: Any) -> Any:
        nonlocal held, most
        held += 1
        most = max(most, held)
        return fork(*given)

    def closed(kv: Any) -> None:
        nonlocal held
        held -= 1
        close(kv)

    monkeypatch.setattr(target, "fork", forked)
    monkeypatch.setattr(target, "close", closed)
    gather(target, sequences, [(0, [])] * 4, None)
    assert (held, most) == (4, 4)


def law(draws: Iterable[tuple[tuple[int, ...], float]]) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for outcome, weight in draws:
        found[outcome] += weight
    return found


def test_draws_by_rejection_have_the_law_of_draws_without_replacement() -> None:
    p = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.1, 0.6, 0.0, 0.3], dtype=torch.float64)

    def plain(chance: ChanceSource) -> tuple[int, ...]:
        return tuple(ordered_draws(p, chance.at(0, "accept")))[:3]

    def drafted(chance: ChanceSource) -> tuple[int, ...]:
        proposed = chance.at(0, "draft").ordered_sample(q, 2)
        return tuple(ordered_draws(p, chance.at(0, "accept"), proposed, q))[:3]

    one, other = law(Enumeration.outcomes(plain)), law(Enumeration.outcomes(drafted))
    assert set(one) == set(other)
    for outcome, weight in one.items():
        assert other[outcome] == pytest.approx(weight, abs=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("weights", [(0.5, 0.2, 0.3), (1.0, 1.0, 1.0), (0.0, 0.9, 0.1), (0.25, 0.25, 0.5), (3.0, 1.0)])
def test_every_scheme_keeps_particles_by_their_weights_on_average(scheme: str, weights: tuple[float, ...]) -> None:
    copies: Counter[int] = Counter()
    for ancestors, weight in Enumeration.outcomes(lambda chance: SCHEMES[scheme](weights, chance.at(0, "accept"))):
        assert len(ancestors) == len(weights)
        for one in ancestors:
            copies[one] += weight  # type: ignore[assignment]
    for index, weight in enumerate(weights):
        assert copies[index] == pytest.approx(len(weights) * weight / sum(weights), abs=1e-9)


def test_the_effective_sample_size_counts_equal_weights() -> None:
    assert effective_sample_size([2.0] * 5) == 5.0
    assert effective_sample_size([1.0, 0.0, 0.0]) == 1.0
    assert effective_sample_size([1.0, 0.5]) == pytest.approx(1.8)


# --------------------------------------------------------------------------------------------------- particles


def particles(count: int, seed: int, **settings: Any) -> Generation:
    context = tiny_context(4, 21)
    method = build("smcsd", context, {"num_particles": count, "num_draft_tokens": 2, **settings})
    decoder = Decoder(context.target)
    params = SamplingParams(temperature=1.0, seed=seed)
    one = decoder.submit(Request((0, 1, 2), method, params, max_new_tokens=3))
    decoder.run()
    one.raise_error()
    return one


def test_the_error_of_the_answer_s_law_falls_with_the_number_of_particles() -> None:
    target = autoregressive_distribution(random_table(4, 21), 4, SamplingParams(temperature=1.0), (0, 1, 2), 3)

    def error(count: int, runs: int) -> float:
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(runs):
            found[tuple(particles(count, seed).tokens)] += 1
        return 0.5 * sum(abs(found[one] / runs - target.get(one, 0.0)) for one in {*found, *target})

    few, many = error(1, 600), error(24, 600)
    assert many < 0.75 * few
    assert many < 0.2  # 600 draws of 64 texts are about 0.11 from their own law


def test_particles_report_their_weights() -> None:
    one = particles(6, 3)
    assert len(one.hypotheses) == 6
    assert sum(each.score for each in one.hypotheses) == pytest.approx(1.0)
    assert tuple(one.tokens) == one.hypotheses[0].tokens
    shares = [math.exp(each.log_weight) for each in one.hypotheses]
    assert [each.score for each in one.hypotheses] == pytest.approx([share / sum(shares) for share in shares])


def test_a_seed_repeats_a_population() -> None:
    assert particles(5, 8).hypotheses == particles(5, 8).hypotheses
    assert particles(5, 8).hypotheses != particles(5, 9).hypotheses


def test_weights_that_are_all_zero_are_an_error_in_words() -> None:
    context = tiny_context(4, 21)
    method = build("smcsd", context, {"num_particles": 3, "num_draft_tokens": 3})
    decoder = Decoder(context.target)
    params = SamplingParams(temperature=1.0, top_k=1, seed=1)
    failed = []
    for seed in range(12):
        one = decoder.submit(Request((0, 1, seed % 3), method, params, max_new_tokens=20))
        decoder.run()
        failed.append(one.error)
    said = [str(error) for error in failed if error is not None]
    assert said
    assert all("weights of all 3 particles are 0" in one for one in said)


def test_particles_need_a_temperature() -> None:
    context = tiny_context(4, 21)
    with pytest.raises(BadInput, match="particles are samples"):
        Decoder(context.target).submit(Request((0, 1), build("smcsd", context), max_new_tokens=3))


@pytest.mark.parametrize("temperature", [1.7, 1.0, 0.3, 0.01])
def test_tokens_that_a_draft_model_lacks_have_their_share_of_the_draws(temperature: float) -> None:
    logits = torch.tensor([[2.0, -math.inf, 1.5, -math.inf, -math.inf, 1.9], [0.5, -math.inf, 1.0, 3.0, 0.0, 0.1]])
    found = (whole_logits(logits, temperature, 0.1).double() / temperature).softmax(-1)
    drafted = (logits.double() / temperature).softmax(-1)
    for row, own, lacks in zip(found, drafted, [(1, 3, 4), (1,)], strict=True):
        assert row[list(lacks)].tolist() == pytest.approx([0.1 / len(lacks)] * len(lacks), rel=1e-3)
        assert row.tolist() == pytest.approx(
            [0.1 / len(lacks) if at in lacks else 0.9 * float(one) for at, one in enumerate(own)], abs=1e-4
        )


def test_a_draft_model_that_lacks_no_token_draws_from_its_own_distribution() -> None:
    logits = torch.randn(3, 7)
    assert whole_logits(logits, 0.8, 0.1) is logits


def test_all_particles_are_scored_in_one_shape() -> None:
    shapes: list[list[int]] = []

    class Watching(TableTarget):
        def score(self, batch: Any, *about: Any, **more: Any) -> Any:
            shapes.append([len(tree) for _, tree in batch])
            return super().score(batch, *about, **more)

    context = tiny_context(4, 21)
    target = Watching(4, seed=21)
    method = build("smcsd", context, {"num_particles": 5, "num_draft_tokens": 3})
    decoder = Decoder(target)
    decoder.submit(Request((0, 1, 2), method, SamplingParams(temperature=1.0, seed=2), max_new_tokens=12))
    decoder.run()
    assert shapes == [[3] * 5] * 3


# ---------------------------------------------------------------------------------------------------- siblings


class Reading(TableTarget):
    """Counts the rows that prefill computes."""

    rows = 0

    def prefill(self, sequences: Any, *about: Any, **more: Any) -> None:
        before = sum(len(one.kv) for one in sequences)
        super().prefill(sequences, *about, **more)
        self.rows += sum(len(one.kv) for one in sequences) - before


def siblings(target: TableTarget, count: int, shared: object | None, method: str = "none") -> list[Generation]:
    decoder = Decoder(target)
    context = tiny_context(8, 3)
    made = build(method, context)
    found = [
        decoder.submit(
            Request(
                tuple(at % 7 for at in range(40)),
                made,
                SamplingParams(temperature=1.0, seed=seed),
                max_new_tokens=6,
                siblings=shared,
            )
        )
        for seed in range(count)
    ]
    decoder.run()
    return found


def test_siblings_read_their_prompt_once() -> None:
    apart, together = Reading(8, seed=3), Reading(8, seed=3)
    one = siblings(apart, 4, None)
    other = siblings(together, 4, object())
    assert [each.tokens for each in one] == [each.tokens for each in other]
    assert apart.rows == 4 * 39
    assert together.rows == 39


def test_siblings_whose_prompt_is_read_in_chunks_wait_for_the_first() -> None:
    target = Reading(8, seed=3)
    decoder = Decoder(target)
    method, shared = build("none", tiny_context(8, 3)), object()
    found = [
        decoder.submit(
            Request(
                tuple(at % 7 for at in range(40)),
                method,
                SamplingParams(temperature=1.0, seed=seed),
                max_new_tokens=4,
                siblings=shared,
            )
        )
        for seed in range(3)
    ]
    while decoder.step(prefill_rows=10):
        pass
    assert target.rows == 39
    assert all(len(one.tokens) == 4 for one in found)


def test_the_first_sibling_may_be_cancelled_before_it_has_read() -> None:
    target = Reading(8, seed=3)
    decoder = Decoder(target)
    method, shared = build("none", tiny_context(8, 3)), object()
    asked = [Request(tuple(at % 7 for at in range(40)), method, max_new_tokens=4, siblings=shared) for _ in range(2)]
    first, second = map(decoder.submit, asked)
    decoder.step(prefill_rows=10)
    first.cancel()
    decoder.run()
    assert second.finish_reason == "length"


def test_siblings_of_a_drafter_that_reads_hidden_states_draft_as_alone() -> None:
    target = Reading(8, seed=3)
    found = siblings(target, 3, object(), "eagle3")
    assert target.rows == 39
    alone = siblings(Reading(8, seed=3), 3, None, "eagle3")
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    assert [one.metrics.drafted for one in found] == [one.metrics.drafted for one in alone]
