"""certify catches every planted bias and passes what is honest, at all three levels; its statistics hold."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from biases import BIASES, NOISY, Bias, Controls
from certify_cases import Case, cases, hidden_choices, lossless_rules, takes
from outpace.acceptance.base import Verdict
from outpace.acceptance.greedy import Greedy
from outpace.acceptance.registry import rules
from outpace.certify import certify
from outpace.certify.certificate import Certificate
from outpace.certify.exact import (
    NEIGHBOURS,
    PROMPTS,
    SAMPLING,
    TOLERANCE,
    Setting,
    cells_of,
    certify_exact,
    matrix,
    namespace_cells,
    rotating_slice,
    tiny_context,
)
from outpace.certify.fit import detectable_bias, g_test, holm
from outpace.certify.greedy import certify_greedy
from outpace.certify.near_ties import gap, near_tie_gap, parting
from outpace.certify.statistical import certify_statistical
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance, SeededChance
from outpace.core.errors import BadInput
from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.engine.method import Method
from outpace.methods.registry import Context, build, find, methods
from outpace.targets.base import Scores, Sequence, TreeScores
from outpace.targets.hf import HFTarget
from outpace.targets.sub_graph import FULL, SubGraph
from outpace.targets.table import TableTarget, random_table
from rotation import DAYS, SEED
from support import CERTAIN_TREE, CHAIN, Path, Toy, certain_tree
from target_suite import tiny_model
from weights_support import with_drafts

KEYS = {"method", "lossless", "level", "p_value", "max_abs_error", "detectable_bias", "first_difference"}


pytestmark = pytest.mark.usefixtures("one_thread")


def cells(sampling: str, seeds: Seq[int] = (8, 9), length: int = 3) -> list[Setting]:
    return [Setting(sampling, 3, length, (0, 1, 2), NEIGHBOURS[0], seed) for seed in seeds]


# --------------------------------------------------------------------------------------------------- exact level


def test_too_many_outcomes_are_not_walked_until_the_limit_shows_it() -> None:
    """They are sampled, and say so."""
    made = 0

    def make(context: Context) -> Method:
        nonlocal made
        made += 1
        return build("rsd", context, {"branching": (2, 2)})

    [cell] = cells("temperature 1", (8,), length=4)
    certificate = certify_exact("rsd", make, [cell], samples=200, outcomes=500)
    assert certificate.lossless, certificate
    assert certificate.checks[0].note == "sampled: more than 500 branches to enumerate, by an estimate"
    assert made < 450


@pytest.mark.certification
@pytest.mark.parametrize("name", BIASES)
def test_the_exact_level_catches(name: str) -> None:
    bias = BIASES[name]
    certificate = certify_exact(name, bias.make, cells(bias.where, bias.tables))
    assert certificate.lossless is False, certificate
    assert certificate.max_abs_error is not None
    assert certificate.max_abs_error > 20 * TOLERANCE
    assert certificate.verdict.startswith("not lossless")
    assert any(check.passed is False and bias.where in check.name for check in certificate.checks)
    assert all(check.p_value is None for check in certificate.checks), "it should have been enumerated"


def test_at_least_twelve_biases_are_planted() -> None:
    assert len(BIASES) >= 12
    assert {bias.where for bias in BIASES.values()} <= set(SAMPLING)


@pytest.mark.parametrize("name", NOISY)
def test_continuous_noise_is_sampled_and_its_biases_are_caught(name: str) -> None:
    certificate = certify_exact(name, NOISY[name].make, cells("temperature 1", (8,)), samples=1200)
    assert certificate.lossless is False, certificate
    assert certificate.p_value is not None
    assert certificate.p_value < 1e-6
    assert certificate.max_abs_error is None
    assert "sampled" in certificate.checks[0].note


@pytest.mark.certification
@pytest.mark.parametrize("name", Controls.MAKES)
def test_the_same_parts_without_the_bias_pass(name: str) -> None:
    settings = [cell for sampling in SAMPLING for cell in cells(sampling, (8,))]
    certificate = certify_exact(name, Controls.MAKES[name], settings)
    assert certificate.lossless is True, certificate
    assert certificate.max_abs_error is not None
    assert certificate.max_abs_error < TOLERANCE


@pytest.mark.parametrize("sampling", ["penalties", "user's processor"])
def test_a_sampler_that_is_blind_to_the_path_is_caught(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference never walks a tree, so a mistake in the trees' own sampler shows as well."""
    changes, process = Sampler.changes, Sampler.process
    monkeypatch.setattr(Sampler, "changes", lambda sampler, path, *rest: changes(sampler, (), *rest))
    monkeypatch.setattr(Sampler, "process", lambda sampler, row, states: process(sampler, row, sampler.states))
    certificate = certify_exact("blind", Controls.MAKES["chain"], cells(sampling))
    assert certificate.lossless is False, certificate


