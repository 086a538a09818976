"""Lossy rules: the exact distribution of the committed token on small vocabularies, their settings, their bounds.

Every branch of chance is enumerated. Optimality of ``cactus`` is checked against a convex program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.bounds import (
    HALF_CHI_SQUARE,
    KL,
    MEASURES,
    TOTAL_VARIATION,
    half_chi_square,
    kl_divergence,
    total_variation,
)
from outpace.acceptance.cactus import Cactus, best_ratios
from outpace.acceptance.lantern import MOST_NEIGHBORS, neighbors_of
from outpace.acceptance.lossy import LossyRule
from outpace.acceptance.registry import all_rules, configured, find_rule, public
from outpace.acceptance.relaxed_target import Proposed
from outpace.acceptance.target_first import TargetFirst
from outpace.bench.quality.closed_forms import closed_form
from outpace.core.chance import ChanceSource, Enumeration
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import TreeScores
from outpace.targets.table import TableTarget, random_table
from support import Q, certain_tree, method, round_error, sampled_chain, sampled_tree

LOSSY = (
    "typical",
    "top-beta",
    "cactus",
    "margin",
    "rollback",
    "fly",
    "lantern",
    "grouped",
    "importance",
    "target-first",
)
EXACT: dict[str, dict[str, Any]] = {
    "top-beta": {"tau": 0.0},
    "cactus": {"delta": 0.0},
    "margin": {"theta": 1.0},
    "rollback": {"distance": 0.0},
    "fly": {"entropy": 1.0},
    "lantern": {"cap": 0.0},
    "grouped": {"size": 1},
    "importance": {"relax": 0.0},
    "target-first": {"candidates": 1},
}
"""Settings that mean lossless."""
PLAIN = SamplingParams(1.0)
GREEDY = SamplingParams()

pytestmark = pytest.mark.usefixtures("one_thread")


def committed(
    rule: AcceptanceRule,
    rows: Mapping[Any, Seq[float]],
    grow: Callable[[ChanceSource], TokenTree],
    params: SamplingParams = PLAIN,
) -> dict[tuple[int, ...], float]:
    """The distribution of what one round commits. ``rows``: probabilities after each path of draft tokens, whose
    logarithms are the logits, up to a constant; paths that are not given have token 0 for certain."""
    size = len(rows[()])
    target = TableTarget(size)
    judge = rule.for_target(target)

    def program(chance: ChanceSource) -> tuple[int, ...]:
        tree = grow(chance)
        paths = [(), *(tuple(tree.path_tokens(node)) for node in range(len(tree)))]
        certain = [1.0, *[0.0] * (size - 1)]
        logits = torch.tensor([rows.get(path, certain) for path in paths]).log() + 5.0
        scores = TreeScores(target.sequence([0], params), tree, logits, {})
        [verdict] = judge.accept([scores], [None], [chance.at(1, "accept")])
        return (*(tree.tokens[node] for node in verdict.path), verdict.token)

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for outcome, weight in Enumeration.outcomes(program):
        found[outcome] += weight
    return dict(found)


def first(found: Mapping[tuple[int, ...], float], size: int) -> Tensor:
    """The distribution of the first token, (size,)."""
    h = torch.zeros(size, dtype=torch.float64)
    for tokens, weight in found.items():
        h[tokens[0]] += weight
    return h


def chain(*tokens: int) -> Callable[[ChanceSource], TokenTree]:
    return lambda _: TokenTree.chain(tokens)


def siblings(*tokens: int) -> Callable[[ChanceSource], TokenTree]:
    def grow(_: ChanceSource) -> TokenTree:
        tree = TokenTree()
        for token in tokens:
            tree.add(ROOT, token)
        return tree

    return grow


def sampled(q: Seq[float], count: int = 1) -> Callable[[ChanceSource], TokenTree]:
    def grow(chance: ChanceSource) -> TokenTree:
        tree, row, stream = TokenTree(), QRow(torch.tensor(q)), chance.at(1, "draft")
        for _ in range(count):
            tree.add(ROOT, stream.categorical(row.probs), 0 if tree.q_rows else row)
        return tree

    return grow


def close(found: Mapping[Any, float], expected: Mapping[Any, float]) -> bool:
    return all(abs(found.get(key, 0.0) - expected.get(key, 0.0)) < 1e-6 for key in {*found, *expected})


# ------------------------------------------------------------------------------------------------------ every rule


def test_every_lossy_rule_is_here_and_says_what_it_is() -> None:
    listed = {rule.name: public(rule) for rule in all_rules() if rule.__module__.startswith("outpace.")}
    assert {name for name, entry in listed.items() if not entry["lossless"]} == set(LOSSY)
    for name, entry in listed.items():
        assert set(entry) == {"name", "aliases", "lossless", "bound", "paper", "summary", "settings"}
        assert entry["summary"].endswith(".") or entry["lossless"]
        assert all({"name", "default", "description"} <= set(one) for one in entry["settings"]), name
    assert listed["fly"]["bound"] is None
    assert listed["rejection"]["bound"] == {"measure": "total variation", "limit": "0", "at_temperature_0": "0"}
    assert listed["cactus"]["bound"]["limit"] == "delta"
    keys = {"tas", "specdec", "cactus", "marsm", "bild", "fly", "lantern", "gsd", "dsd", "imcsd"}
    assert keys <= {key for entry in listed.values() for key in (entry["name"], *entry["aliases"])}


@pytest.mark.parametrize("name", LOSSY)
def test_settings_out_of_range_and_unknown_ones_are_refused_in_words(name: str) -> None:
    rule = find_rule(name)
    assert isinstance(rule, LossyRule)
    assert rule.described.startswith(f"{name}(")
    assert repr(rule) == rule.described
    for key, field in type(rule).Settings.model_fields.items():
        bad = "rubbish" if field.annotation is not bool else "perhaps"
        with pytest.raises(BadInput, match=f"rule '{name}', setting '{key}'"):
            find_rule(name, {key: bad})
        if field.annotation in (int, float):
            with pytest.raises(BadInput, match=f"rule '{name}', setting '{key}'"):
                find_rule(name, {key: -1})
    with pytest.raises(BadInput, match=f"rule '{name}' has no setting 'nonsense'"):
        find_rule(name, {"nonsense": 1})


def test_a_lossless_rule_has_no_settings() -> None:
    with pytest.raises(BadInput, match=r"rule 'block' has no setting 'delta' \(settings: it has none\)"):
        find_rule("block", {"delta": 0.1})
    with pytest.raises(BadInput, match=r"no setting 'detla'; did you mean 'delta'\?"):
        find_rule("cactus", {"detla": 0.1})


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("kind", ["certain tree", "sampled chain", "two draws"])
@pytest.mark.parametrize("params", [PLAIN, SamplingParams(1.3, top_p=0.8, repetition_penalty=1.5), GREEDY])
def test_settings_that_mean_lossless_are_lossless(name: str, kind: str, params: SamplingParams) -> None:
    rule = find_rule(name, EXACT[name])
    assert rule.exact
    q = Q(random_table(3, 4))
    grow, proposal = {
        "certain tree": (certain_tree(3, 3), Proposal(tree=True)),
        "sampled chain": (sampled_chain(q), Proposal(sampled=True)),
        "two draws": (sampled_tree(q, [2, 1]), Proposal(tree=True, sampled=True)),
    }[kind]
    made = method(grow, proposal, rule=rule, length=2)
    assert round_error(made, params, table=random_table(3, 6)) < 1e-6


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_token_that_the_request_excludes_is_never_committed(name: str, temperature: float) -> None:
    """A ban and top-k hold under every rule, whatever it is that the drafter proposes."""
    loosest: dict[str, dict[str, Any]] = {
        "typical": {"epsilon": 1e-6, "delta": 1e-6},
        "top-beta": {"criterion": "distance", "distance": 5},
        "cactus": {"delta": 100.0, "divergence": "tv"},
        "margin": {"theta": 0.0},
        "rollback": {"distance": 100.0},
        "fly": {"entropy": 0.0, "window": 0},
        "lantern": {"cap": 1.0},
        "grouped": {"size": 100, "ratio": 0.0},
        "importance": {"relax": 1.0, "key": 1.0},
        "target-first": {"candidates": 5},
    }
    rule = find_rule(name, loosest[name])
    rows = {(): [0.4, 0.3, 0.2, 0.1]}
    banned = SamplingParams(temperature, logit_bias={1: -math.inf})
    for grow in (siblings(1, 3), sampled([0.1, 0.8, 0.05, 0.05]), sampled([0.1, 0.8, 0.05, 0.05], 2)):
        assert float(first(committed(rule, rows, grow, banned), 4)[1]) == 0.0
        if temperature:
            kept = first(committed(rule, rows, grow, SamplingParams(temperature, top_k=2)), 4)
            assert float(kept[2:].sum()) == 0.0


@pytest.mark.parametrize("name", LOSSY)
def test_each_rule_relaxes_something(name: str) -> None:
    """With default settings the committed token does not have the target's distribution: the rule is lossy."""
    rows = {(): [0.36, 0.34, 0.3], (1,): [0.1, 0.8, 0.1]}
    setting = {"fly": {"window": 1}}.get(name, {})
    h = first(committed(find_rule(name, setting), rows, chain(1, 1)), 3)
    assert total_variation(h, torch.tensor(rows[()])) > 0.01


