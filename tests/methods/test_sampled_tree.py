"""Sampled trees: every draw has the distribution of its row, beams are drawn without replacement, nothing is cut."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from outpace.acceptance.draws import draws_by_parent, proposal_distribution
from outpace.acceptance.registry import rules
from outpace.certify.exact import NEIGHBOURS, SAMPLING, Setting, certify_exact
from outpace.certify.fit import g_test
from outpace.certify.letters import LETTERS, Letters
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance, ChanceSource, Enumeration, SeededChance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.tree import DETERMINISTIC, ROOT, TokenTree
from outpace.drafting.model_drafter import CATCH_UP, DraftModel
from outpace.drafting.sampled_trees import (
    GreedyPlusOne,
    SampledTreeBuilder,
    StochasticBeam,
    TopK,
    WithoutReplacement,
    WithReplacement,
)
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.registry import build
from outpace.targets.base import Target
from outpace.targets.bridged import BridgedTarget
from outpace.targets.table import TableTarget, random_table
from outpace.vocabulary.shared import VocabularyMap
from support import NeverTwice, Path, autoregressive_distribution, distance as apart, reference_logits, reference_probs
from weights_support import with_drafts

PROMPT: Path = (0, 2, 1)
PLAIN = SamplingParams(1.0)
PARAMS = {
    "temperature 1": PLAIN,
    "top-k": SamplingParams(0.7, top_k=2),
    "top-p, penalties": SamplingParams(1.3, top_p=0.85, repetition_penalty=1.6, presence_penalty=0.5),
    "processor": SamplingParams(1.0, frequency_penalty=0.7, processors=(NeverTwice(),)),
}
BUILDERS: dict[str, type[SampledTreeBuilder]] = {
    "with replacement": WithReplacement,
    "without replacement": WithoutReplacement,
    "greedy plus one": GreedyPlusOne,
}
PROPOSALS = {
    WithReplacement: Proposal(tree=True, sampled=True),
    WithoutReplacement: Proposal(tree=True, sampled=True, replacement=False),
    GreedyPlusOne: Proposal(tree=True, sampled=True, one_sampled_sibling=True),
    TopK: Proposal(tree=True),
    StochasticBeam: Proposal(tree=True, sampled=True, replacement=False),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def draft(vocab: int = 3) -> TableTarget:
    return TableTarget(vocab, random_table(vocab, 2, sharpness=1.0))


def proposed(
    builder: type[SampledTreeBuilder],
    branching: tuple[int, ...],
    chance: ChanceSource,
    params: SamplingParams = PLAIN,
    *,
    vocab: int = 3,
    depth: int = 2,
    nodes: int = 64,
    confidence: float = 0.0,
) -> TokenTree:
    """One draft after PROMPT."""
    drafter = DraftModel(draft(vocab), partial(builder, branching=branching), PROPOSALS[builder])
    sequence = TableTarget(vocab).sequence(PROMPT, params, chance=chance)
    return drafter.propose_batch([drafter.begin(sequence)], [Budget(depth, nodes, max(branching), confidence)])[0]


# -------------------------------------------------------------------------------------------- draws one by one


def sequential(weights: list[float], k: int) -> dict[Path, float]:
    """The law of ``k`` draws without replacement, proportional to ``weights``."""
    support = [index for index, weight in enumerate(weights) if weight > 0]
    found = {}
    for order in permutations(support, min(k, len(support))):
        probability, left = 1.0, sum(weights)
        for index in order:
            probability *= weights[index] / left
            left -= weights[index]
        found[order] = probability
    return found


WEIGHTS = [[0.5, 0.3, 0.2], [3.0, 0.0, 1.0, 0.1], [0.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_ordered_samples_have_the_sequential_law(weights: list[float], k: int) -> None:
    expected = sequential(weights, k)
    row = torch.tensor(weights)

    def program(source: ChanceSource) -> Path:
        return tuple(source.at(0, "draft").ordered_sample(row, k))

    exact: dict[Path, float] = defaultdict(float)
    for outcome, weight in Enumeration.outcomes(program):
        exact[outcome] += weight
    assert apart(exact, expected) < 1e-7
    assert row.tolist() == torch.tensor(weights).tolist(), "the weights are the caller's"

    samples, seeded = 4000, SeededChance(3)
    counts = Counter(tuple(seeded.at(index, "draft").ordered_sample(row, k)) for index in range(samples))
    assert set(counts) <= set(expected)
    assert g_test([counts[order] for order in expected], [samples * weight for weight in expected.values()])[0] > 1e-4


# ------------------------------------------------------------------------------------------------ the rows are true


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("branching", [(2, 1), (3,), (1, 2)])
def test_the_probability_of_a_tree_is_that_of_its_draws(kind: str, name: str, branching: tuple[int, ...]) -> None:
    """For every tree that can come: its weight is the product of what its rows say of its draws, one by one."""
    weights: dict[Any, float] = defaultdict(float)
    trees: dict[Any, TokenTree] = {}

    def program(source: ChanceSource) -> TokenTree:
        return proposed(BUILDERS[kind], branching, source, PARAMS[name], depth=len(branching))

    for tree, weight in Enumeration.outcomes(program):
        key = tuple((one.parent, one.token, one.q_row) for one in tree.draws)
        weights[key] += weight
        trees[key] = tree
    assert sum(weights.values()) == pytest.approx(1)
    like = torch.zeros(3)
    for key, tree in trees.items():
        said = 1.0
        for siblings in draws_by_parent(tree).values():
            for index, one in enumerate(siblings):
                q = proposal_distribution(tree, siblings[:index], one, like)
                said *= 1.0 if q is None else float(q[one.token])
        assert weights[key] == pytest.approx(said, abs=1e-6), key


@pytest.mark.parametrize("kind", [*BUILDERS, "beam"])
@pytest.mark.parametrize("name", PARAMS)
def test_rows_are_the_draft_models_own_for_the_path(kind: str, name: str) -> None:
    """Temperature, top-k, top-p, penalties and processors as of the node, not of the root."""
    table, params = draft(4).table, PARAMS[name]
    builder = StochasticBeam if kind == "beam" else BUILDERS[kind]
    for seed in range(12):
        tree = proposed(builder, (2, 2), SeededChance(seed), params, vocab=4)
        assert len(tree)
        for one in tree.draws:
            path = tree.path_tokens(one.parent)
            expected = reference_probs(table((*PROMPT, *path)), params, PROMPT, path)
            if kind == "greedy plus one":
                likeliest = int(np.argmax(expected))
                if one.q_row == DETERMINISTIC:
                    assert one.token == likeliest
                    continue
                expected[likeliest] = 0
                expected /= expected.sum()
            got = tree.q_rows[one.q_row].dense(4).double().numpy()
            np.testing.assert_allclose(got, expected, atol=1e-6)
            assert got[one.token] > 0


def test_siblings_share_the_row_that_they_were_drawn_from() -> None:
    for builder in (WithReplacement, WithoutReplacement, StochasticBeam):
        tree = proposed(builder, (3, 2), SeededChance(4), vocab=5)
        for siblings in draws_by_parent(tree).values():
            assert len({one.q_row for one in siblings}) == 1
            if not tree.replacement:
                assert len({one.token for one in siblings}) == len(siblings)
        assert len(tree.q_rows) == len(draws_by_parent(tree))
        assert tree.replacement is (builder is WithReplacement)


# ------------------------------------------------------------------------------------------------ the tree's shape


def shape(tree: TokenTree) -> tuple[int, ...]:
    return tuple(tree.parents)


@pytest.mark.parametrize("builder", [WithoutReplacement, GreedyPlusOne])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6, 64])
def test_the_shape_does_not_depend_on_what_is_drawn(builder: type[SampledTreeBuilder], nodes: int) -> None:
    """Every row has full support here, so that all draws there could be are made, or none."""
    found = [tree for tree, _ in Enumeration.outcomes(lambda source: proposed(builder, (2, 2), source, nodes=nodes))]
    assert len(found) > 1 or nodes < 2
    assert len({shape(tree) for tree in found}) == 1
    assert all(len(tree.draws) <= nodes for tree in found)
    assert len(found[0].draws) == {1: 0, 2: 2, 3: 2, 4: 4, 5: 4}.get(nodes, 6)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6, 64])
def test_the_budget_counts_draws_and_not_lucky_repetitions(nodes: int) -> None:
    found = [
        tree for tree, _ in Enumeration.outcomes(lambda source: proposed(WithReplacement, (2, 2), source, nodes=nodes))
    ]
    for tree in found:
        distinct = len(tree.children(ROOT))
        expanded = min(distinct, max(0, nodes - 2) // 2)
        assert len(tree.draws) == (0 if nodes < 2 else 2 + 2 * expanded)
        assert len(tree.draws) <= nodes


@pytest.mark.parametrize("nodes", [2, 3, 5, 6, 9])
def test_a_beam_is_within_the_budget_at_every_level(nodes: int) -> None:
    for seed in range(30):
        tree = proposed(StochasticBeam, (3,), SeededChance(seed), vocab=4, depth=3, nodes=nodes)
        levels = Counter(tree.depths)
        assert len(tree.draws) == len(tree) <= nodes
        assert len(tree) == nodes // 3 * 3
        assert all(count == 3 for count in levels.values())


def test_a_beam_is_no_wider_than_what_can_be_drawn() -> None:
    tree = proposed(StochasticBeam, (8,), SeededChance(1), SamplingParams(1.0, top_k=2), depth=2)
    assert Counter(tree.depths) == {1: 2, 2: 4}
    assert not len(proposed(StochasticBeam, (8,), SeededChance(1), SamplingParams(1.0, top_k=2), depth=2, nodes=7))


@pytest.mark.parametrize("builder", [WithReplacement, WithoutReplacement, GreedyPlusOne])
def test_a_threshold_looks_at_the_row_and_not_at_the_draw(builder: type[SampledTreeBuilder]) -> None:
    """A node is expanded or not for its own row's largest probability, before anything is drawn from it."""
    trees = [tree for tree, _ in Enumeration.outcomes(lambda source: proposed(builder, (2, 1), source, confidence=0.5))]
    table = draft().table
    for tree in trees:
        for node in (ROOT, *tree.children(ROOT)):
            largest = float(table((*PROMPT, *tree.path_tokens(node))).softmax(-1).max())
            assert bool(tree.children(node)) is (largest >= 0.5)