def test_neighbours_of_the_batch_that_share_random_numbers_are_not_mistaken_for_a_bias() -> None:
    settings = [Setting("temperature 1", 3, 3, prompt, NEIGHBOURS[1], 4) for prompt in PROMPTS]
    assert certify_exact("chain", Controls.MAKES["chain"], settings).lossless is True


@pytest.mark.parametrize("case", [pytest.param(case, id=case.label) for case in [*cases()][SEED % DAYS :: DAYS]])
def test_registered_methods_pass_on_todays_slice(case: Case) -> None:
    print(f"OUTPACE_SEED={SEED}")

    def make(context: Context) -> Method:
        return build(case.name, context, case.settings, case.rule)

    chosen = rotating_slice(matrix(), SEED, 1)
    # Of settings with many outcomes some hundred samples: a quick look. What passed yesterday must not fail by chance.
    certificate = certify_exact(case.name, make, chosen, samples=300, alpha=1e-5, seed=SEED, outcomes=1000)
    if certificate.lossless is None:
        assert "drafted nothing" in certificate.verdict  # a drafter that copies found nothing to copy in this slice
        return
    assert certificate.lossless is True, f"OUTPACE_SEED={SEED}: {certificate}"
    assert set(certificate.public()) >= KEYS
    assert not hidden_choices(certificate)


def keeping() -> list[Case]:
    """The cases whose drafters keep something for later requests of a namespace."""
    return [
        case
        for case in cases()
        if case.rule is None and build(case.name, tiny_context(3, 0), case.settings).drafter.remembers
    ]


@pytest.mark.certification
@pytest.mark.parametrize("case", [pytest.param(case, id=case.label) for case in keeping()])
def test_methods_that_keep_something_pass_a_second_request_of_the_seed_and_namespace(case: Case) -> None:
    def make(context: Context) -> Method:
        return build(case.name, context, case.settings)

    chosen = namespace_cells()[SEED % 2]
    certificate = certify_exact(case.name, make, [chosen], samples=100, alpha=1e-5, seed=SEED, outcomes=200)
    assert certificate.lossless is not False, f"OUTPACE_SEED={SEED}: {certificate}"
    assert not hidden_choices(certificate)


