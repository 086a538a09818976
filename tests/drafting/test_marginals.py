"""Drafts from marginals: the likeliest prefixes as trees, chains drawn from their own rows, rates that are learned."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from outpace.acceptance.default import default_rule
from outpace.acceptance.rejection import Rejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Enumeration, SeededChance
from outpace.core.sampling import SamplingParams
from outpace.drafting.calibration import Calibration
from outpace.drafting.marginals import (
    EDGE,
    FromMarginals,
    Level,
    MarginalState,
    certainty,
    draw_chain,
    levels_of,
    likeliest_prefixes,
    marginal_prior,
)
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget, random_table
from support import NeverTwice, round_error

VOCAB = 5


def all_prefixes(levels: Seq[Level], width: int, depth: int) -> dict[tuple[int, ...], float]:
    """Every choice of candidates, with the product of their rates."""
    found = {}
    for length in range(1, min(depth, len(levels)) + 1):
        for ranks in product(range(width), repeat=length):
            path_acceptance_prob, strayed = 1.0, False
            for at, rank in enumerate(ranks):
                path_acceptance_prob *= marginal_prior((at, rank, strayed, certainty(levels[at].logs[rank])))
                strayed = strayed or rank > 0
            found[tuple(levels[at].tokens[rank] for at, rank in enumerate(ranks))] = path_acceptance_prob
    return found


@given(seed=st.integers(0, 99), nodes=st.integers(1, 30), width=st.integers(1, 3), depth=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_tree_holds_the_likeliest_of_all_prefixes_best_first(seed: int, nodes: int, width: int, depth: int) -> None:
    logits = 2.0 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))
    levels = levels_of(logits, range(10, 10 + VOCAB), 3)
    grown = likeliest_prefixes(levels, Calibration(marginal_prior).rate, Budget(depth, nodes, width), floor=0.0)
    every = all_prefixes(levels, width, depth)
    best = sorted(every.values(), reverse=True)[:nodes]
    assert grown.tree.path_acceptance_probs == pytest.approx(best)
    for node in range(len(grown.tree)):
        assert every[tuple(grown.tree.path_tokens(node))] == pytest.approx(grown.tree.path_acceptance_probs[node])
    assert len(grown.kinds) == len(grown.tree)


def test_what_calibration_has_learned_comes_before_what_the_drafter_says() -> None:
    levels = [Level([7, 8], [math.log(0.6), math.log(0.3)])]
    calibration = Calibration(marginal_prior)
    first, second = ((0, rank, False, certainty(levels[0].logs[rank])) for rank in (0, 1))
    for _ in range(100):
        calibration.learn(first, False)
        calibration.learn(second, True)
    grown = likeliest_prefixes(levels, calibration.rate, Budget(1, 4, 2))
    assert grown.tree.tokens == [8, 7]


def test_levels_are_probabilities_of_the_target_s_tokens_at_the_request_s_temperature() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    for temperature in (0.0, 0.5):
        log_q = (logits / (temperature or 1.0)).log_softmax(-1)
        first, second = levels_of(logits, [40, 50, 60], 2, temperature)
        assert first.tokens == [50, 60] and second.tokens[0] == 40
        assert first.logs == pytest.approx([float(log_q[0, 1]), float(log_q[0, 2])], abs=1e-5)


def test_certainty_is_symmetric_and_never_overflows() -> None:
    assert [certainty(math.log(q)) for q in (0.5, 0.73, 0.27)] == [0, 1, -1]
    assert certainty(0.0) == EDGE and certainty(-1e9) == -EDGE and certainty(math.log(1.0 - 1e-9)) == EDGE


def test_a_sure_row_is_trusted_on_the_likeliest_path_alone() -> None:
    assert marginal_prior((1, 0, False, 3)) > 0.9 > 0.75 > marginal_prior((1, 0, True, 3))
    assert marginal_prior((1, 0, False, -2)) == marginal_prior((1, 0, True, -2))


# ------------------------------------------------------------------------------------------------- drawn chains


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5),
        SamplingParams(temperature=1.0, logit_bias={2: -math.inf, 4: 1.0}),
        SamplingParams(temperature=1.0, processors=(NeverTwice(),)),
    ],
    ids=["top-k", "penalties", "bias", "grammar"],
)
def test_every_draw_comes_from_the_row_that_is_recorded(params: SamplingParams) -> None:
    """The frequency of every chain is the product of its recorded q."""
    target = TableTarget(VOCAB)
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    ids = torch.tensor([0, 2, 3, 4])
    sequence = target.sequence([1, 0], params)

    def program(source: object) -> tuple[tuple[int, ...], float]:
        tree = draw_chain(sequence, logits, ids, 2, source.at(0, "draft"))  # type: ignore[attr-defined]
        said = [tree.q_rows[draw.q_row].prob(draw.token) for draw in tree.draws]
        return tuple(tree.tokens), math.prod(said)

    outcomes = list(Enumeration.outcomes(program))
    assert len(outcomes) > 3
    for (_, said), weight in outcomes:
        assert said == pytest.approx(weight, abs=1e-6)


def test_a_chain_ends_where_nothing_can_follow() -> None:
    target = TableTarget(3)
    sequence = target.sequence([0], SamplingParams(temperature=1.0, processors=(NeverTwice(),)))
    chain = draw_chain(sequence, torch.zeros(3, 2), torch.tensor([0, 1]), 3, SeededChance(0).at(0, "draft"))
    assert sorted(chain.tokens) == [0, 1]  # the grammar would go on with a token that is not among the words


# -------------------------------------------------------------------------------------------------- the drafter


class TableRows(FromMarginals[MarginalState]):
    """The row of a table after the last token, for every position the same."""

    def __init__(self, topk: int = 1, *, sampled: bool = False, size: int = VOCAB) -> None:
        super().__init__(torch.arange(size), topk, sampled=sampled)
        self.size, self.table = size, random_table(VOCAB, 31, order=1)

    def begin(self, sequence: Sequence) -> MarginalState:
        return MarginalState(sequence, self.calibration_of(sequence))

    def rows(self, states: Seq[MarginalState], depths: Seq[int]) -> list[Tensor | None]:
        return [self.table(tuple(one.sequence.tokens))[: self.size].expand(max(depths), -1) for one in states]


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0), SamplingParams(1.0, repetition_penalty=1.4)])
@pytest.mark.parametrize("topk, sampled, size", [(1, True, VOCAB), (1, True, 3), (2, False, VOCAB), (1, False, 4)])
def test_chains_and_trees_are_lossless(topk: int, sampled: bool, size: int, params: SamplingParams) -> None:
    drafter = TableRows(topk, sampled=sampled, size=size)
    method = Method("table", drafter, default_rule(drafter.proposal), Fixed(2, topk=topk, max_nodes=3))
    assert round_error(method, params, table=random_table(VOCAB, 5), vocab=VOCAB) < 1e-6


def test_how_long_a_drawn_chain_is_does_not_depend_on_what_is_drawn() -> None:
    relative_costs = (1.0, 1.3, 1.6, 1.9, 2.2)
    drafter, target = TableRows(sampled=True), TableTarget(VOCAB)
    lengths, tokens = set(), set()
    for seed in range(30):
        sequence = target.sequence([1, 2], SamplingParams(temperature=1.0, seed=seed))
        [tree] = drafter.propose_batch([drafter.begin(sequence)], [Budget(4, 4, 1, relative_costs=relative_costs)])
        lengths.add(len(tree))
        tokens.add(tuple(tree.tokens))
    assert len(lengths) == 1
    assert 0 not in lengths and len(tokens) > 1


def test_the_threshold_of_confidence_ends_a_draft_before_its_row() -> None:
    drafter, target = TableRows(2), TableTarget(VOCAB)
    state = drafter.begin(target.sequence([1, 2]))
    largest = float(drafter.table((2,)).softmax(-1).max())
    assert not len(drafter.propose_batch([state], [Budget(3, 9, 2, confidence=largest + 0.01)])[0])
    assert len(drafter.propose_batch([state], [Budget(3, 9, 2, confidence=largest - 0.01)])[0])


def test_what_is_right_is_learned_also_where_it_was_not_drafted() -> None:
    """A drafter that is right against its own estimate is priced out at first, and drafted once it is known better."""
    target = TableTarget(VOCAB, lambda path: torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0]))

    class Timid(TableRows):
        def rows(self, states: Seq[MarginalState], depths: Seq[int]) -> list[Tensor | None]:
            return [torch.tensor([[0.0, 0.3, 0.0, 0.0, 0.0]]) for _ in states]

    drafter = Timid()

    class Priced(Fixed):
        def budget(self, *_: object, **__: object) -> Budget:
            return Budget(1, 1, 1, relative_costs=(1.0, 1.6))

    decoder = Decoder(target)
    request = Request((0,), Method("timid", drafter, Rejection(), Priced(1)), max_new_tokens=30, trace=True)
    generation = decoder.submit(request)
    decoder.run()
    lengths = [len(one.committed) for one in generation.rounds]
    assert lengths[0] == 1 and lengths[-2] == 2
