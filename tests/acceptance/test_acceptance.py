"""Losslessness, exactly: the law of what a round commits, and of whole outputs, is that of autoregressive decoding.

Every branch of chance is enumerated through the real Decoder. The same check must catch rules and drafters with
the bugs that the field has seen; a check that passes them proves nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence as Seq

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.draws import acceptance_probability, residual_distribution
from outpace.acceptance.greedy import Greedy
from outpace.acceptance.registry import rules
from outpace.acceptance.rejection import RecursiveRejection, Rejection
from outpace.core.chance import Chance, ChanceSource
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import DETERMINISTIC, ROOT, Draw, TokenTree
from outpace.engine.method import GREEDY
from outpace.engine.request import Request
from outpace.targets.base import TreeScores
from outpace.targets.table import TableTarget, random_table
from support import (
    CERTAIN_TREE,
    CHAIN,
    SINGLE,
    TREE,
    Alternate,
    Grow,
    NeverTwice,
    Path,
    Q,
    autoregressive_distribution,
    both,
    certain_tree,
    distance,
    draw,
    merged,
    method,
    round_error,
    sampled_chain,
    sampled_tree,
    toy_growers,
    whole_law,
)

EXACT = 1e-6
BIASED = 1e-3

PARAMS = {
    "temperature 1": SamplingParams(1.0),
    "temperature 0": SamplingParams(0.0),
    "hot": SamplingParams(1.9),
    "top-k": SamplingParams(0.8, top_k=2),
    "top-p": SamplingParams(1.2, top_p=0.7),
    "min-p": SamplingParams(1.1, min_p=0.25),
    "penalties": SamplingParams(0.9, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.4),
    "bias": SamplingParams(1.0, logit_bias={0: 1.0, 2: -math.inf}),
    "never twice": SamplingParams(1.0, processors=(NeverTwice(),)),
    "alternate": SamplingParams(1.0, processors=(Alternate(),)),
    "all": SamplingParams(0.8, 3, 0.95, 0.02, 1.2, 0.3, 0.2, logit_bias={1: 0.5}, processors=(NeverTwice(),)),
}


LOSSLESS = {rule.name: rule for rule in rules().values() if rule.lossless and not rule.greedy_only}


OF_SEVERAL_ROWS = {"two drafters", "merged trees", "certain siblings that look at the sample"}


def pairs() -> list[tuple[str, str]]:
    """Every kind of tree with every lossless rule that takes it."""
    fitting = []
    for kind, (_, proposal) in toy_growers(3).items():
        for name, rule in LOSSLESS.items():
            with contextlib.suppress(BadInput):
                rule().check("toy", proposal)
                if name != "k-seq" or kind not in OF_SEVERAL_ROWS:
                    fitting.append((kind, name))
    return fitting


def test_every_lossless_rule_meets_a_tree() -> None:
    assert {rule for _, rule in pairs()} == set(LOSSLESS)
    assert {kind for kind, rule in pairs() if rule == "recursive-rejection"} == set(toy_growers(3))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("kind", toy_growers(3))
def test_a_round_keeps_the_distribution(kind: str, params: SamplingParams) -> None:
    grow, proposal = toy_growers(3)[kind]
    assert round_error(method(grow, proposal), params, table=random_table(3, 5), prompt=(0, 2)) < EXACT


@pytest.mark.parametrize(("kind", "rule"), [pair for pair in pairs() if pair[1] != "recursive-rejection"])
@pytest.mark.parametrize("name", ["top-k", "all"])
def test_a_round_of_every_rule_keeps_the_distribution(kind: str, rule: str, name: str) -> None:
    grow, proposal = toy_growers(3, 5)[kind]
    one = method(grow, proposal, rule=LOSSLESS[rule]())
    assert round_error(one, PARAMS[name], table=random_table(3, 5)) < EXACT


@settings(max_examples=12)
@given(st.data())
def test_random_tables_trees_and_parameters(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(2, 4))
    seed = data.draw(st.integers(0, 10_000))
    kind, rule = data.draw(st.sampled_from(pairs()))
    grow, proposal = toy_growers(vocab, seed)[kind]
    params = data.draw(st.sampled_from([params for params in PARAMS.values() if vocab > 2 or not params.logit_bias]))
    table = random_table(vocab, seed, sharpness=data.draw(st.sampled_from([0.2, 1.5, 6.0])))
    prompt = tuple(data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=3)))
    one = method(grow, proposal, rule=LOSSLESS[rule]())
    assert round_error(one, params, table=table, vocab=vocab, prompt=prompt) < EXACT


@pytest.mark.parametrize(
    ("kind", "rule"),
    [pair for pair in pairs() if pair[0] in ("chain", "certain tree") or pair[1] == "recursive-rejection"],
)
def test_whole_outputs_keep_the_distribution(kind: str, rule: str) -> None:
    grow, proposal = toy_growers(3)[kind]
    table, params, prompt = random_table(3, 17), PARAMS["all"], (1, 2)
    request = Request(prompt, method(grow, proposal, rule=LOSSLESS[rule]()), params, max_new_tokens=3)
    plain = {(output,): weight for output, weight in autoregressive_distribution(table, params, prompt, 3).items()}
    assert distance(whole_law(TableTarget(3, table), [request]), plain) < EXACT


@pytest.mark.parametrize("kind", toy_growers(3))
def test_whole_outputs_at_temperature_1(kind: str) -> None:
    grow, proposal = toy_growers(3)[kind]
    table, prompt = random_table(3, 17), (1, 2)
    request = Request(prompt, method(grow, proposal), SamplingParams(1.0), max_new_tokens=3)
    plain = {
        (output,): weight
        for output, weight in autoregressive_distribution(table, SamplingParams(1.0), prompt, 3).items()
    }
    assert distance(whole_law(TableTarget(3, table), [request]), plain) < EXACT


@pytest.mark.parametrize("kind", ["chain", "certain tree"])
def test_longer_outputs_with_a_stop_token(kind: str) -> None:
    """Stopping cuts accepted paths; what is kept must still have autoregressive decoding's law."""
    grow, proposal = toy_growers(3)[kind]
    table, params, prompt = random_table(3, 23), SamplingParams(1.0, presence_penalty=0.5), (0,)
    request = Request(prompt, method(grow, proposal), params, max_new_tokens=4, stop_ids=frozenset({2}))
    plain = {
        (output,): weight for output, weight in autoregressive_distribution(table, params, prompt, 4, stops={2}).items()
    }
    assert distance(whole_law(TableTarget(3, table), [request]), plain) < EXACT