def test_what_a_rule_cannot_judge_is_refused_in_words() -> None:
    for name in ("fly", "target-first"):
        with pytest.raises(BadInput, match=f"rule '{name}' looks at all draft tokens"):
            find_rule(name).check("mcsjd", Proposal(sampled=True, keeps_unverified_draws=True))


# --------------------------------------------------------------------------------------------------------- typical


def test_typical_accepts_what_exceeds_the_threshold_and_ends_with_the_best_token() -> None:
    p = [0.5, 0.3, 0.15, 0.05]
    entropy = -sum(one * math.log(one) for one in p)
    rule = find_rule("typical", {"epsilon": 0.2, "delta": 1.0})
    assert min(0.2, math.exp(-entropy)) == 0.2
    rows = {(): p, (1,): [0.1, 0.2, 0.6, 0.1]}
    assert close(committed(rule, rows, chain(1)), {(1, 2): 1.0})  # 0.3 exceeds 0.2
    assert close(committed(rule, rows, chain(2)), {(0,): 1.0})  # 0.15 does not
    by_entropy = find_rule("typical", {"epsilon": 1.0, "delta": 0.7})
    least = 0.7 * math.exp(-entropy)
    assert 0.15 < least < 0.3
    assert close(committed(by_entropy, rows, chain(2)), {(0,): 1.0})
    assert close(committed(by_entropy, rows, chain(1)), {(1, 2): 1.0})
    drawing = find_rule("typical", {"epsilon": 0.2, "delta": 1.0, "greedy_first": False})
    assert close(committed(drawing, rows, chain(2)), {(token,): p[token] for token in range(4)})