GREEDY = {
    "temperature 0": SamplingParams(),
    "penalties, bias": SamplingParams(repetition_penalty=1.7, presence_penalty=0.4, logit_bias={2: 1.5, 5: -3.0}),
}


@pytest.mark.parametrize("params", GREEDY.values(), ids=GREEDY)
@pytest.mark.parametrize("builder", [*BUILDERS.values(), TopK])
def test_at_temperature_0_children_are_the_likeliest_tokens(
    builder: type[SampledTreeBuilder], params: SamplingParams
) -> None:
    tree = proposed(builder, (3, 2), SeededChance(0), params, vocab=7, depth=3)
    assert tree.is_deterministic and len(tree.draws) == len(tree) == 3 + 6 + 6
    prompt = [token % 7 for token in PROMPT]
    for node in (ROOT, *range(len(tree))):
        depth = 0 if node == ROOT else tree.depths[node]
        path = tree.path_tokens(node)
        logits = reference_logits(draft(7).table((*prompt, *path)), params, prompt, path)
        best = np.argsort(-logits)[: (3, 2, 1, 0)[depth]]
        assert [tree.tokens[child] for child in tree.children(node)] == best.tolist()


def test_at_temperature_0_a_beam_is_a_beam_search() -> None:
    tree = proposed(StochasticBeam, (3,), SeededChance(0), SamplingParams(), vocab=7, depth=3)
    assert tree.is_deterministic and [tree.depths.count(depth) for depth in (1, 2, 3)] == [3, 3, 3]
    table, prompt = draft(7).table, tuple(token % 7 for token in PROMPT)
    beam: dict[Path, float] = {(): 0.0}
    for depth in (1, 2, 3):
        rows = {path: table((*prompt, *path)).double().log_softmax(-1) for path in beam}
        every = {(*path, token): beam[path] + float(row[token]) for path, row in rows.items() for token in range(7)}
        beam = dict(sorted(every.items(), key=lambda pair: -pair[1])[:3])
        found = [tuple(tree.path_tokens(node)) for node in range(len(tree)) if tree.depths[node] == depth]
        assert sorted(found) == sorted(beam)


