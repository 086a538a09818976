"""Every acceptance rule: exact on every kind of tree that it says it takes, refused in words on the others.

What test_acceptance.py shows of the recursion is not repeated: here are draws without replacement, greedy plus one,
deeper and wider trees, the couplings, and how much each rule accepts, with the transport bound above them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product as every

import numpy as np
import pytest
import torch
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.couplings import gumbel_redraw, maximal_redraw
from outpace.acceptance.k_sequential import division_factor
from outpace.acceptance.registry import rules
from outpace.acceptance.traversal import Traversal
from outpace.acceptance.univer import UniVer
from outpace.certify.fit import g_test
from outpace.certify.transport import draw_sets, optimal_acceptance
from outpace.core.chance import Chance, ChanceSource, Enumeration, SeededChance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.targets.base import TreeScores
from outpace.targets.table import Table, TableTarget, random_table
from support import (
    Grow,
    NeverTwice,
    Path,
    Q,
    both,
    certain_tree,
    draw,
    merged,
    method,
    round_error,
    sampled_chain,
    sampled_tree,
)

EXACT = 1e-6
ALL = ("recursive-rejection", "rejection", "traversal", "block", "univer", "k-seq", "gumbel-coupling", "greedy")
PLAIN = SamplingParams(1.0)
PARAMS = {
    "temperature 1": PLAIN,
    "temperature 0.6, top-k": SamplingParams(0.6, top_k=2),
    "top-p, penalties": SamplingParams(1.3, top_p=0.8, repetition_penalty=1.5, presence_penalty=0.6),
    "processor": SamplingParams(1.0, frequency_penalty=0.4, processors=(NeverTwice(),)),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def rule(name: str) -> AcceptanceRule:
    return rules()[name]()


# ------------------------------------------------------------------------------------------- which rule, which tree

PROPOSALS = {
    "certain chain": Proposal(),
    "sampled chain": Proposal(sampled=True),
    "certain tree": Proposal(tree=True),
    "with replacement": Proposal(tree=True, sampled=True),
    "without replacement": Proposal(tree=True, sampled=True, replacement=False),
    "certain and one sampled": Proposal(tree=True, sampled=True, one_sampled_sibling=True),
}
TAKES: dict[str, set[str]] = {
    "recursive-rejection": set(PROPOSALS),
    "traversal": set(PROPOSALS),
    "greedy": set(PROPOSALS),
    "rejection": {"certain chain", "sampled chain"},
    "block": {"certain chain", "sampled chain"},
    "univer": {"certain chain", "sampled chain", "certain tree", "certain and one sampled"},
    "k-seq": {"sampled chain", "with replacement"},
    "gumbel-coupling": {"certain chain", "certain tree"},
}


def test_the_table_names_every_lossless_rule() -> None:
    known = {one.name for one in rules().values() if one.__module__.startswith("outpace.") and one.lossless}
    assert known == set(TAKES) == set(ALL)


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("kind", PROPOSALS)
def test_a_pair_fits_or_is_refused_in_words(name: str, kind: str) -> None:
    def build() -> None:
        method(sampled_chain(Q(random_table(3))), PROPOSALS[kind], rule=rule(name), name="the-drafter")

    if kind in TAKES[name]:
        build()
        return
    with pytest.raises(BadInput) as refused:
        build()
    said = str(refused.value)
    assert f"rule '{name}'" in said
    assert "'the-drafter' dra" in said
    assert str(PROPOSALS[kind]) in said
    assert "\n" not in said


@pytest.mark.parametrize("name", [name for name in ALL if name != "greedy"])
def test_sampling_rules_fit_every_temperature_and_greedy_only_its_own(name: str) -> None:
    rule(name).check_params(SamplingParams())
    rule(name).check_params(SamplingParams(1.5))
    with pytest.raises(BadInput, match="temperature"):
        rule("greedy").check_params(SamplingParams(1.5))


# ------------------------------------------------------------------------------------------------ exactness


def distinct_tree(q: Q, draws: tuple[int, ...]) -> Grow:
    """Siblings without replacement, one row a node, level by level."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        tree.replacement = False
        level = [ROOT]
        for count in draws[:depth]:
            below: list[int] = []
            for node in level:
                row = q.row((*tokens, *tree.path_tokens(node)))
                picks = chance.ordered_sample(row.probs, count)
                ids = picks if row.ids is None else [int(row.ids[index]) for index in picks]
                below.append(tree.add(node, ids[0], row))
                held = len(tree.q_rows) - 1
                below += [tree.add(node, token, held) for token in ids[1:]]
            level = below

    return grow