def test_a_batch_of_methods_has_the_product_of_plain_laws() -> None:
    candidate_trees = toy_growers(3)
    table = random_table(3, 31)
    cases: list[tuple[Path, Grow | None, Proposal, SamplingParams]] = [
        ((0, 1), candidate_trees["chain"][0], CHAIN, SamplingParams(1.0, top_p=0.8)),
        ((2,), candidate_trees["certain tree"][0], CERTAIN_TREE, SamplingParams(0.7, processors=(NeverTwice(),))),
        ((1, 1), None, TREE, SamplingParams(1.3, repetition_penalty=1.4)),
    ]
    requests = [
        Request(prompt, method(grow, proposal), params, max_new_tokens=2) for prompt, grow, proposal, params in cases
    ]
    expected: dict[tuple[Path, ...], float] = {(): 1.0}
    for prompt, _, _, params in cases:
        proposal_distribution = autoregressive_distribution(table, params, prompt, 2)
        expected = {(*key, output): a * b for key, a in expected.items() for output, b in proposal_distribution.items()}
    assert distance(whole_law(TableTarget(3, table), requests), expected) < EXACT


def test_requests_that_share_drafter_and_rule_stay_independent() -> None:
    table = random_table(3, 37)
    shared = method(*toy_growers(3)["two drafters"], length=1)
    requests = [Request((prompt,), shared, SamplingParams(1.0), max_new_tokens=2) for prompt in (0, 0)]
    one = autoregressive_distribution(table, SamplingParams(1.0), (0,), 2)
    expected = {(a, b): one[a] * one[b] for a in one for b in one}
    assert distance(whole_law(TableTarget(3, table), requests), expected) < EXACT