def test_at_temperature_0_banned_tokens_are_not_drafted() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(1, 7), float("-inf")))
    tree = proposed(WithoutReplacement, (3, 2), SeededChance(0), params, vocab=7)
    assert tree.tokens == [0, 0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("rsd", {}), ("rsd", {"beam": 3}), ("sampled-tree", {}), ("sampled-tree", {"draws": "greedy"}), ("specinfer", {})],
)
@pytest.mark.parametrize("bridged", [False, True])
def test_at_temperature_0_a_tree_is_accepted_further_than_a_chain(
    name: str, settings: dict[str, Any], bridged: bool
) -> None:
    """Siblings that differ raise acceptance over the chain of the same draft model, and the answers stay the same."""
    vocab = 6
    truth, noise = random_table(vocab, 5), random_table(vocab, 99, sharpness=1.0)
    one, draft_model = TableTarget(vocab, truth), TableTarget(vocab, lambda path: truth(path) + noise(path))
    drafts: list[Target] = [draft_model]
    if bridged:  # its tokens stand in another order, and one is missing
        order = [4, 2, 0, 3, 1]
        words = VocabularyMap(Letters(LETTERS[:vocab]), Letters([LETTERS[index] for index in order]), vocab, len(order))
        theirs = TableTarget(len(order), lambda path: draft_model.table(tuple(order[token] for token in path))[order])
        drafts = [BridgedTarget(theirs, words, 256)]
    context = with_drafts(one, *drafts)

    def decode(method: str, given: dict[str, Any]) -> tuple[list[list[int]], float]:
        decoder = Decoder(one)
        made = build(method, context, given)
        running = [decoder.submit(Request((seed, 1), made, max_new_tokens=60)) for seed in range(4)]
        decoder.run()
        rounds = sum(each.metrics.rounds for each in running)
        return [each.tokens for each in running], sum(each.metrics.accepted for each in running) / rounds

    plain, _ = decode("none", {})
    branching = (3, 2, 1)
    chain, chain_accepted = decode("draft-model", {"num_draft_tokens": len(branching)})
    tree, tree_accepted = decode(name, {"branching": branching, **settings})
    assert tree == chain == plain
    assert tree_accepted > chain_accepted