@pytest.mark.parametrize("name", ["cacheback", "lookahead"])
def test_a_second_request_with_the_numbers_of_the_first_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: streams that are keyed by the seed alone."""
    monkeypatch.setattr(SeededChance, "key", property(lambda chance: b"%d" % chance.seed))

    def make(context: Context) -> Method:
        return build(name, context, dict(find(name).tiny))

    certificate = certify_exact(name, make, namespace_cells())
    assert certificate.lossless is False
    assert certificate.max_abs_error is not None
    assert certificate.max_abs_error > 0.1


def test_the_cells_of_a_method_follow_from_whether_it_keeps_anything() -> None:
    extra = {name: cells_of(build(name, tiny_context(3, 0)))[len(matrix()) :] for name in ("pld", "sam", "cacheback")}
    assert extra["pld"] == []
    assert extra["cacheback"] == namespace_cells()
    assert len(keeping()) >= 10


def test_every_registered_method_can_be_certified() -> None:
    for info in methods():
        info.settings.model_validate(dict(info.tiny))
        assert info.name in {case.name for case in cases()} or not info.lossless


def test_every_rule_is_certified_on_every_kind_of_tree_that_it_takes() -> None:
    made = [(case, build(case.name, tiny_context(3, 0), case.settings, case.rule)) for case in cases()]
    kinds = {method.drafter.proposal for case, method in made if method.may_draft}
    for kind in kinds:
        under = {method.rule.name for _, method in made if method.drafter.proposal == kind}
        assert under == {rule for rule in lossless_rules() if takes(rule, kind)}, kind


def test_an_honest_beam_is_sampled_and_passes() -> None:
    certificate = certify_exact(
        "beam",
        lambda context: build("rsd", context, {"branching": (1, 1), "beam": 2}),
        cells("temperature 1", (8,)) + cells("top-p 0.8", (9,)),
        samples=1500,
    )
    assert certificate.lossless is True, certificate
    assert certificate.max_abs_error is None
    assert certificate.detectable_bias is not None
    assert f"no bias above {certificate.detectable_bias:.3g}" in certificate.verdict
    assert "proved" not in certificate.verdict


def test_a_cell_without_two_outcomes_has_no_power_and_does_not_break_the_verdict() -> None:
    """A drafter with continuous noise at temperature 0: one outcome, nothing for a G-test to do."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        if depth:
            tree.add(ROOT, int(chance.gumbel(3).argmax()))

    def make(context: Context) -> Method:
        return Method("noisy", Toy(grow, CERTAIN_TREE), rules()["recursive-rejection"](), Fixed(1))

    certificate = certify_exact("noisy", make, cells("greedy, penalties", (8,), 2), samples=100)
    assert certificate.lossless is not False
    assert certificate.detectable_bias is None


def test_randomness_from_elsewhere_is_noticed() -> None:
    """Numbers that do not come from Chance cannot be enumerated; the outputs are sampled and the note says why."""
    elsewhere = random.Random(1)

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        if depth and elsewhere.random() < 0.5:
            tree.add(ROOT, 0)
            tree.add(ROOT, 1)

    def make(context: Context) -> Method:
        return Method("elsewhere", Toy(grow, CERTAIN_TREE), rules()["recursive-rejection"](), Fixed(1))

    certificate = certify_exact("elsewhere", make, cells("temperature 1", (8,), 2), samples=400)
    assert certificate.max_abs_error is None
    assert certificate.lossless is True, certificate
    assert "not a function of its random choices" in certificate.checks[0].note


def test_a_rule_that_cannot_go_on_is_an_error_and_no_bias() -> None:
    """Answers that broke off are shorter than autoregressive decoding's: that is no law to compare."""

    class Refuses(Greedy):
        greedy_only = lossless = False

        def accept(self, scores: Seq[TreeScores], states: Seq[Any], chances: Seq[Chance]) -> list[Verdict]:
            if any(one.tree.tokens for one in scores):
                raise BadInput("this tree is not for me")
            return super().accept(scores, states, chances)

    def make(context: Context) -> Method:
        return Method("refuses", Toy(certain_tree(1, 3), CERTAIN_TREE), Refuses(), Fixed(2))

    attempts: list[Callable[[], Certificate]] = [
        lambda: certify_exact("refuses", make, cells("temperature 1", (8,))),
        lambda: statistical(make(CONTEXT), samples=200),
        lambda: certify_greedy(make(CONTEXT), TARGET, ASKED[:1]),
    ]
    for attempt in attempts:
        with pytest.raises(BadInput, match="not for me"):
            attempt()


def test_a_method_that_never_drafts_is_inconclusive() -> None:
    def make(context: Context) -> Method:
        return Method("idle", Toy(lambda *_: None, CHAIN), rules()["recursive-rejection"](), Fixed(2))

    certificate = certify_exact("idle", make, cells("temperature 1"))
    assert certificate.lossless is None
    assert "drafted nothing" in certificate.verdict
    assert certify("none", cells=2).lossless is True, (
        "autoregressive decoding never drafts and is what it is compared with"
    )


