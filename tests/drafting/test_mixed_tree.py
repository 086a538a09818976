"""Drafts of likely tokens with one draw beside them: what is drawn, how many, and what is learned of it."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from outpace.controllers.base import Budget
from outpace.core.chance import SeededChance
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import DenseDistribution
from outpace.core.tree import DETERMINISTIC, ROOT, TokenTree
from outpace.drafting import mixed_tree
from outpace.drafting.calibration import Calibration
from outpace.drafting.dynamic_tree import CENTRES
from outpace.drafting.mixed_tree import KNOWN, MixedTree, by_probability
from outpace.targets.branches import Found
from outpace.targets.top import top_and_totals

IDS = list(range(10, 18))
KINDS = list(product(range(4), range(len(CENTRES)), range(KNOWN, 4), [8]))
"""Every kind of candidate at temperature 0.8."""
FLAT = torch.tensor([[1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]])
PEAKED = torch.tensor([[9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
STEEP = Budget(4, 8, 4, relative_costs=(1.0, 1.02, 1.04, 1.06, 2.0, 3.0, 4.0, 5.0, 6.0))


def begun(
    budget: Budget, seed: int = 0, calibration: Calibration | None = None, *, top_k: int = 0, **settings: float
) -> MixedTree:
    params, chance = SamplingParams(temperature=0.8, top_k=top_k), SeededChance(seed).at(0, "draft")
    known = calibration or Calibration(by_probability)
    return MixedTree(params, budget, known, IDS, torch.tensor(IDS), chance, **settings)  # type: ignore[arg-type]


def drafted(logits: Tensor, budget: Budget, seed: int = 0, levels: int = 1) -> TokenTree:
    one = begun(budget, seed)
    wanted = one.take(logits)
    for _ in range(levels - 1):
        if not wanted:
            break
        wanted = one.take(logits.expand(len(wanted), -1))
    return one.tree()


def kinds(tree: TokenTree, node: int = ROOT) -> list[bool]:
    """For every draw after a node whether it was sampled."""
    return [draw.q_row != DETERMINISTIC for draw in tree.draws_at(node)]


def test_a_broad_distribution_is_drawn_from_and_a_narrow_one_is_not() -> None:
    chain = Budget(1, 1, 1)
    assert kinds(drafted(FLAT, chain)) == [True]
    assert kinds(drafted(PEAKED, chain)) == [False]
    assert sum(kinds(drafted(FLAT, Budget(1, 4, 4)))) == 1, "one draw a node at most"


def test_a_draw_comes_from_what_the_likeliest_tokens_leave() -> None:
    for seed in range(20):
        tree = drafted(FLAT, Budget(1, 3, 3), seed)
        [row] = tree.q_rows
        known = [draw.token for draw in tree.draws if draw.q_row == DETERMINISTIC]
        sampled = [draw.token for draw in tree.draws if draw.q_row != DETERMINISTIC]
        assert len(tree) == 3 and len(sampled) == 1
        right = (FLAT[0] / 0.8).softmax(-1)
        right[[IDS.index(token) for token in known]] = 0.0
        torch.testing.assert_close(row.dense(18)[10:], right / right.sum())
        assert row.prob(sampled[0]) == pytest.approx(float(row.dense(18)[sampled[0]]))
        assert row.prob(sampled[0]) > 0.0
        assert row.prob(known[0]) == 0.0 and row.prob(3) == 0.0, "of others, too, the probability is that of the row"


def _grown(one: MixedTree, logits: Tensor, *, ranked: bool) -> TokenTree:
    """Drafted from rows that are the same everywhere, by what the head's kernels ranked or from the logits alone."""
    wanted, rows = [(0, 0)], logits
    while wanted:
        rows = logits.expand(len(wanted), -1)
        if ranked:
            assert one.ranking is not None and one.ranking.logits
            best = list(top_and_totals(rows, 6, one.ranking.inverse_temperature))
            found = Found([([9.9], [0], 9.9), *best], torch.cat((torch.zeros(1, 8), rows)))
            wanted = one.read(found, slice(1, 1 + len(rows)))
        else:
            wanted = one.take(rows)
    return one.tree()


@pytest.mark.parametrize("logits", [FLAT, 2 * FLAT, PEAKED])
@pytest.mark.parametrize("seed", range(5))
def test_ranked_rows_whole_rows_and_opened_rows_give_the_same_draft(logits: Tensor, seed: int) -> None:
    budget = Budget(3, 9, 4)
    whole = _grown(begun(budget, seed), logits, ranked=False)
    ranked = _grown(begun(budget, seed), logits, ranked=True)
    opened = _grown(begun(budget, seed, top_k=8), logits, ranked=False)
    assert begun(budget, seed, top_k=8).ranking is None, "cuts need the whole row"
    assert len(whole) == 9 or logits is PEAKED
    for other in (ranked, opened):
        assert (other.tokens, other.parents) == (whole.tokens, whole.parents)
        assert other.path_acceptance_probs == pytest.approx(whole.path_acceptance_probs, rel=1e-5)
        for one, two in zip(other.q_rows, whole.q_rows, strict=True):
            torch.testing.assert_close(one.dense(18), two.dense(18))


def test_tokens_that_are_cut_are_not_drafted() -> None:
    for seed in range(10):
        assert set(_grown(begun(Budget(1, 6, 6), seed, top_k=2), FLAT, ranked=False).tokens) == {10, 11}