# ------------------------------------------------------------------------------------------------ stochastic beams


def sequences_of(vocab: int, beam: int, depth: int) -> dict[tuple[Path, ...], float]:
    """The law of ``beam`` whole sequences drawn one after the other without replacement from the draft model."""
    whole = autoregressive_distribution(draft(vocab).table, PLAIN, tuple(token % vocab for token in PROMPT), depth)
    paths = list(whole)
    orders = sequential([whole[path] for path in paths], beam)
    return {tuple(paths[index] for index in order): weight for order, weight in orders.items()}


@pytest.mark.certification
@pytest.mark.parametrize(("vocab", "beam", "depth"), [(3, 2, 1), (3, 2, 2), (2, 3, 2), (2, 2, 3), (3, 3, 1)])
def test_a_beam_draws_whole_sequences_without_replacement(vocab: int, beam: int, depth: int) -> None:
    samples = 5000
    counts: Counter[tuple[Path, ...]] = Counter()
    drafter = DraftModel(draft(vocab), partial(StochasticBeam, branching=(beam,)), PROPOSALS[StochasticBeam])
    for seed in range(samples):
        sequence = TableTarget(vocab).sequence([token % vocab for token in PROMPT], PLAIN, chance=SeededChance(seed))
        state = drafter.begin(sequence)
        tree = drafter.propose_batch([state], [Budget(depth, 64, beam)])[0]
        drafter.end(state)
        last = [one for one in tree.draws if tree.depths[one.node] == depth]
        counts[tuple(tuple(tree.path_tokens(one.node)) for one in last)] += 1
    expected = sequences_of(vocab, beam, depth)
    assert set(counts) <= set(expected)
    p_value, freedom = g_test([counts[key] for key in expected], [samples * one for one in expected.values()])
    assert freedom > 2
    assert p_value > 1e-4