def greedy_plus_one(q: Q, widths: tuple[int, ...], sampled_first: bool = False) -> Grow:
    """``widths[d] - 1`` likeliest tokens and one sampled from the rest, after every node at depth d."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        level = [ROOT]
        for width in widths[:depth]:
            below: list[int] = []
            for node in level:
                probs = q.row((*tokens, *tree.path_tokens(node))).probs.clone()
                known = probs.topk(width - 1).indices.tolist()
                probs[known] = 0.0
                row = QRow(probs / probs.sum())
                if sampled_first:
                    below.append(tree.add(node, draw(row, chance), row))
                below += [tree.add(node, token) for token in known]
                if not sampled_first:
                    below.append(tree.add(node, draw(row, chance), row))
            level = below

    return grow


def kinds(vocab: int, seed: int) -> dict[str, tuple[Grow, str]]:
    """Trees that test_acceptance.py has not, and the proposal that they are."""
    one, two = random_table(vocab, seed + 1, sharpness=1.0), random_table(vocab, seed + 2, sharpness=1.0)
    q, other = Q(one), Q(two, temperature=0.7)
    bf16, reduced = Q(one, dtype=torch.bfloat16), Q(one, ids=tuple(range(vocab - 1, 0, -1)))
    return {
        "long chain": (sampled_chain(q), "sampled chain"),
        "chain, bf16 rows": (sampled_chain(bf16), "sampled chain"),
        "chain, reduced vocabulary": (sampled_chain(reduced), "sampled chain"),
        "certain chain": (certain_chain(seed, vocab), "certain chain"),
        "certain tree, repeated draws": (certain_tree(seed, vocab, 8), "certain tree"),
        "three draws": (sampled_tree(q, (3,)), "with replacement"),
        "three draws, bf16 rows": (sampled_tree(bf16, (3,)), "with replacement"),
        "two draws, reduced vocabulary": (sampled_tree(reduced, (2, 1)), "with replacement"),
        "chain, then two draws": (sampled_tree(q, (1, 2)), "with replacement"),
        "distinct": (distinct_tree(q, (2,)), "without replacement"),
        "all there is": (distinct_tree(q, (vocab,)), "without replacement"),
        "distinct tree": (distinct_tree(q, (2, 1)), "without replacement"),
        "chain, then distinct": (distinct_tree(q, (1, 2)), "without replacement"),
        "distinct, bf16 rows": (distinct_tree(bf16, (2, 1)), "without replacement"),
        "distinct, reduced vocabulary": (distinct_tree(reduced, (2, 1)), "without replacement"),
        "distinct, more than the reduced vocabulary": (distinct_tree(reduced, (vocab,)), "without replacement"),
        "merged distinct trees": (
            merged(distinct_tree(q, (2,)), certain_tree(seed, vocab, 2), distinct_tree(other, (2,))),
            "without replacement",
        ),
        "greedy plus one": (greedy_plus_one(q, (2, 2)), "certain and one sampled"),
        "one, then greedy": (greedy_plus_one(q, (2, 1), sampled_first=True), "certain and one sampled"),
        "greedy plus one of another model": (
            both(certain_tree(seed, vocab, 4), sampled_chain(other)),
            "certain and one sampled",
        ),
    }


def certain_chain(seed: int, vocab: int) -> Grow:
    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        rng, node = np.random.default_rng([seed, *tokens]), ROOT
        for token in rng.integers(vocab, size=depth):
            node = tree.add(node, int(token))

    return grow


def pairs() -> list[tuple[str, str]]:
    """Every kind with every enumerable rule that says it takes it."""
    return [
        (kind, name)
        for kind, (_, proposal) in kinds(3, 0).items()
        for name in ALL
        if name != "greedy" and proposal in TAKES[name]
    ]


@pytest.mark.parametrize(("kind", "name"), pairs())
def test_a_rule_is_exact_on_what_it_takes(kind: str, name: str) -> None:
    for number, params in enumerate(PARAMS.values()):
        grow, proposal = kinds(3, 40 + number)[kind]
        one = method(grow, PROPOSALS[proposal], rule=rule(name))
        assert round_error(one, params, table=random_table(3, 90 + number), prompt=(0, 2)) < EXACT


@pytest.mark.parametrize(("kind", "name"), [pair for pair in pairs() if "tree" not in pair[0]])
def test_a_rule_is_exact_with_four_tokens(kind: str, name: str) -> None:
    grow, proposal = kinds(4, 60)[kind]
    one = method(grow, PROPOSALS[proposal], rule=rule(name), length=1)
    for table in (random_table(4, 61), random_table(4, 62, sharpness=5.0)):
        assert round_error(one, PLAIN, table=table, vocab=4, horizon=2) < EXACT


@pytest.mark.parametrize("name", ["rejection", "block", "traversal", "univer", "k-seq"])
def test_chains_of_three(name: str) -> None:
    grow, proposal = kinds(2, 70)["long chain"]
    one = method(grow, PROPOSALS[proposal], rule=rule(name), length=3)
    assert round_error(one, PLAIN, table=random_table(2, 71), vocab=2, horizon=4) < EXACT


@pytest.mark.parametrize("name", ["block", "traversal", "univer", "recursive-rejection", "k-seq"])
@pytest.mark.parametrize("sharpness", [0.0, 40.0])
def test_equal_and_disjoint_distributions(name: str, sharpness: float) -> None:
    """p = q leaves nothing after a rejection, one-hot p leaves nothing for most draws: no division by zero."""
    table = random_table(3, 81, sharpness=sharpness)
    for q in (Q(table), Q(random_table(3, 82, sharpness=40.0))):
        one = method(sampled_chain(q), PROPOSALS["sampled chain"], rule=rule(name))
        assert round_error(one, PLAIN, table=table) < EXACT


def test_a_rule_that_plans_over_certain_siblings_is_exact_when_the_sample_repeats_one() -> None:
    table, q = random_table(4, 11), Q(random_table(4, 12))
    for first in (True, False):
        grows = (certain_tree(5, 4, 5), sampled_chain(q))
        one = method(both(*(grows if first else grows[::-1])), PROPOSALS["certain and one sampled"], rule=UniVer())
        assert round_error(one, PLAIN, table=table, vocab=4, horizon=2) < EXACT


# ------------------------------------------------------------------------------------------------ how much is accepted


def accepted(grow: Grow, name: str, table: Table, kind: str, vocab: int, length: int) -> float:
    """Expected number of draft tokens that a round accepts."""
    judge, target = rule(name), TableTarget(vocab, table)
    judge.check("toy", PROPOSALS[kind])
    sequence = target.sequence((0, 1), PLAIN)
    target.prefill([sequence])
    scored: dict[tuple[object, ...], TreeScores] = {}

    def program(source: ChanceSource) -> int:
        tree = TokenTree()
        grow(tree, (0, 1), length, source.at(2, "draft"))
        key = (tuple(tree.draws), len(tree))
        if key not in scored:  # many branches of the rule look at one tree
            scored[key] = target.score([(sequence, tree)])[0]
        return len(judge.accept([scored[key]], [None], [source.at(2, "accept")])[0].path)

    return sum(weight * count for count, weight in Enumeration.outcomes(program))


def tables(seed: int, vocab: int) -> tuple[Table, Q]:
    sharp = (0.5, 1.0, 2.0)[seed % 3]
    return random_table(vocab, seed, sharpness=sharp), Q(random_table(vocab, seed + 900, sharpness=1.0))


@pytest.mark.parametrize("seed", range(10))
def test_block_accepts_at_least_as_much_as_rejection(seed: int) -> None:
    table, q = tables(seed, 3)
    grow = sampled_chain(q)
    token_wise = accepted(grow, "rejection", table, "sampled chain", 3, 3)
    blocks = accepted(grow, "block", table, "sampled chain", 3, 3)
    assert blocks >= token_wise - 1e-6
    same = [accepted(grow, name, table, "sampled chain", 3, 3) for name in ("traversal", "univer")]
    assert same == pytest.approx([blocks, blocks], abs=1e-6), "on a chain all three are block verification"


def test_block_is_better_somewhere() -> None:
    gains = []
    for seed in range(6):
        table, q = tables(seed, 3)
        gains.append(
            accepted(sampled_chain(q), "block", table, "sampled chain", 3, 2)
            - accepted(sampled_chain(q), "rejection", table, "sampled chain", 3, 2)
        )
    assert max(gains) > 0.01


SHAPES: dict[str, tuple[Callable[[Q], Grow], str]] = {
    "two draws and chains": (lambda q: sampled_tree(q, (2, 1)), "with replacement"),
    "chain, then two": (lambda q: sampled_tree(q, (1, 2)), "with replacement"),
    "two distinct and chains": (lambda q: distinct_tree(q, (2, 1)), "without replacement"),
    "two distinct twice": (lambda q: distinct_tree(q, (2, 2)), "without replacement"),
    "greedy plus one": (lambda q: greedy_plus_one(q, (2, 2)), "certain and one sampled"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_traversal_accepts_at_least_as_much_as_recursive_rejection(shape: str) -> None:
    make, kind = SHAPES[shape]
    for seed in range(4):
        table, q = tables(seed, 3)
        recursive = accepted(make(q), "recursive-rejection", table, kind, 3, 2)
        assert accepted(make(q), "traversal", table, kind, 3, 2) >= recursive - 1e-6


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("first", [True, False])
def test_univer_accepts_at_least_as_much_as_traversal_on_greedy_sets(seed: int, first: bool) -> None:
    table, q = tables(seed, 3)
    grow = greedy_plus_one(q, (2, 2), sampled_first=first)
    traversal = accepted(grow, "traversal", table, "certain and one sampled", 3, 2)
    assert accepted(grow, "univer", table, "certain and one sampled", 3, 2) >= traversal - 1e-6


def p_of(table: Table) -> np.ndarray:
    return np.asarray(table((0, 1)).double().softmax(-1))


@pytest.mark.parametrize("seed", range(6))
def test_one_draw_is_accepted_as_often_as_p_and_q_overlap(seed: int) -> None:
    table, q = tables(seed, 4)
    p, drafted = p_of(table), q.row((0, 1)).probs.double().numpy()
    overlap = float(np.minimum(p, drafted).sum())
    assert optimal_acceptance(p, draw_sets(drafted, 1, True)) == pytest.approx(overlap)
    for name in ("rejection", "recursive-rejection", "block", "traversal", "univer", "k-seq"):
        got = accepted(sampled_chain(q), name, table, "sampled chain", 4, 1)
        assert got == pytest.approx(overlap, abs=1e-6), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("draws", [2, 3])
def test_no_rule_accepts_more_than_the_transport_bound(seed: int, draws: int) -> None:
    table, q = tables(seed, 4)
    p, drafted = p_of(table), q.row((0, 1)).probs.double().numpy()
    for replacement, names in ((True, ("recursive-rejection", "traversal", "k-seq")), (False, ("traversal",))):
        kind = "with replacement" if replacement else "without replacement"
        grow = sampled_tree(q, (draws,)) if replacement else distinct_tree(q, (draws,))
        bound = optimal_acceptance(p, draw_sets(drafted, draws, replacement))
        got = {name: accepted(grow, name, table, kind, 4, 1) for name in names}
        assert max(got.values()) <= bound + 1e-6
        if replacement:
            assert got["traversal"] == pytest.approx(got["recursive-rejection"], abs=1e-6), "one level has no bottom"
            assert got["k-seq"] >= (1 - 1 / math.e) * bound
            assert got["k-seq"] >= float(np.minimum(p, drafted).sum()) - 1e-6, "more draws do not hurt"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [2, 3])
def test_univer_attains_the_transport_bound_of_greedy_sets(seed: int, width: int) -> None:
    table, q = tables(seed, 4)
    p, drafted = p_of(table), q.row((0, 1)).probs.double().numpy()
    known = np.argsort(-drafted)[: width - 1]
    rest = drafted.copy()
    rest[known] = 0
    rest /= rest.sum()
    proposal_distribution = {
        frozenset({*known.tolist(), token}): float(rest[token]) for token in range(4) if rest[token] > 0
    }
    bound = optimal_acceptance(p, proposal_distribution)
    for first in (True, False):
        grow = greedy_plus_one(q, (width,), sampled_first=first)
        assert accepted(grow, "univer", table, "certain and one sampled", 4, 1) == pytest.approx(bound, abs=1e-6)
        for name in ("traversal", "recursive-rejection"):
            assert accepted(grow, name, table, "certain and one sampled", 4, 1) <= bound + 1e-6


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_the_division_factor_solves_its_equation(k: int) -> None:
    rng = np.random.default_rng(k)
    for _ in range(20):
        p, q = (torch.from_numpy(rng.dirichlet(np.full(6, 0.5))) for _ in range(2))
        rho = division_factor(p, q, k)
        assert 1 <= rho <= k
        beta = float(torch.minimum(q, p / rho).sum())
        assert 1 - (1 - beta) ** k <= rho * beta + 1e-9, "a smaller factor would take more than p has"
        if 1 < rho < k:
            assert 1 - (1 - beta) ** k == pytest.approx(rho * beta, abs=1e-9)


def test_siblings_that_a_drafter_did_not_declare_are_refused_when_they_come() -> None:
    one, two = Q(random_table(3, 1)), Q(random_table(3, 2))
    mixed = method(both(sampled_chain(one), sampled_chain(two)), rule=rule("k-seq"))
    twice = method(sampled_tree(one, (2,)), PROPOSALS["certain and one sampled"], rule=UniVer())
    for wrong, words in ((mixed, "from one q row"), (twice, "at most one sampled")):
        decoder = Decoder(TableTarget(3))
        decoder.submit(Request((0, 1), wrong, PLAIN, max_new_tokens=3))
        with pytest.raises(BadInput, match=words):
            decoder.run()


# ---------------------------------------------------------------------------------------------------------- couplings

ROWS: list[tuple[list[float], list[float]]] = [
    ([0.5, 0.3, 0.2, 0.0], [0.2, 0.2, 0.3, 0.3]),
    ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]),
    ([0.7, 0.1, 0.1, 0.1], [0.0, 0.5, 0.5, 0.0]),
    ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),
    ([0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
]


def as_rows(number: int) -> tuple[Tensor, Tensor, float]:
    p, q = (torch.tensor(row, dtype=torch.float64) for row in ROWS[number])
    return p, q, float((p - q).abs().sum() / 2)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_maximal_redraw_is_of_p_and_stays_as_often_as_can_be(number: int) -> None:
    p, q, distance = as_rows(number)

    def program(chance: ChanceSource) -> tuple[int, int]:
        stream = chance.at(0, "x")
        token = stream.categorical(q)
        return token, maximal_redraw(p, q, token, stream)

    proposal_distribution = torch.zeros(4, dtype=torch.float64)
    stays = 0.0
    for (before, after), weight in Enumeration.outcomes(program):
        proposal_distribution[after] += weight
        stays += weight * (before == after)
    torch.testing.assert_close(proposal_distribution, p, atol=1e-9, rtol=0)
    assert stays == pytest.approx(1 - distance, abs=1e-9)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_gumbel_redraw_is_of_p_and_stays_as_often_as_shared_noise_lets_it(number: int) -> None:
    p, q, distance = as_rows(number)
    samples, counts, stays = 6000, np.zeros(4), 0
    source = SeededChance(17 + number)
    for index in range(samples):
        chance = source.at(index, "x")
        token = chance.categorical(q)
        again = gumbel_redraw(p, q, token, chance)
        counts[again] += 1
        stays += again == token
    assert g_test(counts, samples * p.numpy())[0] > 1e-4
    ratios = [float(sum(max(p[j] / p[i], q[j] / q[i]) for j in range(4))) for i in range(4) if p[i] > 0 and q[i] > 0]
    expected = sum(1 / ratio for ratio in ratios)  # the argmax under both, of the same noise
    spread = 4.5 * math.sqrt(max(expected * (1 - expected), 1e-12) / samples) + 1e-9
    assert abs(stays / samples - expected) <= spread
    assert expected >= (1 - distance) / (1 + distance) - 1e-9
    assert expected <= 1 - distance + 1e-9


def test_the_joint_law_of_a_gumbel_redraw_is_that_of_shared_noise() -> None:
    p, q, _ = as_rows(0)
    samples = 6000
    source = SeededChance(5)
    redrawn, shared = np.zeros((4, 4)), np.zeros((4, 4))
    for index in range(samples):
        chance = source.at(index, "x")
        token = chance.categorical(q)
        redrawn[token, gumbel_redraw(p, q, token, chance)] += 1
    rng = np.random.default_rng(6)
    with np.errstate(divide="ignore"):
        noise = rng.gumbel(size=(400_000, 4))
        np.add.at(shared, ((noise + np.log(q.numpy())).argmax(1), (noise + np.log(p.numpy())).argmax(1)), 1)
    assert g_test(redrawn.ravel(), samples * shared.ravel() / shared.sum())[0] > 1e-4


def test_rules_are_stateless_values() -> None:
    """A rule serves every request; nothing of one may reach another."""
    for name, number in every(ALL, range(2)):
        assert not vars(rule(name)), (name, number)
    assert issubclass(rules()["block"], Traversal)