def test_typical_takes_the_longest_of_the_accepted_paths() -> None:
    def grow(_: ChanceSource) -> TokenTree:
        tree = TokenTree()
        tree.add(ROOT, 0)
        below = tree.add(ROOT, 1)
        tree.add(below, 2)
        return tree

    rows = {(): [0.5, 0.5, 0.0], (0,): [0.2, 0.2, 0.6], (1,): [0.1, 0.4, 0.5], (1, 2): [0.0, 1.0, 0.0]}
    assert close(committed(find_rule("typical"), rows, grow), {(1, 2, 1): 1.0})


def test_typical_is_greedy_at_temperature_0() -> None:
    made = method(certain_tree(3, 3), Proposal(tree=True), rule=find_rule("typical"), length=2)
    assert made.rule_for(GREEDY).name == "greedy"
    assert made.rule_for(PLAIN).name == "typical"
    assert not made.lossless
    assert made.lossy == "typical(epsilon=0.09, delta=0.3, greedy_first=True)"


# -------------------------------------------------------------------------------------------------------- top-beta


def test_top_beta_accepts_within_the_gap_and_is_exact_elsewhere() -> None:
    p = [0.5, 0.3, 0.15, 0.05]
    rows = {(): p}
    rule = find_rule("top-beta", {"beta": 2, "tau": 1.0})
    assert close(first_of(rule, rows, chain(1)), {1: 1.0})  # log(0.5 / 0.3) = 0.51
    assert close(first_of(rule, rows, chain(2)), dict(enumerate(p)))  # third: exact
    near = find_rule("top-beta", {"beta": 2, "tau": 0.5})
    assert close(first_of(near, rows, chain(1)), dict(enumerate(p)))
    assert close(first_of(find_rule("top-beta", {"criterion": "top-k", "beta": 3}), rows, chain(2)), {2: 1.0})
    by_id = find_rule("top-beta", {"criterion": "distance", "distance": 1})
    assert close(first_of(by_id, rows, chain(1)), {1: 1.0})
    assert close(first_of(by_id, rows, chain(2)), dict(enumerate(p)))
    # A sampled token: outside the set by rejection sampling, whose residual knows nothing of the set.
    h = first(committed(rule, rows, sampled([0.25, 0.5, 0.25, 0.0])), 4)
    rejected = 0.25 - 0.15
    assert h.tolist() == pytest.approx([0.25 + rejected * 0.25 / 0.3, 0.5, 0.15, rejected * 0.05 / 0.3])