def test_the_matrix_and_its_slices() -> None:
    whole = matrix()
    assert {(cell.sampling, cell.neighbour) for cell in whole} == {(s, n) for s in SAMPLING for n in NEIGHBOURS}
    assert {cell.vocab_size for cell in whole} == {3, 4, 5}
    assert max(cell.length for cell in whole) == 4
    assert rotating_slice(whole, 5, 4) == rotating_slice(whole, 5, 4)
    assert len(set(rotating_slice(whole, 5, 4))) == 4
    assert len({tuple(rotating_slice(whole, seed, 4)) for seed in range(20)}) == 20
    assert sorted(rotating_slice(whole, 1, 10_000), key=str) == sorted(whole, key=str)
    assert {cell.seed for cell in matrix(1)}.isdisjoint(cell.seed for cell in whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"level": "vague"}, "unknown level 'vague'; known: exact, statistical, greedy"),
        ({"samples": 5}, "samples must be at least 100, not 5"),
        ({"alpha": 0.0}, "alpha must be in"),
        ({"cells": 0}, "cells must be at least 1"),
        ({"alpha": 1.5}, "alpha must be in"),
        ({"level": "greedy"}, "give one"),
        ({"rule": "k-seq"}, "k-seq"),
        ({"rule": "best"}, "unknown acceptance rule 'best'"),
        ({"settings": {"depth": 3}}, "depth"),
    ],
)
def test_what_cannot_be_certified_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        certify("rsd", **arguments)
    with pytest.raises(BadInput, match="unknown method 'nothing'"):
        certify("nothing")


# --------------------------------------------------------------------------------------------- statistical level

VOCAB = 30
TARGET = TableTarget(VOCAB, random_table(VOCAB, 1))
DRAFT = TableTarget(VOCAB, random_table(VOCAB, 2, sharpness=1.2))
CONTEXT = with_drafts(TARGET, DRAFT)
ASKED = [[i, i + 1, i + 2] for i in range(12)]


def statistical(method: Method, **options: Any) -> Certificate:
    return certify_statistical(method, TARGET, ASKED, **{"samples": 2000, "seed": 3, **options})


@pytest.mark.parametrize(
    ("name", "settings", "rule"),
    [
        ("draft-model", {"num_draft_tokens": 2}, None),
        ("draft-model", {"num_draft_tokens": 2}, "block"),
        ("draft-model", {"num_draft_tokens": 2}, "gumbel-coupling"),
        ("draft-model", {"num_draft_tokens": 2, "topk": 2, "max_nodes": 4}, None),
        ("rsd", {"branching": (2, 2)}, None),
        ("rsd", {"branching": (2, 2), "beam": 3}, "traversal"),
        ("sampled-tree", {"branching": (3, 1)}, "k-seq"),
        ("sampled-tree", {"branching": (3, 1), "draws": "greedy"}, "univer"),
    ],
)
def test_honest_methods_pass_the_statistical_level(name: str, settings: Mapping[str, Any], rule: str | None) -> None:
    certificate = statistical(build(name, CONTEXT, settings, rule))
    assert certificate.lossless is True, certificate
    assert certificate.p_value is not None
    assert certificate.p_value > 0.01
    assert all(check.p_value is not None and 0 < check.p_value <= 1 for check in certificate.checks)
    assert certificate.detectable_bias is not None
    assert 0 < certificate.detectable_bias < 0.25
    assert f"no bias above {certificate.detectable_bias:.3g}" in certificate.verdict


SMALL = ("univer: shares that are not divided by the supply",)
"""Biases that 6,000 samples find in half of the runs."""


@pytest.mark.certification
@pytest.mark.parametrize("name", [name for name, bias in BIASES.items() if bias.statistical])
def test_the_statistical_level_catches(name: str) -> None:
    certificate = statistical(BIASES[name].make(CONTEXT), samples=24_000 if name in SMALL else 6000)
    assert certificate.lossless is False, certificate
    assert certificate.p_value is not None
    assert certificate.p_value < 0.01
    assert "rejects" in certificate.verdict