def test_siblings_of_a_beam_are_draws_without_replacement() -> None:
    """Whether a node gets a second child depends on the first and on other nodes; which token it is does not.

    Given that there is a third, it does: its perturbed value tells how much the second left. Rules never ask.
    """
    samples, vocab = 5000, 3
    firsts: dict[int, Counter[int]] = defaultdict(Counter)
    seconds: dict[Path, Counter[int]] = defaultdict(Counter)
    for seed in range(samples):
        tree = proposed(StochasticBeam, (3,), SeededChance(seed), vocab=vocab)
        node = tree.children(ROOT)[0]
        children = [tree.tokens[child] for child in tree.children(node)]
        firsts[tree.tokens[node]][children[0]] += 1
        if len(children) > 1:
            seconds[tree.tokens[node], children[0]][children[1]] += 1
    checked = 0
    for path, found in [*(((token,), counts) for token, counts in firsts.items()), *seconds.items()]:
        q = draft(vocab).table((*PROMPT, path[0])).double().softmax(-1)
        q[list(path[1:])] = 0.0
        total = sum(found.values())
        p_value, freedom = g_test([found[one] for one in range(vocab)], (total * q / q.sum()).tolist())
        checked += freedom
        assert p_value > 1e-4, path
    assert checked >= 10


def beam_error(name: str, beam: int, depth: int, vocab: int, samples: int) -> tuple[float, int]:
    """Largest |z| over outputs of a round on sampled beams, each judged exactly, and the number of outputs.

    The output's law given the tree is enumerated, so that only the drawing of trees is left to chance.
    """
    table, judge = random_table(vocab, 7), rules()[name]()
    target = TableTarget(vocab, table)
    sequence = target.sequence(PROMPT, PLAIN)
    target.prefill([sequence])
    plain = autoregressive_distribution(table, PLAIN, PROMPT, depth + 1)
    outputs = list(plain)
    judged: dict[Any, np.ndarray] = {}
    total, squares = np.zeros(len(outputs)), np.zeros(len(outputs))
    drafter = DraftModel(draft(vocab), partial(StochasticBeam, branching=(beam,)), PROPOSALS[StochasticBeam])
    for seed in range(samples):
        sequence.chance = SeededChance(seed)
        state = drafter.begin(sequence)
        tree = drafter.propose_batch([state], [Budget(depth, 64, beam)])[0]
        drafter.end(state)
        key = tuple(tree.draws)
        if key not in judged:
            scores = target.score([(sequence, tree)])[0]

            def program(source: ChanceSource, scores: Any = scores) -> Path:
                verdict = judge.accept([scores], [None], [source.at(0, "accept")])[0]
                return (*(scores.tree.tokens[node] for node in verdict.path), verdict.token)

            committed: dict[Path, float] = defaultdict(float)
            for output, weight in Enumeration.outcomes(program):
                committed[output] += weight
            row = dict.fromkeys(outputs, 0.0)
            for start, weight in committed.items():
                for output, p in autoregressive_distribution(table, PLAIN, PROMPT, depth + 1, start=start).items():
                    row[output] += weight * p
            judged[key] = np.array([row[output] for output in outputs])
        total += judged[key]
        squares += judged[key] ** 2
    mean = total / samples
    spread = np.sqrt(np.maximum(squares / samples - mean**2, 1e-18) / samples)
    return float(np.abs((mean - [plain[output] for output in outputs]) / spread).max()), len(outputs)