def first_of(rule: AcceptanceRule, rows: Mapping[Any, Seq[float]], grow: Any) -> dict[int, float]:
    return dict(enumerate(first(committed(rule, rows, grow), len(rows[()])).tolist()))


def test_top_beta_at_temperature_0_prefers_the_best_token_and_takes_one_within_the_gap() -> None:
    rows = {(): [0.5, 0.3, 0.2], (0,): [0.0, 1.0, 0.0], (1,): [0.0, 0.0, 1.0]}
    rule = find_rule("top-beta", {"beta": 2, "tau": 1.0})
    assert committed(rule, rows, siblings(1, 0), GREEDY) == {(0, 1): 1.0}
    assert committed(rule, rows, siblings(2, 1), GREEDY) == {(1, 2): 1.0}
    assert committed(rule, rows, siblings(2), GREEDY) == {(0,): 1.0}


# ---------------------------------------------------------------------------------------------------------- cactus


def optimum(p: Seq[float], wanted: Seq[float], delta: float, measure: Callable[[Any, Any], float]) -> float:
    """The largest sum of min(h, wanted) with D(h, p) <= delta, by a convex program: variables h and its minima m."""
    n = len(p)
    if measure is total_variation:  # linear, with the distances |h - p| as further variables
        one, none = np.eye(n), np.zeros((n, n))
        rows = [np.hstack([-one, one, none]), np.hstack([one, none, -one]), np.hstack([-one, none, -one])]
        total = np.concatenate([np.zeros(2 * n), np.ones(n)])[None]
        solved = optimize.linprog(
            np.concatenate([np.zeros(n), -np.ones(n), np.zeros(n)]),
            A_ub=np.vstack([*rows, total]),
            b_ub=np.concatenate([np.zeros(n), p, -np.asarray(p), [2 * delta]]),
            A_eq=np.concatenate([np.ones(n), np.zeros(2 * n)])[None],
            b_eq=[1.0],
            bounds=[(0.0, 1.0)] * n + [(0.0, float(wish)) for wish in wanted] + [(0.0, None)] * n,
        )
        return -float(solved.fun)

    def divergence(x: Any) -> float:
        return delta - measure(torch.tensor(np.maximum(x[:n], 1e-15)), torch.tensor(p))

    limits = [
        {"type": "eq", "fun": lambda x: x[:n].sum() - 1.0},
        {"type": "ineq", "fun": divergence},
        {"type": "ineq", "fun": lambda x: x[:n] - x[n:]},
    ]
    bounds = [(0.0, 1.0)] * n + [(0.0, float(one)) for one in wanted]
    best = 0.0
    for start in (p, [0.5 * (a + b / sum(wanted)) for a, b in zip(p, wanted, strict=True)]):
        x = np.array([*start, *np.minimum(start, wanted)])
        solved = optimize.minimize(
            lambda x: -x[n:].sum(), x, bounds=bounds, constraints=limits, method="SLSQP", options={"maxiter": 500}
        )
        if min(divergence(solved.x), 0.0) > -1e-6:
            best = max(best, -float(solved.fun))
    return best