def test_a_good_draft_is_accepted_more_often_than_a_poor_one() -> None:
    """The expected number of accepted tokens is sum(min(p, q)) at depth one: nothing is left on the table."""
    table, draft = random_table(4, 41), random_table(4, 42)
    params = SamplingParams(1.0)
    for q_table in (table, draft):
        p, q = table((0,)).softmax(-1), q_table((0,)).softmax(-1)
        expected = float(torch.minimum(p, q).sum())
        got = sum(float(q[x]) * acceptance_probability(p, q, x) for x in range(4))
        assert got == pytest.approx(expected, abs=1e-6)
    assert round_error(method(sampled_chain(Q(table)), CHAIN), params, table=table, vocab=4) < EXACT


def test_what_is_left_of_equal_distributions_is_nothing() -> None:
    p = torch.tensor([0.25, 0.75])
    assert residual_distribution(p, p.clone(), 0)[1] == 0
    rest, total = residual_distribution(p, None, 1)
    assert (rest.tolist(), total) == ([0.25, 0.0], 0.25)
    assert p.tolist() == [0.25, 0.75], "p is shared and must not change"


def test_draws_without_replacement_with_conditional_rows_are_exact() -> None:
    """The recursion holds for siblings that carry each the row they were drawn from, given the earlier ones."""
    q = Q(random_table(4, 51))

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        probs = q.row(tokens).probs.clone()
        tree.replacement = False
        for _ in range(3):
            row = QRow(probs / probs.sum())
            token = draw(row, chance)
            tree.add(ROOT, token, row)
            probs = probs.clone()
            probs[token] = 0.0

    error = round_error(method(grow), SamplingParams(1.0), table=random_table(4, 52), vocab=4, horizon=2)
    assert error < EXACT