@pytest.mark.certification
@pytest.mark.parametrize("name", ["recursive-rejection", "traversal"])
@pytest.mark.parametrize(("beam", "depth", "vocab"), [(2, 2, 3), (3, 2, 3)])
def test_beams_keep_the_law_under_rules_for_draws_without_replacement(
    name: str, beam: int, depth: int, vocab: int
) -> None:
    z, outputs = beam_error(name, beam, depth, vocab, 3000)
    assert z < 4.5, f"{outputs} outputs"


# --------------------------------------------------------------------------------------------------- whole outputs


def tree_method(name: str, rule: str | None = None, **settings: Any) -> Any:
    return lambda context: build(name, context, settings, rule)


def cells(length: int, seed: int = 8) -> list[Setting]:
    return [Setting(sampling, 3, length, (0, 1, 2), NEIGHBOURS[0], seed) for sampling in SAMPLING]


@pytest.mark.certification
@pytest.mark.parametrize(
    ("name", "rule", "settings"),
    [
        ("rsd", "recursive-rejection", {"branching": (2, 1)}),
        ("rsd", "traversal", {"branching": (2, 1)}),
        ("rsd", None, {"branching": (3,)}),
        ("sampled-tree", "recursive-rejection", {"branching": (2, 1)}),
        ("sampled-tree", "traversal", {"branching": (2,)}),
        ("sampled-tree", "k-seq", {"branching": (2,)}),
        ("sampled-tree", "univer", {"branching": (2, 1), "draws": "greedy"}),
        ("sampled-tree", "traversal", {"branching": (2, 2), "draws": "greedy"}),
        ("sampled-tree", None, {"branching": (3,), "draws": "greedy"}),
    ],
)
def test_whole_outputs_keep_the_law(name: str, rule: str | None, settings: dict[str, Any]) -> None:
    wanted = cells(3) if len(settings["branching"]) == 1 or "draws" in settings else cells(3)[::3]
    certificate = certify_exact(name, tree_method(name, rule, **settings), wanted)
    assert certificate.lossless is True, certificate
    assert certificate.p_value is None, "all of it is enumerated"
    assert certificate.max_abs_error is not None
    assert certificate.max_abs_error < 1e-6


@pytest.mark.certification
@pytest.mark.parametrize("rule", ["recursive-rejection", "traversal"])
def test_beams_are_certified_by_samples(rule: str) -> None:
    make = tree_method("rsd", rule, branching=(1, 1), beam=3)
    certificate = certify_exact("rsd", make, cells(3)[:1] + cells(3)[5:6], samples=800)
    assert certificate.lossless is True, certificate
    assert certificate.max_abs_error is None
    assert certificate.detectable_bias is not None
    assert certificate.detectable_bias < 0.15


# ------------------------------------------------------------------------------------------ the draft model's K/V


class Watched(TableTarget):
    """Counts prefills."""

    prefills = 0

    def prefill(self, sequences: Any, *args: Any, **kwargs: Any) -> None:
        self.prefills += 1
        super().prefill(sequences, *args, **kwargs)