@pytest.mark.parametrize(("divergence", "name"), [("kl", KL), ("chi2", HALF_CHI_SQUARE), ("tv", TOTAL_VARIATION)])
@pytest.mark.parametrize("delta", [0.01, 0.1, 0.4])
def test_cactus_accepts_as_much_as_a_convex_program_finds(divergence: str, name: str, delta: float) -> None:
    for seed in range(4):
        size = 3 + seed
        p = random_table(size, seed, sharpness=1.5)((0,)).double().softmax(-1).numpy()
        for wanted in (
            random_table(size, 50 + seed, sharpness=2.0)((0,)).double().softmax(-1).numpy(),
            np.eye(size)[int(p.argmin())],
            np.eye(size)[0] + np.eye(size)[1],
        ):
            ratios = best_ratios(p, wanted, delta, divergence)
            h = p * ratios
            assert h.sum() == pytest.approx(1.0)
            assert MEASURES[name](torch.tensor(h), torch.tensor(p)) <= delta + 1e-9
            ours = float(np.minimum(h, wanted).sum())
            theirs = optimum(p.tolist(), wanted.tolist(), delta, MEASURES[name])
            assert ours >= theirs - 1e-5
            assert ours <= theirs + 2e-3  # no program finds less than it should by much


def test_cactus_of_one_token_is_the_closed_form() -> None:
    p, delta = 0.2, 0.1
    rows = {(): [0.5, p, 0.3]}
    h = first(committed(find_rule("cactus", {"delta": delta, "divergence": "chi2"}), rows, chain(1)), 3)
    gamma = p + math.sqrt(2 * delta * p * (1 - p))
    assert h.tolist() == pytest.approx([0.5 * (1 - gamma) / 0.8, gamma, 0.3 * (1 - gamma) / 0.8], abs=1e-5)
    h = first(committed(find_rule("cactus", {"delta": delta}), rows, chain(1)), 3)
    assert kl_divergence(h, torch.tensor(rows[()])) == pytest.approx(delta, abs=1e-5)
    # The second-order form is no bound on KL: at large p it exceeds the budget.
    large = torch.tensor([0.5, 0.5])
    assert half_chi_square(torch.tensor([1.0, 0.0]), large) == pytest.approx(0.5)
    assert kl_divergence(torch.tensor([1.0, 0.0]), large) > 0.69


def test_cactus_commits_the_relaxed_target_and_accepts_more_than_rejection() -> None:
    p, q = [0.6, 0.25, 0.1, 0.05], [0.1, 0.2, 0.3, 0.4]
    rule = find_rule("cactus", {"delta": 0.05})
    assert isinstance(rule, Cactus)
    h = rule.relaxed(torch.tensor(p), Proposed((), torch.tensor(q), 1))
    assert h is not None
    for draws in (1, 2):
        found = first(committed(rule, {(): p}, sampled(q, draws)), 4)
        assert kl_divergence(found, torch.tensor(p)) == pytest.approx(0.05, abs=1e-4)
    assert first(committed(rule, {(): p}, sampled(q)), 4).tolist() == pytest.approx(h.tolist(), abs=1e-5)
    exact = np.minimum(p, q).sum()
    assert np.minimum(h.numpy(), q).sum() > exact + 0.05
    unbounded = find_rule("cactus", {"delta": 100.0})
    assert first(committed(unbounded, {(): p}, sampled(q)), 4).tolist() == pytest.approx(q, abs=1e-5)


class Tokenwise(Cactus):
    """Cactus as its paper writes it: the relaxed distribution is that of the token that was drawn."""

    name = "cactus-of-the-drawn-token"
    aliases = ()

    def choose(self, scores: TreeScores, node: int, draws: Any, chance: Any) -> Any:
        [draw] = draws
        p, q = scores.p(node), scores.tree.q_rows[draw.q_row].probs
        h = self.relaxed(p, Proposed((draw.token,), None, 0))
        assert h is not None
        if chance.bernoulli(float(h[draw.token] / q[draw.token])):
            return draw
        rest = (h - q).clamp(min=0.0)
        return chance.categorical(rest if float(rest.sum()) > 0 else h)


def test_relaxing_the_target_for_the_drawn_token_breaks_the_bound() -> None:
    delta, size = 0.02, 12
    p = [0.9, *[0.1 / 11] * 11]
    q = [0.01, *[0.99 / 11] * 11]
    for kind, holds in ((Cactus, True), (Tokenwise, False)):
        rule = configured(kind, {"delta": delta})
        h = first(committed(rule, {(): p}, sampled(q)), size)
        assert (kl_divergence(h, torch.tensor(p)) <= delta + 1e-5) == holds


# ------------------------------------------------------------------------------------------------- margin and fly


