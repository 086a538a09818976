"""outpace bench --quality: divergence, its intervals, and what a report shows of it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cli_support import Run, refused
from outpace.acceptance.base import AcceptanceRule, TopDown, TreeByTree, Verdict
from outpace.acceptance.registry import find_rule
from outpace.acceptance.rejection import RecursiveRejection
from outpace.acceptance.rule_text import rule_from
from outpace.bench.bench_report import BenchReport
from outpace.bench.page import render
from outpace.bench.quality import realised_tv
from outpace.bench.quality.edit_distance import edit_distance
from outpace.bench.quality.frontier import on_frontier
from outpace.bench.quality.likelihood import likelihood
from outpace.bench.quality.measured_nodes import NODES, MeasuredNodes
from outpace.bench.quality.prompt_quality import PromptQuality, QualityMeter
from outpace.bench.quality.quality_row import EMPTY, quality_row
from outpace.bench.quality.realised_tv import Variation, variation
from outpace.bench.records import Answer
from outpace.bench.runner import run
from outpace.bench.statistics import (
    difference_interval,
    paired_share_interval,
    share_interval,
    smallest_share_difference,
)
from outpace.constraints import Grammar
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.metrics import RequestMetrics
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import Draw, TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.engine.method import Method
from outpace.engine.request import RoundTrace
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.task import CodeTests, ExactAnswer
from outpace.targets.base import TreeScores
from test_bench_report import Page, printed
from test_bench_runner import PROMPTS, SHORT, VOCAB, Lossy, make, method, table_of

T1 = SamplingParams(temperature=1.0)


class Lenient(TopDown):
    """Accepts what has at least ``least`` of probability, and the rest by rejection sampling."""

    name = "test-lenient"
    paper = "-"
    lossless = False
    takes_without_replacement = True
    least = 0.05

    def choose(self, tree: TokenTree, draws: Seq[Draw], p: TokenDistribution, chance: Chance) -> Draw | int:
        for draw in draws:
            if p[draw.token] >= self.least:
                return draw
        return RecursiveRejection().choose(tree, draws, p, chance)


class Sampler(Drafter[DraftState]):
    """Drafts chains from a flattened version of the target."""

    def __init__(self, table: object) -> None:
        self.table = table

    def begin(self, sequence: object) -> DraftState:
        return DraftState(sequence)  # type: ignore[arg-type]

    def propose_batch(self, states: Seq[DraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        return [TokenTree.chain([3] * budget.depth, [QRow(torch.ones(VOCAB))] * budget.depth) for budget in budgets]


def measured(model: Model, context: tuple[int, ...], rounds: list[RoundTrace], rule: AcceptanceRule) -> Variation:
    nodes = MeasuredNodes(0)
    nodes.follow(rounds)
    return variation(model.target, context, rounds, rule, T1, nodes.places)


def probs(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1)


@pytest.mark.parametrize("length", [1, 5, 150])
def test_the_likelihood_is_that_of_every_token_after_those_before(length: int) -> None:
    model = make()
    numbers = random.Random(1)
    context, answer = (1, 2, 3), tuple(numbers.randrange(1, VOCAB) for _ in range(length))
    for params in (SamplingParams(), SamplingParams(temperature=0.7, top_k=2), SamplingParams(repetition_penalty=1.3)):
        expected, others = 0.0, 0
        for place, token in enumerate(answer):
            row = table_of(model).table((*context, *answer[:place])).double().clone()
            if params.repetition_penalty != 1.0:
                for seen in {*context, *answer[:place]}:
                    row[seen] = row[seen] / 1.3 if row[seen] > 0 else row[seen] * 1.3
            expected -= float((row / (params.temperature or 1.0)).log_softmax(-1)[token])
            others += int(row.argmax()) != token
        found = likelihood(model.target, context, answer, params)
        assert found.nll == pytest.approx(expected, rel=1e-5)
        assert (found.tokens, found.not_first) == (length, others)
    assert likelihood(model.target, context, (), SamplingParams()).tokens == 0


def committed(p: Tensor, q: Tensor, least: float) -> Tensor:
    """What Lenient commits after a node where a draft token is drawn from q."""
    residual = (p - q).clamp(min=0)
    residual = residual / residual.sum() if float(residual.sum()) > 0 else p
    accepted = torch.where(p >= least, torch.ones_like(p), (p / q).clamp(max=1.0).nan_to_num(0.0))
    return q * accepted + float((q * (1 - accepted)).sum()) * residual


def test_the_total_variation_is_that_of_all_draws_and_outcomes() -> None:
    model = make()
    table, context = table_of(model).table, (1, 2, 3)
    generator = torch.Generator().manual_seed(4)
    q_rows = [torch.rand(VOCAB, generator=generator).double() for _ in range(2)]
    q_rows = [row / row.sum() for row in q_rows]
    tree = TokenTree.chain([5, 6], [QRow(row) for row in q_rows])
    rounds = [RoundTrace(tree, (0, 1), (5, 6, 7)), RoundTrace(TokenTree(), (), (8,))]
    expected = 0.0
    for place, q in enumerate(q_rows):
        p = probs(table((*context, 5, 6)[: 3 + place]))
        expected += float((committed(p, q, Lenient.least) - p).abs().sum()) / 2
    found = measured(model, context, rounds, Lenient())
    assert found.nodes == 4  # the bonus token and the step without a draft are the target's own
    assert found.total == pytest.approx(expected, abs=2e-2)  # 0.99 of q is replaced
    exact = measured(model, context, rounds, RecursiveRejection())
    assert exact.total == pytest.approx(0.0, abs=2e-2)


def test_deterministic_draft_tokens_and_siblings_have_a_closed_form() -> None:
    model = make()
    tree = TokenTree()
    first = tree.add(-1, 5)
    tree.add(-1, 6)
    tree.add(first, 7)
    rounds = [RoundTrace(tree, (0, 2), (5, 7, 9))]
    found = measured(model, (1, 2, 3), rounds, Lenient())
    expected = 0.0
    for before, tokens in (((1, 2, 3), (5, 6)), ((1, 2, 3, 5), (7,))):
        p = probs(table_of(model).table(before))
        out = p.clone()
        taken = next((token for token in tokens if float(p[token]) >= Lenient.least), None)
        if taken is not None:
            out = torch.zeros_like(p)
            out[taken] = 1.0
        expected += float((out - p).abs().sum()) / 2
    assert found.nodes == 3
    assert found.total == pytest.approx(expected, abs=1e-6)
    assert measured(model, (1, 2, 3), rounds, RecursiveRejection()).total == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "top-beta(tau=3,beta=8)",
        "top-beta(criterion=top-k,beta=5)",
        "margin(theta=0)",
        "grouped(size=3,ratio=0)",
        "grouped(size=10,ratio=0.2)",
        "typical(epsilon=0.05,delta=0.3)",
        "typical(epsilon=0.05,delta=0.3,greedy_first=false)",
        "cactus(delta=0.3)",
        "importance(relax=0.5,key=1)",
        "top-beta(tau=0)",
    ],
)
def test_closed_forms_are_those_of_all_draws_and_outcomes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rule = make(), rule_from(text)
    monkeypatch.setattr(realised_tv, "COVERED", 1.0 - 1e-9)
    generator = torch.Generator().manual_seed(4)
    q = torch.rand(VOCAB, generator=generator).double() ** 3
    q[table_of(model).table((1, 2, 3)).topk(2).indices] += (
        3.0  # more than the target has, so that something is forgiven
    )
    sampled, moved = TokenTree.chain([5, 6], [QRow(q / q.sum())] * 2), 0.0
    for tree in (sampled, TokenTree.chain([5, 6])):
        rounds = [RoundTrace(tree, (0, 1), (5, 6, 7))]
        found = measured(model, (1, 2, 3), rounds, rule)
        with monkeypatch.context() as patched:
            patched.setattr(realised_tv, "closed_form", lambda *_: None)
            enumerated = measured(model, (1, 2, 3), rounds, rule)
        assert (found.nodes, enumerated.nodes) == (3, 3)
        assert found.total == pytest.approx(enumerated.total, abs=1e-5)
        moved += found.total
    assert (moved < 1e-5) == rule.exact


class Peeking(Lenient):
    """Decides with a token that it has drawn, which has no closed form."""

    name = "test-peeking"
    paper = "-"

    def choose(self, tree: TokenTree, draws: Seq[Draw], p: TokenDistribution, chance: Chance) -> Draw | int:
        token = chance.categorical(p)
        return next((draw for draw in draws if draw.token == token or chance.bernoulli(0.1)), token)


class Whole(TreeByTree):
    """Decides on the whole tree."""

    name = "test-whole"
    paper = "-"
    lossless = False

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        return Verdict((), chance.categorical(scores.distribution.at(-1)))


def test_every_token_is_measured_equally_often_and_other_trees_are_dropped() -> None:
    counts = Counter[tuple[int, int]]()
    for seed in range(2000):
        rounds: list[RoundTrace] = []
        nodes = MeasuredNodes(seed)
        for length in (1, 3, 1, 2, 1):
            rounds.append(RoundTrace(TokenTree.chain([5] * length), tuple(range(length - 1)), (5,) * length))
            nodes.follow(rounds)
        counts.update(nodes.places)
        assert {at for at, one in enumerate(rounds) if len(one.tree)} == {at for at, _ in nodes.places}
        assert [len(one.committed) for one in rounds] == [1, 3, 1, 2, 1]
    assert len(counts) == 8
    assert all(abs(count / 2000 - NODES / 8) < 0.06 for count in counts.values())


def test_a_rule_without_a_closed_form_has_no_total_variation() -> None:
    model = make()
    rounds = [RoundTrace(TokenTree.chain([5]), (0,), (5, 6))]
    assert measured(model, (1, 2), rounds, Peeking()).nodes <= 1
    settings = replace(SHORT, quality=True, params=T1)
    found = run(model, [method(model, "odd", rule=Whole())], PROMPTS, settings)
    assert found["methods"][1]["quality"]["tv"] is None
    assert any("tv is null: odd" in note for note in BenchReport(found).report().notes)


def test_target_first_has_a_total_variation_given_its_drafts() -> None:
    model = make()
    chosen = method(model, "chosen", rule=find_rule("target-first", {"candidates": 4}))
    found = run(model, [chosen], PROMPTS, replace(SHORT, quality=True, params=T1))
    assert 0.0 < found["methods"][1]["quality"]["tv"] < 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_have_their_quality(temperature: float) -> None:
    model = make()
    params = SamplingParams(temperature=temperature)
    methods = [method(model, "oracle"), method(model, "lenient", rule=Lenient()), method(model, "wrong", rule=Lossy())]
    found = run(model, methods, PROMPTS, replace(SHORT, quality=True, params=params))
    json.dumps(found, allow_nan=False)
    rows = {row["method"]: row["quality"] for row in found["methods"]}
    for quality in rows.values():
        assert list(quality)[:5] == ["excess_nll", "tv", "score", "score_ci95", "of"]
        assert set(quality) == set(EMPTY)
        assert quality["score"] is quality["of"] is None
    assert (rows["none"]["excess_nll"], rows["none"]["tv"]) == (0.0, 0.0)
    assert rows["oracle"]["tv"] == 0.0
    if temperature:
        assert rows["lenient"]["tv"] > 0.01
        assert rows["lenient"]["edit_distance"] is None
    else:
        assert rows["oracle"]["excess_nll"] == rows["oracle"]["edit_distance"] == 0.0
        assert rows["wrong"]["excess_nll"] > 0.01
        assert 0.0 < rows["wrong"]["tv"] < 0.5
        assert 0.0 < rows["wrong"]["edit_distance"] < 1.0
        low, high = rows["wrong"]["excess_nll_ci95"]
        assert low < rows["wrong"]["excess_nll"] < high
    told = found["per_prompt"][0]["quality"]["lenient"]
    assert told["tokens"] == found["per_prompt"][0]["tokens"]["lenient"]
    assert "quality" not in run(model, methods[:1], PROMPTS, SHORT)["methods"][0]


def test_near_ties_count_for_lossy_rules_alone() -> None:
    near = PromptQuality(tokens=10, nll=1.0, not_first=1, near_ties=2)
    rows = {lossless: quality_row({"a": near}, {}, lossless=lossless, greedy=True) for lossless in (True, False)}
    assert (rows[True]["tv"], rows[False]["tv"]) == (0.1, 0.3)
    assert rows[True]["near_ties"] == rows[False]["near_ties"] == 0.2
    assert quality_row({"a": near}, {}, lossless=False, greedy=False)["near_ties"] is None


def test_nothing_is_said_where_the_variation_of_some_nodes_cannot_be_had() -> None:
    """Leaves and last tokens are exact whatever the rule is: without the others they would say that nothing is lost."""
    known = PromptQuality(tokens=10, tv=0.4, tv_nodes=4)
    lost = PromptQuality(tokens=10, tv=0.0, tv_nodes=2, tv_lost=2)
    assert quality_row({"a": known}, {}, lossless=False, greedy=False)["tv"] == pytest.approx(0.1)
    assert quality_row({"a": known, "b": lost}, {}, lossless=False, greedy=False)["tv"] is None


def test_the_variation_of_a_long_answer_counts_for_all_of_its_tokens() -> None:
    """As many nodes are measured of each answer."""
    short, long = PromptQuality(tokens=10, tv=2.0, tv_nodes=4), PromptQuality(tokens=90, tv=0.4, tv_nodes=4)
    found = quality_row({"a": short, "b": long}, {}, lossless=False, greedy=False)
    assert found["tv"] == pytest.approx((10 * 0.5 + 90 * 0.1) / 100)
    low, high = found["tv_ci95"]
    assert low < found["tv"] < high
    assert quality_row({"a": short}, {}, lossless=True, greedy=False)["tv"] == 0.0


def test_tokens_within_rounding_of_the_first_are_near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    row = table_of(model).table((1, 2))
    best, second = row.topk(2).indices.tolist()
    plain = likelihood(model.target, (1, 2), (second,), SamplingParams())
    assert (plain.not_first, plain.near_ties) == (1, 0)
    monkeypatch.setattr(type(model.target), "batch_invariant", False)
    gap = float(row[best] - row[second])
    for tolerance, found in ((2 * gap, (0, 1)), (gap / 2, (1, 0))):
        monkeypatch.setattr("outpace.bench.quality.likelihood.near_tie_gap", lambda _, most=tolerance: most)
        told = likelihood(model.target, (1, 2), (second,), SamplingParams())
        assert (told.not_first, told.near_ties) == found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_a_part_of_the_target(temperature: float) -> None:
    model = make()
    grammar = Grammar.choice([model.tokenizer.decode(tokens) for tokens in ((5, 3, 4), (4, 3, 6))])
    params = SamplingParams(temperature=temperature)
    methods = [method(model, "oracle"), method(model, "lenient", rule=Lenient())]
    found = run(model, methods, PROMPTS, replace(SHORT, quality=True, params=params, grammar=grammar))
    rows = {row["method"]: row["quality"] for row in found["methods"]}
    assert rows["none"]["tv"] == rows["oracle"]["tv"] == 0.0
    if not temperature:  # both choices begin with what nothing else may begin with: two tokens at most have a choice
        assert rows["none"]["nll"] < math.log(2)


def test_answers_are_scored_and_what_cannot_be_is_said() -> None:
    model = make()
    said = model.tokenizer.decode(run_once(model, PROMPTS[1]))
    prompts = [
        replace(PROMPTS[1], id="right", task=ExactAnswer((said.splitlines()[-1],))),
        replace(PROMPTS[1], id="wrong", task=ExactAnswer(("something else",))),
        replace(PROMPTS[1], id="empty", task=ExactAnswer(("17",))),
        replace(PROMPTS[1], id="code", task=CodeTests("f", "def check(f): pass", "def f():\n")),
        PROMPTS[2],
    ]
    found = run(model, [method(model, "wrong", rule=Lossy())], prompts, replace(SHORT, quality=True))
    plain, row = (one["quality"] for one in found["methods"])
    scored = plain["of"]
    assert scored in (3, 4)  # four where programs can be confined
    assert plain["score"] == 1 / scored
    assert plain["unanswered"] == scored - 2
    assert plain["score_difference"] is None
    assert row["score"] == 0.0
    assert row["score_difference"] == -1 / scored
    assert row["score_difference_ci95"][0] < row["score_difference"] < row["score_difference_ci95"][1]
    assert 0 < row["smallest_difference"] <= 1
    notes = BenchReport(found).report().notes
    assert any(f"Scores count the {scored} of 5 prompts" in note for note in notes)
    assert any("gave no final answer or program; they count as wrong" in note for note in notes)
    assert any("reached the limit on new tokens" in note for note in notes)
    assert any("show a difference in score only from about" in note for note in notes)


def run_once(model: object, prompt: Prompt) -> tuple[int, ...]:
    from outpace.bench.records import answer_together
    from outpace.engine.request import Request

    made = make()
    [answer] = answer_together(
        made.target,
        [
            Request(
                tuple(made.tokenizer.chat(prompt.messages)), made.method("none"), max_new_tokens=SHORT.max_new_tokens
            )
        ],
    )
    return answer.tokens


def test_a_rule_that_fails_while_it_is_measured_costs_only_its_own_row() -> None:
    class Breaks(Lenient):
        name = "test-breaks"
        calls = 0

        def accept(self, scores: Seq[TreeScores], states: Seq[object], chances: Seq[Chance]) -> list[Verdict]:
            if not hasattr(chances[0], "_drawn"):  # not a seeded stream
                raise RuntimeError("no such chance")
            return super().accept(scores, states, chances)

    model = make()
    found = run(model, [method(model, "breaks", rule=Breaks())], PROMPTS, replace(SHORT, quality=True, params=T1))
    assert "no such chance" in found["methods"][1]["error"]
    assert found["methods"][0]["prompts"] == 5


def test_the_report_shows_the_frontier_and_the_table() -> None:
    model = make()
    methods = [method(model, "oracle"), method(model, "lenient", rule=Lenient()), method(model, "wrong", rule=Lossy())]
    found = run(model, methods, PROMPTS, replace(SHORT, quality=True))
    text = printed(found, 120)
    for word in ("Quality", "excess NLL", "edits", "TV"):
        assert word in text
    assert "smallest" not in text  # nothing was scored
    page = Page(render(BenchReport(found).report()))
    assert "Speed against excess NLL" in page.text
    assert "Speed against total variation" in page.text
    assert "No prompt can be scored, so score is null" in page.text
    lossless = run(model, methods[:1], PROMPTS, replace(SHORT, quality=True))
    assert "Speed against" not in render(BenchReport(lossless).report())
    failed = run(
        model, [method(model, "bad", error=RuntimeError("x"), fail_at=3)], PROMPTS, replace(SHORT, quality=True)
    )
    assert "failed" in printed(failed, 120)
    stopped = run(
        model, [method(model, "bad", error=KeyboardInterrupt(), fail_at=3)], PROMPTS, replace(SHORT, quality=True)
    )
    assert stopped["methods"][0]["quality"]["excess_nll"] is None
    render(BenchReport(stopped).report())
    printed(stopped, 120)


def test_the_frontier_holds_what_nothing_dominates() -> None:
    points = [(0.0, 1.0), (0.1, 1.5), (0.2, 1.4), (-0.1, 1.6), (0.1, 1.5)]
    assert on_frontier(points, [False] * 5) == [True, False, False, True, False]
    assert on_frontier([(0.1, 1.5), (0.1, 1.5)], [False] * 2) == [True, True]
    assert on_frontier([], []) == []


def test_what_is_slower_than_autoregressive_decoding_is_on_no_frontier() -> None:
    assert on_frontier([(0.001, 0.9), (0.3, 1.01)], [False] * 2) == [False, True]


def test_samples_of_a_lossless_row_do_not_diverge() -> None:
    """Whatever their likelihood has come to: a careful lossy row that is slower does not stand beside it."""
    assert on_frontier([(-0.12, 1.2), (0.01, 1.15)], [True, False]) == [True, False]
    assert on_frontier([(-0.12, 1.2), (0.01, 1.15)], [False, False]) == [True, True]


def table_distance(one: Seq[int], other: Seq[int]) -> int:
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def test_the_edit_distance_is_that_of_the_table() -> None:
    numbers = random.Random(3)
    for _ in range(300):
        one, other = ([numbers.randrange(4) for _ in range(numbers.randrange(90))] for _ in range(2))
        assert edit_distance(one, other) == table_distance(one, other)


def test_intervals_of_shares() -> None:
    assert share_interval(0, 0) is None
    low, high = share_interval(8, 10) or (0.0, 0.0)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)  # Wilson's, as R's prop.test without correction gives it
    low, high = paired_share_interval(0, 0, 82) or (0.0, 0.0)
    assert low == -high
    assert 0.01 < high < 0.05  # agreement on 82 answers does not show equality
    low, high = paired_share_interval(10, 2, 82) or (0.0, 0.0)
    assert low < 8 / 82 < high
    assert low > 0
    few, many = smallest_share_difference(2, 2, 82), smallest_share_difference(10, 10, 82)
    assert few is not None
    assert many is not None
    assert 0 < few < many < 1
    assert smallest_share_difference(0, 0, 0) is None
    assert smallest_share_difference(0, 0, 2) == 1.0  # nothing would show


@pytest.mark.parametrize(("of", "differ"), [(10, 0), (20, 0), (82, 0), (82, 20), (200, 0), (200, 40)])
def test_the_smallest_difference_that_is_stated_would_be_seen(of: int, differ: int) -> None:
    """Four samples in five of so many answers show a difference of that size, also where hardly any answer differed."""
    stated = smallest_share_difference(differ // 2, differ // 2, of) or 0.0
    numbers = random.Random(7)
    more = max(0.0, differ / of - stated) / 2  # that differ either way
    seen = 0
    for _ in range(2000):
        drawn = [numbers.random() for _ in range(of)]
        lost, gained = sum(one < stated + more for one in drawn), sum(one > 1.0 - more for one in drawn)
        _, high = paired_share_interval(gained, lost, of) or (0.0, 0.0)
        seen += high < 0.0
    assert 0.75 < seen / 2000 < 0.97


def test_the_interval_of_a_difference_is_paired() -> None:
    numbers = random.Random(5)
    plain = [(numbers.uniform(10, 100), 20.0) for _ in range(40)]
    above = [(total + 2.0 + numbers.uniform(-0.1, 0.1), count) for total, count in plain]
    low, high = difference_interval(above, plain) or (0.0, 0.0)
    assert low < 0.1 < high
    assert high - low < 0.01  # unpaired, the prompts' own spread would be a hundred times as wide
    assert difference_interval(plain[:1], plain[:1]) is None
    assert math.isclose(difference_interval(plain, plain, resamples=100)[0], 0.0)  # type: ignore[index]


def test_the_command_line_measures_quality(cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "abc", "answer": "7"}\n{"prompt": "abd"}\n')
    ran = cli("bench", "--prompts", str(file), "-n", "6", "--methods", "pld", "--quality", "--json", "-")
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["methods"]
    assert [row["quality"]["of"] for row in rows] == [1, 1]
    assert rows[1]["quality"]["excess_nll"] == pytest.approx(0.0, abs=1e-6)
    file.write_text('{"prompt": "abc", "entry_point": "f", "test": "def check(f:"}\n')
    refused(cli("bench", "--prompts", str(file), "--quality"), "'test' cannot be run")
    file.write_text('{"prompt": "abc", "entry_point": "f"}\n')
    refused(cli("bench", "--prompts", str(file), "--quality"), "line 1: 'test' must be text")


def test_sampled_drafts_are_measured_in_a_bench() -> None:
    model = make()
    drafts = Method("sampled", Sampler(None), Lenient(), Fixed(2))
    found = run(model, [drafts], PROMPTS[:2], replace(SHORT, quality=True, params=T1))
    assert found["methods"][1]["error"] is None
    assert 0.0 < found["methods"][1]["quality"]["tv"] < 1.0


def test_a_prompt_is_read_once_for_all_answers_and_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = make(), SamplingParams(temperature=1.0)
    read, calls = list[int](), Counter[str]()

    def watch(name: str) -> None:
        what = getattr(model.target, name)

        def called(*given: Any, **more: Any) -> Any:
            calls[name] += 1
            if name == "prefill":
                read.extend(len(one.tokens) - 1 - model.target.length(one.kv) for one in given[0])
            return what(*given, **more)

        monkeypatch.setattr(model.target, name, called)

    for name in ("open", "fork", "close", "prefill"):
        watch(name)
    meter = QualityMeter(model, params, lambda _: params)
    with meter:
        for tokens in ((5, 6, 7), (6, 6), (7, 5, 5)):
            found = meter._likelihood(Answer((1, 2, 3, 4), tokens, RequestMetrics(), 0.0), params)
            assert found == likelihood(model.target, (1, 2, 3, 4), tokens, params)
    assert read.count(3) == 1 + 3, "once for the meter, and once for each of the comparisons"
    assert calls["close"] == calls["open"] + calls["fork"] == 7