def without_replacement(q: Q, draws: int) -> Grow:
    """Distinct siblings of one row, drawn one after the other."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        tree.replacement = False
        row = q.row(tokens)
        probs = row.probs.clone()
        for index in range(draws):
            token = chance.categorical(probs)
            tree.add(ROOT, token, 0 if index else row)
            probs[token] = 0.0

    return grow


@pytest.mark.parametrize("rule", ["recursive-rejection", "traversal"])
def test_merging_trees_drawn_with_and_without_replacement_is_exact(rule: str) -> None:
    one, two = Q(random_table(3, 81)), Q(random_table(3, 82))
    parts = (sampled_tree(one, (2,)), without_replacement(two, 2))
    for grow in (merged(*parts), merged(*reversed(parts)), parts[1]):
        error = round_error(method(grow, rule=LOSSLESS[rule]()), PLAIN, table=random_table(3, 85), horizon=2)
        assert error < EXACT


def test_transport_needs_siblings_that_were_chosen_without_looking_at_the_sample() -> None:
    """UniVer plans over the whole set: the recursion tolerates siblings that depend on an earlier draw, UniVer not."""
    grow, _ = toy_growers(2, 2)["certain siblings that look at the sample"]
    table = random_table(2, 2, sharpness=0.2)
    for name, lossless in (("recursive-rejection", True), ("traversal", True), ("univer", False)):
        error = round_error(method(grow, SINGLE, rule=LOSSLESS[name]()), PLAIN, table=table, vocab=2, prompt=(0,))
        assert (error < EXACT) == lossless, name
        assert (error > BIASED) != lossless, name


# -------------------------------------------------------------------------------------------------- planted bugs

DRAFT = random_table(3, 61, sharpness=1.0)
SIBLINGS = sampled_tree(Q(DRAFT), (2, 1))


def q_of(tree: TokenTree, one: Draw, like: Tensor) -> Tensor:
    if one.q_row == DETERMINISTIC:
        return torch.nn.functional.one_hot(torch.tensor(one.token), len(like)).float()
    return tree.q_rows[one.q_row].dense(len(like))


class Biased(RecursiveRejection):
    """The recursion written out with a seam for every bug. Without overrides it is the true rule."""

    def accept(self, scores: Seq[TreeScores], states: Seq[object], chances: Seq[Chance]) -> list[Verdict]:
        return [self.walk(one, chance) for one, chance in zip(scores, chances, strict=True)]

    def walk(self, scores: TreeScores, chance: Chance) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            p = self.target(scores, node)
            accepted: Draw | None = None
            tried: list[Draw] = []
            for one in self.order(scores.tree, scores.tree.draws_at(node)):
                tried.append(one)
                if chance.bernoulli(self.acceptance(p, scores.tree, one)):
                    accepted = one
                    break
                p = self.rest(p, scores.tree, one)
            if accepted is None:
                return Verdict(tuple(path), chance.categorical(self.last(p, scores, node, tried)))
            path.append(accepted.node)
            node = accepted.node

    def target(self, scores: TreeScores, node: int) -> Tensor:
        return scores.p(node)

    def order(self, tree: TokenTree, draws: list[Draw]) -> list[Draw]:
        return draws

    def acceptance(self, p: Tensor, tree: TokenTree, one: Draw) -> float:
        return min(1.0, float(p[one.token]) / float(q_of(tree, one, p)[one.token]))

    def rest(self, p: Tensor, tree: TokenTree, one: Draw) -> Tensor:
        rest = (p - q_of(tree, one, p)).clamp(min=0)
        return rest / rest.sum() if float(rest.sum()) > 0 else p

    def last(self, p: Tensor, scores: TreeScores, node: int, tried: list[Draw]) -> Tensor:
        return p


class Unnormalised(Biased):
    """The residual is handed on as it is."""

    def rest(self, p: Tensor, tree: TokenTree, one: Draw) -> Tensor:
        rest = (p - q_of(tree, one, p)).clamp(min=0)
        return rest if float(rest.sum()) > 0 else p


class Stale(Biased):
    """Every sibling is tested against the first p; only the correction comes from the last residual."""

    def walk(self, scores: TreeScores, chance: Chance) -> Verdict:
        self.first: Tensor | None = None
        return super().walk(scores, chance)

    def target(self, scores: TreeScores, node: int) -> Tensor:
        self.first = scores.p(node)
        return self.first

    def acceptance(self, p: Tensor, tree: TokenTree, one: Draw) -> float:
        assert self.first is not None
        return super().acceptance(self.first, tree, one)


class NoResidual(Biased):
    """After a rejection the correction comes from p itself."""

    def rest(self, p: Tensor, tree: TokenTree, one: Draw) -> Tensor:
        return p


class BonusFromDraft(Biased):
    """The token after a fully accepted path comes from the draft model."""

    def last(self, p: Tensor, scores: TreeScores, node: int, tried: list[Draw]) -> Tensor:
        return p if tried else DRAFT((*scores.sequence.tokens, *scores.tree.path_tokens(node))).softmax(-1)


class OneSidedTopP(Biased):
    """Draft tokens are tested without top-p; top-p applies to the correction alone."""

    def target(self, scores: TreeScores, node: int) -> Tensor:
        return (scores.logits[node + 1] / scores.sequence.params.temperature).softmax(-1)

    def last(self, p: Tensor, scores: TreeScores, node: int, tried: list[Draw]) -> Tensor:
        return p if tried else scores.p(node)


class ReRanked(Biased):
    """Siblings are tried in the order of their own probability."""

    def order(self, tree: TokenTree, draws: list[Draw]) -> list[Draw]:
        return sorted(draws, key=lambda one: -tree.q_rows[one.q_row].prob(one.token))


class AlwaysFirst(Biased):
    """A certain draft token is taken for a sampled one: accepted whenever its p is at least one half."""

    def acceptance(self, p: Tensor, tree: TokenTree, one: Draw) -> float:
        return float(float(p[one.token]) >= 0.5)


class BlindToPath(Biased):
    """Penalties and processors see the committed tokens but not the path."""

    def target(self, scores: TreeScores, node: int) -> Tensor:
        logits = scores.logits[node + 1][None]
        return TreeScores(scores.sequence, TokenTree(), logits, {}).p(ROOT)


def lying(said: float) -> Grow:
    """Draws at temperature 1, and says it drew at another."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        node, path = ROOT, tokens
        for _ in range(depth):
            token = draw(Q(DRAFT).row(path), chance)
            node, path = tree.add(node, token, Q(DRAFT, said).row(path)), (*path, token)

    return grow