@pytest.mark.certification
@pytest.mark.parametrize(
    ("name", "params"),
    [("top-p in the bonus alone", SamplingParams(1.2, top_p=0.6)), ("temperature missing from p", SamplingParams(0.5))],
)
def test_biases_of_sampling_parameters_show_where_these_are_certified(name: str, params: SamplingParams) -> None:
    method = BIASES[name].make(CONTEXT)
    assert statistical(method).lossless is True, "at temperature 1 nothing is wrong"
    assert statistical(method, params=params).lossless is False
    assert statistical(Controls.MAKES["chain"](CONTEXT), params=params).lossless is True
    sampling = {params.described: params}
    whole = matrix(sampling=sampling)
    assert {cell.sampling for cell in whole} == {params.described}
    assert certify_exact(name, BIASES[name].make, whole, sampling=sampling).lossless is False


def test_p_values_of_honest_methods_are_not_absurd() -> None:
    """Contexts vary, so counts vary less than the test supposes: small p-values are rarer than promised, no more."""
    found = [
        statistical(build("draft-model", CONTEXT, {"num_draft_tokens": 2}), samples=500, seed=seed)
        for seed in range(16)
    ]
    p_values = [check.p_value for one in found for check in one.checks if check.p_value is not None]
    assert len(p_values) >= 32
    assert sum(p < 0.05 for p in p_values) <= 5
    assert max(p_values) - min(p_values) > 0.5, "p-values that do not vary mean nothing"
    assert sum(not one.lossless for one in found) <= 1, "one in a hundred is rejected by chance"


def test_the_bias_that_can_be_detected_shrinks_with_samples() -> None:
    few, many = (statistical(build("draft-model", CONTEXT), samples=samples) for samples in (400, 3600))
    assert few.detectable_bias is not None
    assert many.detectable_bias is not None
    assert many.detectable_bias < 0.6 * few.detectable_bias


def test_never_drafted_is_inconclusive_at_every_level() -> None:
    idle = Method("idle", Toy(lambda *_: None, CHAIN), rules()["recursive-rejection"](), Fixed(2))
    found = statistical(idle, samples=300)
    assert (found.lossless, found.level) == (None, "statistical")
    assert "drafted nothing" in found.verdict
    greedy = certify_greedy(idle, TARGET, ASKED[:2])
    assert (greedy.lossless, greedy.level) == (None, "greedy")
    assert "drafted nothing" in greedy.verdict
    assert statistical(build("none", CONTEXT), samples=300).lossless is True


# -------------------------------------------------------------------------------------------------- greedy level


class SecondBest(Greedy):
    """Now and then the runner-up. It does not claim to be lossless, so that it judges at temperature 0 as well."""

    lossless = False

    def accept(self, scores: Seq[TreeScores], states: Seq[Any], chances: Seq[Chance]) -> list[Verdict]:
        return [
            Verdict((), int(one.distribution.processed([ROOT])[0].topk(2).indices[1]))
            if len(one.sequence.tokens) % 5 == 0
            else verdict
            for one, verdict in zip(scores, super().accept(scores, states, chances), strict=True)
        ]


@pytest.fixture(scope="module")
def llamas() -> Context:
    target, draft = HFTarget(tiny_model("llama")), HFTarget(tiny_model("llama", seed=1))
    return with_drafts(target, draft)


def test_greedy_answers_are_identical_in_float32(llamas: Context) -> None:
    prompts = [[3, 4, 5, 3, 4], [9, 8, 7, 6, 5, 9, 8]]
    length = {"num_draft_tokens": 2}  # by measured costs a busy machine may draft nothing
    for name, settings in {"draft-model": {}, "rsd": {}, "sampled-tree": {}, "pld": length, "sam": length}.items():
        certificate = certify_greedy(build(name, llamas, settings), llamas.target, prompts, length=24)
        assert certificate.lossless is True, certificate
        assert certificate.first_difference is None
        assert certificate.p_value is certificate.max_abs_error is certificate.detectable_bias is None