@pytest.mark.parametrize("builder", [*BUILDERS.values(), StochasticBeam])
def test_the_draft_models_kv_keeps_step(builder: type[SampledTreeBuilder]) -> None:
    """After every round it holds a beginning of the committed tokens, short by no more than it did not run."""
    small = Watched(4, random_table(4, 2, sharpness=1.0))
    drafter = DraftModel(small, partial(builder, branching=(2, 2, 1)), PROPOSALS[builder])
    name = "univer" if builder is GreedyPlusOne else "traversal"
    method = Method("watched", drafter, rules()[name](), Fixed(3, 2, 24))
    target = TableTarget(4, random_table(4, 1))
    decoder = Decoder(target)
    running = [
        decoder.submit(Request((0, 1, seed), method, SamplingParams(1.0, seed=seed), max_new_tokens=40))
        for seed in range(3)
    ]
    while decoder.step():
        for one in decoder.active:
            kv, tokens = one.draft_state.draft_sequence.kv, one.sequence.tokens
            assert kv == tokens[: len(kv)]
            assert 0 < len(tokens) - 1 - len(kv) <= 1 or len(kv) == len(tokens) - 1
            assert one.sequence.kv == tokens[:-1]
    assert small.prefills <= 1, "committed tokens ride along in the first forward of the next draft"
    assert all(len(one.tokens) == 40 for one in running)
    assert CATCH_UP > 1


def test_a_draft_depends_on_the_requests_own_stream_alone() -> None:
    one, again, other = (proposed(WithoutReplacement, (3, 2), SeededChance(seed), vocab=6) for seed in (1, 1, 2))
    assert one.draws == again.draws
    assert one.draws != other.draws

    class Elsewhere(SeededChance):
        def at(self, position: int, purpose: str) -> Chance:
            assert (position, purpose) == (len(PROMPT), "draft")
            return super().at(position, purpose)

    builders: list[type[SampledTreeBuilder]] = [*BUILDERS.values(), StochasticBeam]
    for builder in builders:
        assert len(proposed(builder, (2, 1), Elsewhere(3)))


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("name", ["rsd", "sampled-tree"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"branching": ()}, "branching"),
        ({"branching": (-1,)}, "branching"),
        ({"max_nodes": 0}, "max_nodes"),
        ({"beam": -1}, "beam"),
        ({"draws": "all"}, "draws"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    context = with_drafts(TableTarget(3), draft(3))
    with pytest.raises(BadInput, match=words):
        build(name, context, settings)


@pytest.mark.parametrize("name", ["rsd", "sampled-tree"])
@pytest.mark.parametrize("branching", [(2, 0), (0,), (2, -1)])
def test_a_level_without_draws_is_refused(name: str, branching: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="branching"):
        build(name, with_drafts(TableTarget(3), draft(3)), {"branching": branching})


@pytest.mark.parametrize("settings", [{"branching": (3,), "max_nodes": 2}, {"beam": 9, "max_nodes": 8}])
def test_a_first_level_without_room_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="no room"):
        build("rsd", with_drafts(TableTarget(3), draft(3)), settings)


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput, match="vocabulary"):
        build("rsd", with_drafts(TableTarget(3), draft(4)))


def test_expected_accepted_length_grows_with_the_tree() -> None:
    """Without replacement two siblings are two chances; the sum is finite and sane."""
    table = random_table(4, 1)
    lengths = []
    for branching in ((1,), (2,), (3,)):
        method = build("rsd", with_drafts(TableTarget(4, table), draft(4)), {"branching": branching}, "traversal")
        decoder = Decoder(TableTarget(4, table))
        running = [
            decoder.submit(Request((0, 1), method, SamplingParams(1.0, seed=seed), max_new_tokens=30))
            for seed in range(30)
        ]
        decoder.run()
        lengths.append(sum(one.metrics.accepted for one in running) / sum(one.metrics.rounds for one in running))
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0] + 0.1