def test_where_no_token_can_follow_nothing_is_drafted() -> None:
    nothing = torch.full((1, 8), -torch.inf)
    assert len(_grown(begun(Budget(2, 4, 4)), nothing, ranked=True)) == 0
    assert len(_grown(begun(Budget(2, 4, 4)), nothing, ranked=False)) == 0
    assert len(_grown(begun(Budget(2, 4, 4), top_k=3), nothing, ranked=False)) == 0


@pytest.mark.parametrize("at", range(3))
def test_a_row_that_is_no_number_is_not_drawn_from(at: int) -> None:
    broken = FLAT.clone()
    broken[0, at] = torch.nan
    assert set(_grown(begun(Budget(1, 4, 4)), broken, ranked=True).q_rows) == set()
    assert len(_grown(begun(Budget(1, 4, 4), top_k=3), broken, ranked=False)) == 0


def test_a_draw_finds_what_many_unlikely_tokens_share() -> None:
    ids = list(range(2000))
    logits = torch.full((1, 2000), 0.0)
    logits[0, 7] = math.log(2000)  # half of all, at temperature 1
    params, calibration = SamplingParams(temperature=1.0), Calibration(by_probability)
    found = set()
    for seed in range(4):
        chance = SeededChance(seed).at(0, "draft")
        one = MixedTree(params, Budget(1, 2, 2), calibration, ids, torch.tensor(ids), chance)
        one.take(logits)
        drawn = [draw.token for draw in one.tree().draws if draw.q_row != DETERMINISTIC]
        assert len(one.tree()) == 2 and len(drawn) == 1
        found.add(drawn[0])
    assert 7 not in found and len(found) > 1


@pytest.mark.parametrize("logits", [FLAT, PEAKED])
def test_how_many_follow_a_node_does_not_depend_on_what_is_drawn(logits: Tensor) -> None:
    shapes = {tuple(kinds(drafted(logits, STEEP, seed))) for seed in range(30)}
    tokens = {tuple(drafted(logits, STEEP, seed).tokens) for seed in range(30)}
    assert len(shapes) == 1
    assert logits is PEAKED or len(tokens) > 1, "draws differ"


def test_rows_are_added_while_they_are_worth_their_cost() -> None:
    assert len(drafted(FLAT, STEEP)) == 3, "the fourth row costs an autoregressive step"
    dear = Budget(4, 8, 4, relative_costs=(1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0))
    assert len(drafted(FLAT, dear)) == 0


def test_levels_end_with_the_depth_the_budget_and_their_cost() -> None:
    assert max(drafted(PEAKED, Budget(3, 32, 1), levels=9).depths) == 3
    assert len(drafted(PEAKED, Budget(9, 4, 1), levels=9)) == 4
    free = Budget(3, 8, 1, relative_costs=(1.0,) * 9)
    assert begun(free).take(PEAKED)
    assert not begun(free, level=5.0).take(PEAKED)


def test_the_target_teaches_how_likely_candidates_were() -> None:
    rates = Calibration(by_probability)
    one = begun(Budget(1, 2, 2), calibration=rates)
    one.take(FLAT)
    before = {kind: rates.rate(kind) for kind in KINDS if kind in rates._rates}
    p = torch.zeros(18)
    p[10], p[17] = 0.9, 0.1
    for _ in range(40):
        one.learn([10], lambda _: DenseDistribution(p))
    after = {kind: rates.rate(kind) for kind in before}
    assert any(after[kind] > before[kind] for kind in before if kind[2] == KNOWN), "p of the likeliest is above q"
    tree = one.tree()
    [drawn] = [draw for draw in tree.draws if draw.q_row != DETERMINISTIC]
    [kind] = [kind for kind in before if kind[2] == len(tree) - 1]
    accepted = min(1.0, float(p[drawn.token]) / tree.q_rows[drawn.q_row].prob(drawn.token))
    assert after[kind] == pytest.approx(accepted, abs=0.2)


def test_greedy_rounds_teach_nothing() -> None:
    rates = Calibration(by_probability)
    one = begun(Budget(1, 2, 2), calibration=rates)
    one.take(FLAT)
    before = dict(rates._rates)
    one.learn([10])
    assert rates._rates == before


def test_tokens_too_unlikely_to_be_worth_any_row_change_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out of the estimates, which are made and learned from in every round."""
    rows = 2.5 * torch.randn(60, 1, 8, generator=torch.Generator().manual_seed(5))
    budget = Budget(3, 8, 6, relative_costs=tuple(1.0 + 0.08 * count for count in range(9)))
    found = [drafted(row, budget, seed, levels=3) for seed, row in enumerate(rows)]
    few = sum(len(_root(row, budget).kinds) for row in rows)
    monkeypatch.setattr(mixed_tree, "_CHEAP", 0.0)
    assert [(one.tokens, one.parents) for one in found] == [
        (one.tokens, one.parents) for one in (drafted(row, budget, seed, levels=3) for seed, row in enumerate(rows))
    ]
    assert few < 0.8 * sum(len(_root(row, budget).kinds) for row in rows)


def _root(row: Tensor, budget: Budget) -> mixed_tree._Node:
    one = begun(budget)
    one.take(row)
    return one._nodes[ROOT]