def test_a_wrong_greedy_rule_is_a_bug_and_not_a_tie(llamas: Context) -> None:
    drafter = build("draft-model", llamas).drafter
    wrong = Method("wrong", drafter, SecondBest(), Fixed(2))
    certificate = certify_greedy(wrong, llamas.target, [[3, 4, 5], [9, 8, 7, 6]], length=12)
    assert certificate.lossless is False
    first = certificate.first_difference
    assert first is not None
    assert first["near_tie"] is False
    assert first["gap"] > 2 * first["noise"]
    assert first["position"] <= 5
    assert any(check.passed is False for check in certificate.checks)


class Rounding(TableTarget):
    """A target whose logits depend on how many rows are scored at once, as those of real ones do.

    Tokens 0 and 1 are ``apart``; scoring several rows at once moves them by ``noise``, in favour of token 1.
    """

    def __init__(self, apart: float, noise: float, dtype: str = "float32") -> None:
        super().__init__(4, self.logits)
        self.apart, self.noise, self.dtype = apart, noise, dtype

    def logits(self, path: Path) -> Tensor:
        return torch.tensor([5.0, 5.0 - self.apart, -3.0, -4.0])

    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        aux_hidden_state_layers: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        scores = super().score(batch, aux_hidden_state_layers, graph, resume)
        for part in scores.parts:
            if len(part.logits) > 1:
                part.logits[:, 1] += self.noise
        return scores


@pytest.mark.parametrize(
    ("apart", "noise", "dtype", "near"),
    [
        (5e-4, 0.0, "float32", True),  # within what float32 explains
        (0.01, 0.0, "float32", False),  # nothing explains it
        (0.01, 0.012, "float32", True),  # the target itself moves by more than this
        (1.0, 0.012, "float32", False),
        (0.2, 0.0, "bfloat16", True),
        (0.5, 0.0, "bfloat16", False),
        (0.5, 0.3, "bfloat16", True),
    ],
)
def test_a_near_tie_is_told_from_a_mistake(apart: float, noise: float, dtype: str, near: bool) -> None:
    target = Rounding(apart, noise, dtype)
    found = gap(target, [0, 1, 2], [0, 0, 0], (1, 0), SamplingParams(), ())
    assert found.size == pytest.approx(apart, abs=1e-5)
    assert found.noise == pytest.approx(noise, abs=1e-5)
    assert found.tolerance == near_tie_gap(dtype)
    assert found.near_tie is near


def test_the_gap_of_an_answer_that_ended_is_to_the_likeliest_end() -> None:
    target = Rounding(0.5, 0.0)
    found = gap(target, [0, 1, 2], [], (None, 0), SamplingParams(), (3, 2))
    assert found.size == pytest.approx(8.0), "end token 2 is likelier than 3"
    assert gap(target, [0, 1, 2], [], (None, 0), SamplingParams(), (1,)).size == pytest.approx(0.5)
    with_penalty = gap(target, [1], [0, 0], (1, 0), SamplingParams(presence_penalty=0.2), ())
    assert with_penalty.size == pytest.approx(0.3), "gaps are those of the processed logits"


def test_parting() -> None:
    assert parting([1, 2], [1, 2]) is None
    assert parting([1, 2], [1, 3]) == (1, 2, 3)
    assert parting([1], [1, 3]) == (1, None, 3)
    assert parting([1, 2], []) == (0, 1, None)


def test_answers_that_part_at_a_near_tie_are_still_lossless() -> None:
    grow = certain_tree(3, 2, nodes=3)
    for apart, noise, lossless in ((0.01, 0.02, True), (0.01, 0.0, True)):
        target = Rounding(apart, noise)
        method = Method("certain", Toy(grow, CERTAIN_TREE), rules()["recursive-rejection"](), Fixed(2))
        certificate = certify_greedy(method, target, [[0, 1, 2]], length=6)
        assert certificate.lossless is lossless
        assert (certificate.first_difference is not None) == (noise > 0)
        if certificate.first_difference is not None:
            assert certificate.first_difference["near_tie"] is True
            assert "near-tie" in certificate.verdict