def judged(rule: AcceptanceRule, logits: Seq[float], params: SamplingParams, *tokens: int) -> Tensor:
    """The distribution of the committed token after a root with these logits and siblings with these tokens."""
    target = TableTarget(len(logits))

    def program(chance: ChanceSource) -> int:
        tree = siblings(*tokens)(chance)
        only = [0.0, *[-math.inf] * (len(logits) - 1)]
        rows = torch.tensor([list(logits), *[only] * len(tree)])
        scores = TreeScores(target.sequence([0], params), tree, rows, {})
        [verdict] = rule.accept([scores], [None], [chance.at(1, "accept")])
        return tree.tokens[verdict.path[0]] if verdict.path else verdict.token

    h = torch.zeros(len(logits), dtype=torch.float64)
    for token, weight in Enumeration.outcomes(program):
        h[token] += weight
    return h


def test_margin_accepts_the_runner_up_where_the_logits_are_nearly_tied() -> None:
    rule = find_rule("margin", {"theta": 0.9})
    tied, apart, negative = [10.0, 9.5, 9.3], [10.0, 8.5, 8.0], [-1.0, -1.01, -3.0]
    assert judged(rule, tied, PLAIN, 1).tolist() == pytest.approx([0, 1, 0])
    assert judged(rule, tied, GREEDY, 1).tolist() == pytest.approx([0, 1, 0])
    assert judged(rule, tied, GREEDY, 2).tolist() == pytest.approx([1, 0, 0])  # third, though above the ratio
    assert judged(rule, tied, GREEDY, 1, 0).tolist() == pytest.approx([1, 0, 0])
    for logits in (apart, negative):
        assert judged(rule, logits, PLAIN, 1).tolist() == pytest.approx(torch.tensor(logits).softmax(-1).tolist())
        assert judged(rule, logits, GREEDY, 1).tolist() == pytest.approx([1, 0, 0])


def test_fly_lets_a_mismatch_stand_that_the_window_confirms() -> None:
    flat, sure = [0.4, 0.35, 0.25], [0.05, 0.05, 0.9]
    rows = {(): flat, (1,): sure, (1, 2): [0.9, 0.05, 0.05], (1, 2, 0): [0.0, 1.0, 0.0], (1, 0): flat}
    rule = find_rule("fly", {"entropy": 0.9, "window": 1})
    assert committed(rule, rows, chain(1, 2), GREEDY) == {(1, 2, 0): 1.0}
    assert committed(rule, rows, chain(1, 2, 0), GREEDY) == {(1, 2, 0, 1): 1.0}
    assert committed(rule, rows, chain(1, 0), GREEDY) == {(0,): 1.0}  # a second mismatch within the window
    assert committed(rule, rows, chain(1), GREEDY) == {(0,): 1.0}  # the draft ends before the window
    gated = {**rows, (): [0.8, 0.1, 0.1]}
    assert committed(rule, gated, chain(1, 2), GREEDY) == {(0,): 1.0}  # the entropy is too low
    # Sampled: the first draft token is accepted with 0.35; else it stands if the window's token is accepted (0.9).
    found = committed(rule, rows, chain(1, 2))
    stands = 0.35 + 0.65 * 0.9
    assert float(first(found, 3)[1]) == pytest.approx(stands)
    assert float(first(found, 3)[0]) == pytest.approx(0.65 * 0.1 * 0.4 / 0.65)


# --------------------------------------------------------------------------------- lantern, grouped, importance, ...


class Line(TableTarget):
    """Tokens on a line: the nearest of a token are the ids beside it."""

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens.float()[:, None] ** 1.1


def test_lantern_moves_probability_from_the_nearest_tokens_up_to_the_cap() -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    near = find_rule("lantern", {"cap": 1.0, "neighbors": 2}).for_target(Line(4))
    one = Proposed((1,), None, 0)
    assert near.relaxed(p, one).tolist() == pytest.approx([0.0, 0.6, 0.0, 0.4])  # type: ignore[attr-defined]
    capped = find_rule("lantern", {"cap": 0.25, "neighbors": 2}).for_target(Line(4))
    assert capped.relaxed(p, one).tolist() == pytest.approx([0.0, 0.45, 0.15, 0.4])  # type: ignore[attr-defined]
    # Sampled: what the drafter proposes too often receives, and nobody gives what is proposed itself.
    drafted = Proposed((), torch.tensor([0.1, 0.5, 0.35, 0.05]), 1)
    wide = find_rule("lantern", {"cap": 1.0, "neighbors": 3}).for_target(Line(4))
    assert wide.relaxed(p, drafted).tolist() == pytest.approx([0.1, 0.5, 0.35, 0.05])  # type: ignore[attr-defined]
    h = first(committed(find_rule("lantern", {"cap": 0.1}), {(): p.tolist()}, chain(1)), 4)
    assert total_variation(h, p) == pytest.approx(0.1, abs=1e-6)