def pruning(keep: Callable[[int, QRow], bool]) -> Grow:
    """Draws, and afterwards drops the draw for its token or its q."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        node, path = ROOT, tokens
        for _ in range(depth):
            row = Q(DRAFT).row(path)
            token = draw(row, chance)
            if not keep(token, row):
                return
            node, path = tree.add(node, token, row), (*path, token)

    return grow


def said_replaced(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
    """Distinct siblings that are said to be independent."""
    without_replacement(Q(DRAFT), 2)(tree, tokens, depth, chance)
    tree.replacement = True


def deduplicated(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
    """Three draws with replacement, of which only the distinct ones are kept."""
    row = Q(DRAFT).row(tokens)
    for token in dict.fromkeys(draw(row, chance) for _ in range(3)):
        tree.add(ROOT, token, row)


def said_certain(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
    """A sampled draw that says it was certain: keeps the distribution, accepts less. Not a bug of the law."""
    tree.add(ROOT, draw(Q(DRAFT).row(tokens), chance))


def truncated(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
    """Draws from its top two, and says the row before the cut."""
    row = Q(DRAFT).row(tokens)
    top = row.probs.topk(2)
    tree.add(ROOT, int(top.indices[chance.categorical(top.values)]), row)


class OneStream:
    """Whatever the purpose, the same numbers: drafter and rule share them."""

    def __init__(self, source: ChanceSource) -> None:
        self._source = source

    def at(self, position: int, purpose: str) -> Chance:
        return self._source.at(position, "everything")


PLAIN = SamplingParams(1.0)
BUGS: dict[str, tuple[Grow, RecursiveRejection, SamplingParams]] = {
    "q at another temperature": (lying(0.6), RecursiveRejection(), PLAIN),
    "q before its own top-k": (truncated, RecursiveRejection(), PLAIN),
    "residual not renormalised": (SIBLINGS, Unnormalised(), PLAIN),
    "sibling tested with the first p": (SIBLINGS, Stale(), PLAIN),
    "correction from p": (sampled_chain(Q(DRAFT)), NoResidual(), PLAIN),
    "bonus from the draft": (sampled_chain(Q(DRAFT)), BonusFromDraft(), PLAIN),
    "top-p on one side": (sampled_chain(Q(DRAFT)), OneSidedTopP(), SamplingParams(1.0, top_p=0.7)),
    "siblings re-ranked by q": (SIBLINGS, ReRanked(), PLAIN),
    "certain tokens taken by a threshold": (certain_tree(1, 3), AlwaysFirst(), PLAIN),
    "penalties blind to the path": (
        sampled_chain(Q(DRAFT)),
        BlindToPath(),
        SamplingParams(1.0, presence_penalty=1.0, repetition_penalty=1.5),
    ),
    "grammar blind to the path": (sampled_chain(Q(DRAFT)), BlindToPath(), PARAMS["never twice"]),
    "draw pruned by its token": (pruning(lambda token, row: token != 1), RecursiveRejection(), PLAIN),
    "draw pruned by its q": (pruning(lambda token, row: row.prob(token) > 0.35), RecursiveRejection(), PLAIN),
    "draws without replacement said to be with": (said_replaced, RecursiveRejection(), PLAIN),
    "draws deduplicated": (deduplicated, RecursiveRejection(), PLAIN),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_catches(bug: str) -> None:
    grow, rule, params = BUGS[bug]
    table = random_table(3, 62)
    assert round_error(method(grow, rule=rule), params, table=table) > BIASED
    request = Request((0, 1), method(grow, rule=rule), params, max_new_tokens=3)
    plain = {(output,): weight for output, weight in autoregressive_distribution(table, params, (0, 1), 3).items()}
    assert distance(whole_law(TableTarget(3, table), [request]), plain) > BIASED


@pytest.mark.parametrize("grow", [sampled_chain(Q(DRAFT)), SIBLINGS], ids=["chain", "siblings"])
def test_the_check_catches_shared_random_numbers(grow: Grow) -> None:
    table = random_table(3, 62)
    assert round_error(method(grow), PLAIN, table=table, source=OneStream) > BIASED
    assert round_error(method(grow), PLAIN, table=table) < EXACT


@pytest.mark.parametrize("grow", [sampled_chain(Q(DRAFT)), SIBLINGS, certain_tree(1, 3), said_certain])
def test_the_seams_without_a_bug_are_exact(grow: Grow) -> None:
    for params in (PLAIN, PARAMS["never twice"], PARAMS["top-p"]):
        assert round_error(method(grow, rule=Biased()), params, table=random_table(3, 62)) < EXACT


# -------------------------------------------------------------------------------------------------------- greedy


@settings(max_examples=25)
@given(st.integers(0, 500), st.sampled_from(list(PARAMS)))
def test_greedy_follows_the_argmax_down_any_tree(seed: int, name: str) -> None:
    params = SamplingParams(
        repetition_penalty=PARAMS[name].repetition_penalty,
        presence_penalty=PARAMS[name].presence_penalty,
        processors=PARAMS[name].processors,
    )
    candidate_trees = toy_growers(4, seed)
    table = random_table(4, seed)
    for kind in ("chain", "certain tree", "merged trees"):
        grow, proposal = candidate_trees[kind]
        assert round_error(method(grow, proposal, rule=Greedy()), params, table=table, vocab=4) < 1e-12
        assert round_error(method(grow, proposal), params, table=table, vocab=4) < 1e-12


def test_at_temperature_0_lossless_rules_are_the_greedy_walk() -> None:
    chain = method(sampled_chain(Q(DRAFT)), CHAIN, rule=Rejection())
    assert chain.rule_for(SamplingParams()) is GREEDY
    assert chain.rule_for(SamplingParams(1.0)) is chain.rule
    with pytest.raises(BadInput, match="temperature 0"):
        method(sampled_chain(Q(DRAFT)), CHAIN, rule=Greedy()).rule_for(SamplingParams(0.5))


def test_two_draws_at_one_node_are_two_chances() -> None:
    """Sampling with replacement repeats a token; the repetition is a draw of its own and must be tested."""
    row = QRow(torch.tensor([0.5, 0.5, 0.0]))

    def twice(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        tree.add(ROOT, draw(row, chance), row)
        tree.add(ROOT, draw(row, chance), 0)

    assert round_error(method(twice), PLAIN, table=random_table(3, 71), horizon=2) < EXACT
    assert round_error(method(both(twice, certain_tree(3, 3))), PLAIN, table=random_table(3, 71)) < EXACT


def test_weights_of_a_round_sum_to_one() -> None:
    from support import round_law

    for kind, (grow, proposal) in toy_growers(3).items():
        proposal_distribution = round_law(TableTarget(3, seed=3), method(grow, proposal), PLAIN, (0,), 3)
        assert sum(proposal_distribution.values()) == pytest.approx(1), kind
        by_length: dict[int, float] = defaultdict(float)
        for output, weight in proposal_distribution.items():
            by_length[len(output)] += weight
        assert max(by_length) > 1, f"{kind}: nothing is ever accepted, the test would prove nothing"