# -------------------------------------------------------------------------------------------------- goodness of fit


def test_g_test_is_calibrated() -> None:
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(12))
    p_values = [g_test(rng.multinomial(1500, p), 1500 * p)[0] for _ in range(1500)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3
    for alpha in (0.01, 0.05, 0.2):
        found = float(np.mean(np.array(p_values) < alpha))
        assert abs(found - alpha) < 4 * math.sqrt(alpha * (1 - alpha) / 1500) + 0.1 * alpha


@pytest.mark.parametrize(("outcomes", "samples", "alpha"), [(2, 800, 0.05), (10, 2000, 0.01), (40, 4000, 0.001)])
def test_the_detectable_bias_is_detected_nine_times_in_ten(outcomes: int, samples: int, alpha: float) -> None:
    rng = np.random.default_rng(2)
    p = np.full(outcomes, 1 / outcomes)
    bias = detectable_bias(samples, outcomes - 1, alpha)
    assert bias is not None
    moved = p * (1 + 2 * bias * np.where(np.arange(outcomes) % 2, 1, -1))
    assert 0.5 * np.abs(moved - p).sum() == pytest.approx(bias)
    found = [g_test(rng.multinomial(samples, moved), samples * p)[0] < alpha for _ in range(800)]
    assert 0.86 < float(np.mean(found)) < 0.94


def test_detectable_bias_falls_with_the_root_of_samples() -> None:
    one, four = detectable_bias(1000, 9, 0.01), detectable_bias(4000, 9, 0.01)
    assert one is not None
    assert four is not None
    assert one / four == pytest.approx(2.0)
    assert detectable_bias(1000, 9, 0.001) > one  # type: ignore[operator]
    assert detectable_bias(1000, 0, 0.01) is None
    assert detectable_bias(0, 3, 0.01) is None
    assert detectable_bias(1, 3, 0.01) == 1.0


def test_rare_outcomes_are_pooled() -> None:
    _, freedom = g_test([90, 4, 3, 2, 1], [90, 4, 3, 2, 1])
    assert freedom == 1, "1 + 2 + 3 are six, 4 joins the last"
    assert g_test([100, 0], [98, 2]) == (1.0, 0)
    assert g_test([3, 1], [2, 2]) == (1.0, 0)
    assert g_test([50, 50], [50, 50]) == (1.0, 1)
    assert g_test([60, 40], [50, 50])[0] == pytest.approx(stats.chi2.sf(4.027, 1), abs=1e-3)
    observed, expected = [40, 60, 7, 3], [50.0, 50.0, 6.0, 4.0]
    flipped = g_test(observed[::-1], expected[::-1])
    assert g_test(observed, expected) == flipped, "the order of the outcomes says nothing"


def test_what_cannot_happen_and_did_is_a_certain_failure() -> None:
    assert g_test([99, 1], [100, 0])[0] == 0.0
    assert g_test([100, 0], [100, 0])[0] == 1.0


def test_holm() -> None:
    assert holm([0.2, 0.01, 0.5]) == pytest.approx(0.03)
    assert holm([0.6, 0.9]) == 1.0
    assert holm([0.04]) == pytest.approx(0.04)
    assert holm([]) == 1.0


def test_families_of_tests_are_wrong_no_more_than_alpha() -> None:
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.ones(6) * 3)
    wrong = [holm([g_test(rng.multinomial(4000, p), 4000 * p)[0] for _ in range(5)]) < 0.05 for _ in range(1000)]
    assert float(np.mean(wrong)) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


def test_aliases_are_certified_as_the_method_they_name() -> None:
    alias = find("draft-model").aliases[0]
    assert certify(alias, cells=1, seed=1).lossless is True


def test_a_bias_is_a_plain_value() -> None:
    assert Bias(Controls.MAKES["chain"]).where in SAMPLING