def test_a_request_cannot_have_all_tokens_as_neighbors() -> None:
    """Each takes time of everybody's round."""
    find_rule("lantern", {"neighbors": MOST_NEIGHBORS})
    with pytest.raises(BadInput, match="neighbors"):
        find_rule("lantern", {"neighbors": MOST_NEIGHBORS + 1})


class Scattered(TableTarget):
    """Random embeddings; counts how often they were asked for."""

    asked = 0

    def embed(self, tokens: Tensor) -> Tensor:
        self.asked += 1
        return torch.randn(self.vocab_size, 5, generator=torch.Generator().manual_seed(3))[tokens]


def test_neighbors_are_the_nearest_by_euclidean_distance_and_all_rules_of_a_target_share_them() -> None:
    target = Scattered(60)
    rows = target.embed(torch.arange(60))
    distances = torch.cdist(rows, rows).fill_diagonal_(math.inf)
    expected = distances.topk(7, largest=False).indices.tolist()
    near = neighbors_of(target)
    assert near.of([3], 7) == [expected[3]]
    assert near.of([59, 3, 0], 7) == [expected[59], expected[3], expected[0]]  # one of them known already
    assert len(near.of([5], 100)[0]) == 59
    p = torch.full((60,), 1 / 60)
    moved = [find_rule("lantern").for_target(target).relaxed(p, Proposed((7,), None, 0)) for _ in range(3)]  # type: ignore[attr-defined]
    assert torch.equal(moved[0], moved[2])
    assert target.asked == 2  # here, and once for all of them


def test_lantern_needs_the_targets_embeddings() -> None:
    with pytest.raises(BadInput, match="reads the target's embeddings"):
        committed_raw = find_rule("lantern")
        committed_raw.relaxed(torch.tensor([0.5, 0.5]), Proposed((1,), None, 0))  # type: ignore[attr-defined]


def test_grouped_keeps_the_probability_of_groups() -> None:
    p = [0.3, 0.28, 0.25, 0.17]
    rule = find_rule("grouped", {"size": 2, "ratio": 0.0})
    h = first(committed(rule, {(): p}, chain(1)), 4)
    assert h.tolist() == pytest.approx([0.0, 0.58, 0.25, 0.17])
    q = [0.05, 0.45, 0.4, 0.1]
    for draws in (1, 2):
        h = first(committed(rule, {(): p}, sampled(q, draws)), 4)
        assert float(h[:2].sum()) == pytest.approx(0.58)
        assert total_variation(h, torch.tensor(p)) > 0.05
    h = first(committed(rule, {(): p}, sampled(q)), 4)
    assert h[:2].tolist() == pytest.approx([0.05 + 0.08 * 0.3 / 0.58, 0.45 + 0.08 * 0.28 / 0.58])
    by_ratio = find_rule("grouped", {"size": 3, "ratio": 0.9})
    assert first(committed(by_ratio, {(): p}, chain(2)), 4).tolist() == pytest.approx(p)  # 0.25 < 0.9 * 0.3: alone


def test_importance_is_strict_where_the_target_is_decided() -> None:
    rule = find_rule("importance", {"relax": 0.5, "key": 0.6})
    sure, open_ = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
    assert first(committed(rule, {(): sure}, chain(1)), 3).tolist() == pytest.approx(sure)
    assert first(committed(rule, {(): open_}, chain(1)), 3).tolist() == pytest.approx([0.25, 0.65, 0.1])
    h = first(committed(rule, {(): open_}, sampled([0.0, 0.2, 0.8])), 3)
    assert h.tolist() == pytest.approx([0.25, 0.25, 0.5])


def test_target_first_chooses_among_the_targets_own_draws() -> None:
    p = [0.5, 0.3, 0.2]
    rows = {(): p, (1,): [0.1, 0.1, 0.8], (1, 2): [0.0, 1.0, 0.0]}
    rule = find_rule("target-first", {"candidates": 2})
    found = committed(rule, rows, chain(1, 2))
    h = first(found, 3)
    assert h.tolist() == pytest.approx([0.7**2 * 5 / 7, 1 - 0.7**2, 0.7**2 * 2 / 7])
    assert found[1, 2, 1] / float(h[1]) == pytest.approx(0.8)  # exact below the first level

    # Of two drafted ones, that below which more is expected.
    def two(_: ChanceSource) -> TokenTree:
        tree = TokenTree()
        tree.add(ROOT, 0)
        tree.add(tree.add(ROOT, 1), 2)
        return tree

    h = first(committed(rule, rows, two), 3)
    assert h.tolist() == pytest.approx([1 - 0.51 - 0.04, 0.51, 0.04])
    most = rule.limit(None)  # type: ignore[arg-type]
    assert most == pytest.approx(0.25)


@pytest.mark.parametrize("candidates", [1, 2, 5])
@pytest.mark.parametrize("tokens", [(), (1,), (2, 0), (0, 1, 2)])
def test_the_distribution_of_target_firsts_first_token_is_what_it_draws(
    candidates: int, tokens: tuple[int, ...]
) -> None:
    rows = {(): [0.5, 0.3, 0.2], (0,): [0.1, 0.1, 0.8], (1,): [0.6, 0.2, 0.2], (0, 2): [0.0, 1.0, 0.0]}
    rule = find_rule("target-first", {"candidates": candidates})
    assert isinstance(rule, TargetFirst)

    def grow(_: ChanceSource) -> TokenTree:
        tree = TokenTree()
        for token in tokens:
            tree.add(tree.add(ROOT, token), 2)
        return tree

    tree = grow(None)  # type: ignore[arg-type]
    paths = [(), *(tuple(tree.path_tokens(node)) for node in range(len(tree)))]
    logits = torch.tensor([rows.get(path, [1.0, 0.0, 0.0]) for path in paths]).log()
    scores = TreeScores(TableTarget(3).sequence([0], PLAIN), tree, logits, {})
    drawn = first(committed(rule, rows, grow), 3)
    assert rule.first_distribution(scores).tolist() == pytest.approx(drawn.tolist(), abs=1e-6)
    assert closed_form(rule, scores, ROOT) is not None
    for node in range(len(tree)):
        below = closed_form(rule, scores, node)
        assert below is not None
        assert torch.allclose(below, scores.p(node).double())


def test_measures() -> None:
    h, p = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    assert total_variation(h, p) == pytest.approx(0.5)
    assert kl_divergence(h, p) == pytest.approx(math.log(2))
    assert half_chi_square(h, p) == pytest.approx(0.5 * (0.25 + 0.25 + 0.5))
    assert kl_divergence(p, h) == math.inf == half_chi_square(p, h)


def test_a_rule_keeps_nothing_between_requests() -> None:
    """The same trees give the same distribution again."""
    rows = {(): [0.36, 0.34, 0.3], (1,): [0.1, 0.8, 0.1]}
    for name in LOSSY:
        rule = find_rule(name)
        assert committed(rule, rows, chain(1, 1)) == committed(rule, rows, chain(1, 1)), name


def test_rollback_keeps_what_differs_little_and_the_token_that_the_target_would_have_chosen() -> None:
    rows = {(): [0.6, 0.3, 0.1], (1,): [0.2, 0.7, 0.1]}
    near, far = find_rule("rollback", {"distance": 1.3}), find_rule("rollback", {"distance": 1.1})
    assert -math.log(0.3) == pytest.approx(1.204, abs=1e-3)
    assert committed(near, rows, chain(1), GREEDY) == {(1, 1): 1.0}
    assert committed(far, rows, chain(1), GREEDY) == {(0,): 1.0}
    strict = find_rule("rollback", {"distance": 0.01})
    assert committed(strict, rows, chain(0), GREEDY) == {(0, 0): 1.0}
    # Sampled: beyond the distance the draft token is accepted with its own probability, as ever.
    assert float(first(committed(far, rows, chain(1)), 3)[1]) == pytest.approx(0.3)
    assert float(first(committed(near, rows, chain(1)), 3)[1]) == pytest.approx(1.0)
