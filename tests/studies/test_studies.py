"""Studies: verdicts follow from intervals, formulas from sums by hand, and the real studies run on smollm2."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from cli_support import Run, refused, toy
from outpace.bench.records import Answer
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.tree import TokenTree
from outpace.engine.request import RoundTrace
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.simulate.edge_cloud import Configuration, Device, EdgeCloud, Figures, Link, best, pareto
from outpace.simulate.hardware import PRESETS
from outpace.simulate.model_shape import SHAPES
from outpace.simulate.roofline import Roofline, RooflineCosts, Work
from outpace.studies.accdyn import explained, judged
from outpace.studies.claims import above, by_formula, holds, interval, resampled, resampled_groups, resampled_within
from outpace.studies.configspec import _Loaded
from outpace.studies.decoded import decode
from outpace.studies.draft_candidates import candidates
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import StudyContext, find_study, read_settings, run_study, studies
from outpace.studies.study_report import StudyReport
from outpace.traces.trace_format import Rounds, TracedRequest, TraceHeader
from outpace.traces.trace_writer import write_trace


def no_model(name: str, dtype: str | None) -> Model:
    raise AssertionError("this study needs no model")


def ran(name: str, about: StudyContext, **settings: Any) -> StudyReport:
    one = find_study(name)
    return run_study(one, about, read_settings(one, settings))


def test_verdicts_follow_from_the_interval() -> None:
    samples = np.linspace(1.0, 2.0, 1001)
    assert above("", 1.5, samples, 0.9).verdict == "confirmed"
    assert above("", 1.5, samples, 2.1).verdict == "refuted"
    assert above("", 1.5, samples, 1.5).verdict == "undecided"
    same = np.full(1001, 1.0)  # prompts without any difference: the interval has no width
    assert [above("", 1.0, same, threshold).verdict for threshold in (0.9, 1.0, 1.1)] == [
        "confirmed",
        "undecided",
        "refuted",
    ]
    touching = np.minimum(samples, 1.5)
    assert above("", 1.4, touching, 1.5).verdict == "undecided"
    assert above("", 1.6, np.maximum(samples, 1.5), 1.5).verdict == "undecided"
    shares = [holds("", np.arange(1000) < count).verdict for count in (1000, 980, 500, 20, 0)]
    assert shares == ["confirmed", "confirmed", "undecided", "refuted", "refuted"]
    assert [by_formula("", 1.0, 0.5).verdict, by_formula("", 1.0, 0.5, below=True).verdict] == ["confirmed", "refuted"]
    assert resampled(7).sum(axis=1) == pytest.approx(7)
    assert resampled(8).var(axis=0) == pytest.approx(8 / 5 * 7 / 8, rel=0.1), "five of eight are drawn"
    within = resampled_within(["a", "b", "a", "b", "b"])
    assert within[:, [0, 2]].sum(axis=1) == pytest.approx(2)
    assert within[:, [1, 3, 4]].sum(axis=1) == pytest.approx(3)


def test_one_prompt_gives_no_interval_and_no_verdict() -> None:
    one = resampled(1)
    assert interval(one @ np.array([3.0])) == (None, None)
    claim = above("", 3.0, one @ np.array([3.0]), 1.0)
    assert (claim.found, claim.interval, claim.verdict) == (3.0, None, "undecided")
    assert "too few prompts" in claim.test
    assert holds("", np.array([True])).verdict == holds("", np.array([False])).verdict == "undecided"
    assert resampled_within(["a", "b"]).tolist() == [[1.0, 1.0]]
    assert len(resampled_within(["a", "b", "b"])) == len(resampled(2)) > 100
    low, high = interval(resampled(2) @ np.array([1.0, 2.0]))
    assert low is not None and high is not None and low < high


def test_prompts_that_were_answered_together_are_drawn_together() -> None:
    drawn = resampled_groups([0, 0, 0, 1, 1, 2])
    assert (drawn[:, 0] == drawn[:, 2]).all()
    assert (drawn[:, 3] == drawn[:, 4]).all()
    assert drawn[:, [0, 3, 5]].sum(axis=1) == pytest.approx(3)
    figures = np.array([1.0, 1.0, 1.0, 2.0, 2.0, 3.0])
    wide, narrow = interval(drawn @ figures / drawn.sum(axis=1)), interval(resampled(6) @ figures / 6)
    assert wide[0] is not None and narrow[0] is not None and wide[0] <= narrow[0]
    assert resampled_groups([0, 0, 0]).tolist() == [[1.0, 1.0, 1.0]]
    assert interval(resampled_groups([0, 0, 0]) @ figures[:3]) == (None, None)


def test_every_study_has_a_paper_and_settings_that_are_described() -> None:
    names = [one.name for one in studies()]
    assert {"illusion", "rules", "moesd", "accdyn", "configspec", "context", "se", "sdsl"} <= set(names)
    for one in studies():
        assert "arXiv" in one.paper
        assert all(field.description for field in one.settings.model_fields.values())


def test_what_no_study_takes_is_refused(cli: Run) -> None:
    refused(cli("study", "moesdx"), "unknown study 'moesdx'", "moesd")
    refused(cli("study", "moesd", "--setting", "x=1"), "setting 'x'", "batches")
    refused(cli("study", "moesd", "--setting", "rate=2"), "setting 'rate'")
    refused(cli("study", "moesd", "--setting", "rate"), "KEY=VALUE")
    refused(cli("study", "moesd", "--setting", "hardware=h1000"), "unknown hardware", "raspberry-pi-5")
    refused(cli("study", "moesd", "--setting", "mixture=qwen2.5-7b"), "dense model")
    refused(cli("study", "moesd", "--json", "/nowhere/out.json"), "there is no folder")
    refused(cli("study", "configspec", "--setting", "device=apple-m1-max"), "no power is stated")
    refused(cli("study", "configspec", "--setting", "device=measured"), "the power of this machine", "watts=NUMBER")
    refused(cli("study", "configspec", "--setting", "cloud=measured", "--setting", "tensor_parallel=2"), "alone")
    refused(cli("study", "configspec", "--setting", "cloud=l5"), "unknown hardware", "'measured' for this machine")
    refused(cli("study", "configspec", "--setting", "drafts=smollm2:int7"), "not 'int7'")
    refused(cli("study", "illusion", "--setting", "methods=plx"), "unknown method 'plx'")
    listed = cli("study")
    assert listed.code == 0
    assert "moesd" in listed.out
    assert "batches" in cli("study", "moesd", "--settings").out
    refused(cli("study", "moesd", "--setting", "x=1"), "there is no such name")


def test_settings_are_told_as_json_where_the_caller_wants_them(cli: Run, tmp_path: Path) -> None:
    where = tmp_path / "settings.json"
    told = cli("study", "moesd", "--settings", "--json", str(where))
    assert (told.code, told.out) == (0, "")
    assert json.loads(where.read_text())["properties"]["batches"]["type"] == "array"
    assert json.loads(cli("study", "moesd", "--settings", "--json", "-").out) == json.loads(where.read_text())
    refused(cli("study", "moesd", "--settings", "--json", "/nowhere/out.json"), "there is no folder")


def test_a_study_writes_table_json_and_plot(cli: Run, tmp_path: Path) -> None:
    out, plot = tmp_path / "m.json", tmp_path / "m.svg"
    common = ["study", "moesd", "--setting", "tiny=false", "--setting", "batches=1,8,64,512", "--setting", "lengths=3"]
    found = cli(*common, "--json", str(out), "--plot", str(plot))
    assert found.code == 0, found.err
    result = json.loads(out.read_text())
    assert [row["batch"] for row in result["rows"]] == [1, 8, 64, 512]
    assert {claim["verdict"] for claim in result["claims"]} <= {"confirmed", "refuted", "undecided"}
    assert ElementTree.fromstring(plot.read_text()).tag.endswith("svg")
    assert "target efficiency" in found.out


def test_moesd_by_formula() -> None:
    report = ran("moesd", StudyContext("none", [], no_model), tiny=False, batches=[1, 32, 512], lengths=[3])
    row = report.rows[1]
    assert row["experts_alone"] == pytest.approx(64 * (1 - (1 - 8 / 64) ** 32))
    assert row["experts_drafting"] == pytest.approx(64 * (1 - (1 - 8 / 64) ** 128))
    assert report.rows[0]["efficiency"] < row["efficiency"]  # alone, each draft token reads experts of its own
    gain = 1 + 0.8 + 0.8**2 + 0.8**3
    assert row["speedup"] == pytest.approx(gain * row["efficiency"])


def answer(*rounds: tuple[TokenTree, tuple[int, ...]]) -> Answer:
    traced = [RoundTrace(tree, path, ()) for tree, path in rounds]
    return Answer((1,), (), RequestMetrics(), 0.0, rounds=traced)


@pytest.mark.parametrize("count", [5, 8, 14])
def test_intervals_of_few_prompts_have_the_truth_about_as_often_as_they_say(count: int) -> None:
    rng = np.random.default_rng(count)
    held = 0
    for seed in range(300):
        figures = rng.normal(size=count)
        low, high = interval(resampled(count, seed) @ figures / count)
        assert low is not None and high is not None
        held += low <= 0.0 <= high
    assert held / 300 > 0.9


def test_draft_tokens_are_judged_where_all_before_them_were_accepted() -> None:
    chain = TokenTree.chain([1, 2, 3])
    assert judged(answer((chain, (0,)), (chain, ())), 3).tolist() == [[1, 1], [1, 0], [0, 0]]
    tree = TokenTree()
    first, _ = tree.add(-1, 1), tree.add(-1, 2)
    tree.add(first, 3)
    assert judged(answer((tree, (first,))), 2).tolist() == [[0, 1], [1, 0]], "of two siblings one was accepted"
    assert judged(answer((tree, ())), 2).tolist() == [[1, 0], [0, 0]]


def test_a_method_that_drafts_nothing_is_refused(cli: Run) -> None:
    common = ("study", "accdyn", "--limit", "2", "--setting", "max_new_tokens=4")
    refused(cli(*common, "--setting", "method=none"), "method 'none' drafted nothing for these prompts")


def toys() -> tuple[StudyContext, list[str]]:
    """A study of a model without a network, and the models that it has loaded."""
    loaded: list[str] = []

    def load(name: str, dtype: str | None) -> Model:
        loaded.append(name)
        return toy(name)

    return StudyContext("toy", load_prompts(limit=2), load), loaded


def test_accdyn_takes_a_draft_model() -> None:
    about, loaded = toys()
    found = ran("accdyn", about, method="draft-model", draft_model="small", max_new_tokens=8)
    assert loaded == ["toy", "small"]
    assert all(row["depth_1"] == 1.0 for row in found.rows), "the same letters, all of them accepted"


def test_rules_judge_the_rounds_of_the_answers_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up answers judged by the same rules would count twice."""
    judged_rounds: list[tuple[int, int]] = []

    def spied(model: Model, methods: Any, prompts: Any, **about: Any) -> Any:
        found = decode(model, methods, prompts, **about)
        for name, method in methods.items():
            drafted = sum(count.drafted > 0 for one in found.answers[name] for count in one.counts)
            judged = sum(len(each) for one in method.rule.found.values() for each in list(one.values())[:1])
            judged_rounds.append((judged, drafted))
        return found

    monkeypatch.setattr("outpace.studies.rules.decode", spied)
    about, loaded = toys()
    ran("rules", about, draft_model="small", max_new_tokens=6, times=1)
    assert loaded == ["toy", "small"]
    assert len(judged_rounds) == 2 and all(judged == drafted > 0 for judged, drafted in judged_rounds)


def test_the_deviance_goes_to_what_decides() -> None:
    """Two prompts of two tasks: one accepts everything, the other nothing; then two depths in place of the tasks."""
    member, whole = np.eye(2), np.ones((1, 2))
    by_task = np.array([[[0.0, 10.0]] * 2, [[10.0, 0.0]] * 2])
    assert [float(one[0]) for one in explained(whole, by_task, member)] == pytest.approx([0.0, 1.0])
    by_depth = np.array([[[0.0, 10.0], [10.0, 0.0]]] * 2)
    assert [float(one[0]) for one in explained(whole, by_depth, member)] == pytest.approx([1.0, 0.0])


def test_the_pareto_front_is_what_nothing_dominates() -> None:
    points = [Figures(10, 2, 5), Figures(9, 1, 6), Figures(10, 2, 6), Figures(1, 9, 1), Figures(10, 2, 5)]
    assert pareto(points) == [True, True, False, True, True]
    named = [(Configuration("d", 16, at), one) for at, one in enumerate(points)]
    assert [best(named, one).length for one in ("goodput", "cost", "energy")] == [0, 1, 3]
    with pytest.raises(BadInput, match="objectives are"):
        best(named, "beauty")


def test_edge_and_cloud_by_hand() -> None:
    cloud, device = (
        Roofline(SHAPES["qwen2.5-7b"], PRESETS["l40s"]),
        Roofline(SHAPES["qwen2.5-0.5b"], PRESETS["apple-a17-pro"]),
    )
    link = Link(0.02, 1e6, 2e6)
    phone = Device(device.forward(Work.of_round([1], [100])), 5.0)
    costs = RooflineCosts(cloud)
    found = EdgeCloud(costs, link, batch=4, context=100).figures(phone, 5, 2.5)
    draft = 5 * device.forward(Work.of_round([1], [100]))
    verify = cloud.forward(Work.of_round([6] * 4, [100] * 4))
    network = 0.02 + 20 / 1e6 + 8 / 2e6
    assert found.goodput == pytest.approx(3.5 / (draft + verify + network))
    assert found.cost == pytest.approx(6 / 3.5)
    assert found.energy == pytest.approx(5.0 * draft / 3.5)
    seconds = EdgeCloud(costs, link, batch=4, context=100, cost="seconds", devices=2).figures(phone, 5, 2.5)
    assert seconds.cost == pytest.approx(2 * verify / 4 / 3.5)


def test_draft_models_are_read_from_text() -> None:
    found = candidates(["draft-lm", "smollm2:int8", "x.gguf:int4=qwen2.5-0.5b"])
    assert [(one.name, one.bits, one.shape and one.shape.name) for one in found] == [
        ("draft-lm", 16, "smollm2-draft-lm"),
        ("smollm2", 8, "smollm2-135m"),
        ("x.gguf", 4, "qwen2.5-0.5b"),
    ]
    with pytest.raises(BadInput, match="twice"):
        candidates(["smollm2", "smollm2:bfloat16"])
    exact = candidates(["smollm2:float32", "smollm2:bfloat16"])
    assert [one.bits for one in exact] == [32, 16], "two precisions, of which one reads twice as much"


def test_draft_models_that_are_timed_here_need_no_shape() -> None:
    found = candidates(["draft-lm", "mine.gguf:int4"], measured=True)
    assert [(one.name, one.bits) for one in found] == [("draft-lm", 16), ("mine.gguf", 4)]
    with pytest.raises(BadInput, match=r"leave out its shape"):
        candidates(["mine.gguf=qwen2.5-0.5b"], measured=True)
    with pytest.raises(BadInput, match=r"the sizes of 'mine.gguf' .* --setting drafts=mine.gguf:int4=SHAPE, a preset"):
        candidates(["mine.gguf:int4"])


def test_the_target_s_times_are_those_of_the_model_that_is_named(cli: Run) -> None:
    command = ("study", "configspec", "--model", "other")
    refused(cli(*command), "the sizes of 'other' are not among the presets", "--setting shape=NAME")


def test_text_in_plots_is_escaped() -> None:
    svg = Plot("<a>&", "x", "y", {"<b>": [PlotPoint(1, 2, 1, 3), PlotPoint(2, 3, 2, 4)]}, labels={1.0: "<c>"}).svg()
    assert ElementTree.fromstring(svg) is not None
    assert "<a>" not in svg


def test_names_below_a_plot_do_not_overlap_and_are_not_joined() -> None:
    names = {float(at): f"recursive-rejection-{at}" for at in range(1, 14)}
    svg = Plot("t", "rule", "y", {"a": [PlotPoint(at, 2, 1, 3) for at in names]}, labels=names).svg()
    assert svg.count("rotate(-35") == 13, "every name, slanted"
    assert "<polyline" not in svg and "<polygon" not in svg
    assert svg.count('opacity="0.4"') == 13, "an interval at each point"
    assert "<polyline" in Plot("t", "x", "y", {"a": [PlotPoint(1, 2), PlotPoint(2, 3)]}).svg()


@pytest.fixture
def context(smollm2: Model) -> StudyContext:
    return StudyContext("smollm2", load_prompts(limit=4), lambda name, dtype: smollm2)


@pytest.mark.model
def test_accdyn_on_the_real_model(context: StudyContext) -> None:
    found = ran("accdyn", context, method="pld", max_new_tokens=16)
    assert {row["task"] for row in found.rows} == {prompt.category for prompt in context.prompts}
    assert len(found.result["claims"]) == 2


@pytest.mark.model
def test_rules_on_the_real_model_judge_the_same_trees(context: StudyContext, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where no draft pays, too.
    monkeypatch.setattr("outpace.controllers.draft_length.DraftLength.budget", lambda *_, **__: Budget(0, 0, 0, 0.0))
    found = ran("rules", replace(context, prompts=context.prompts[:2]), max_new_tokens=8, times=2)
    chains = {row["rule"]: row["tokens"] for row in found.rows if row["drafts"].startswith("chain")}
    assert {"rejection", "block"} <= set(chains)
    assert all(1.0 <= tokens <= 20.0 for tokens in chains.values())
    assert {claim["says"].split()[0] for claim in found.result["claims"]} == {"block", "traversal"}


@pytest.mark.model
def test_illusion_on_the_real_model(context: StudyContext) -> None:
    found = ran("illusion", context, methods=["pld"], batches=[1, 2], max_new_tokens=12)
    assert [row["batch"] for row in found.rows] == [1, 2]
    for row in found.rows:
        assert sum(row[phase] for phase in ("draft", "score", "accept", "other")) == pytest.approx(1)
        assert row["oracle_drafter"] >= 1.0
    assert len(found.result["claims"]) == 3
    assert found.rows[0]["low"] is not None
    assert found.rows[1]["low"] is None, "the four prompts at batch 2 were answered in one turn"
    assert found.result["claims"][2]["verdict"] == "undecided"


@pytest.mark.model
def test_configspec_knows_that_a_model_accepts_all_of_its_own_drafts(context: StudyContext) -> None:
    found = ran("configspec", context, drafts=["draft-lm", "smollm2"], lengths=[2, 3], max_new_tokens=25)
    own = {row["length"]: row for row in found.rows if row["drafter"] == "smollm2"}
    small = {row["length"]: row for row in found.rows if row["drafter"] == "draft-lm"}
    for length, row in own.items():
        # Rows per token: (length + 1) / tokens, and all are accepted but where an answer ends.
        assert 1.0 <= row["cost"] < 1.15
        assert small[length]["cost"] > row["cost"]
        assert small[length]["energy"] < row["energy"]
    assert any(row["pareto"] for row in found.rows)
    assert "smollm2 has the target's own sizes" in found.result["notes"][1]


@pytest.mark.model
def test_configspec_takes_the_times_of_this_machine(context: StudyContext, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = type(context.model.target.costs)
    monkeypatch.setattr(measured, "seconds", lambda costs, rows, context=0: 0.004 * rows)
    monkeypatch.setattr(measured, "even", lambda costs, rows, batch=1, context=0: 0.01 + 0.002 * rows)
    about = replace(context, prompts=context.prompts[:2])
    wish: dict[str, Any] = {"lengths": [1, 4], "max_new_tokens": 12, "device": "measured", "watts": 20.0}
    found = ran("configspec", about, drafts=["draft-lm", "smollm2"], cloud="measured", batch=2, round_trip_ms=0, **wish)
    assert "this machine (times measured, 20 W) before this machine (measured)" in found.result["notes"][0]
    for row in found.rows:
        length = row["length"]
        tokens = (length + 1) / row["cost"]
        draft, verify, network = 0.004 * length, 0.01 + 0.002 * 2 * (length + 1), (4 * length + 8) / 1.25e6
        assert row["goodput"] == pytest.approx(tokens / (draft + verify + network))
        assert row["energy"] == pytest.approx(20.0 * draft / tokens)


@pytest.mark.model
def test_configspec_bills_the_precision_that_was_loaded(context: StudyContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that is named without a precision has that of its file."""

    def ratios(context: StudyContext, one: Any, answers: Any, rows: int | None) -> Any:
        assert rows is None, "times are those of presets"
        return [[0.5] * len(each.tokens) for each in answers], _Loaded(4, 10, None)

    monkeypatch.setattr("outpace.studies.configspec._ratios", ratios)
    about = replace(context, prompts=context.prompts[:1])
    found = ran("configspec", about, drafts=["x.gguf=qwen2.5-0.5b"], lengths=[2], max_new_tokens=8)
    assert {row["bits"] for row in found.rows} == {4}
    with pytest.raises(BadInput, match="twice"):
        ran("configspec", about, drafts=["x=qwen2.5-0.5b", "x:int4=qwen2.5-0.5b"], lengths=[2], max_new_tokens=8)


def test_breakeven_is_the_predictor_s_formula() -> None:
    wish: dict[str, Any] = {"models": ["llama-3.1-8b"], "users": [1, 1000], "longest": 3, "context": 100}
    found = ran("breakeven", StudyContext("none", [], no_model), **wish)
    rows = {row["drafter"]: row for row in found.rows}
    cloud = Roofline(SHAPES["llama-3.1-8b"], PRESETS["h100"])

    def seconds(users: int, length: int) -> float:
        return cloud.forward(Work.of_round([1 + length] * users, [100] * users))

    gains = [sum(0.5**at for at in range(count + 1)) * seconds(1, 0) / seconds(1, count) for count in (1, 2, 3)]
    assert rows["lookup"]["users_1"] == pytest.approx(max(gains))
    assert rows["head"]["users_1"] > 1.0
    assert rows["lookup"]["users_1000"] < rows["lookup"]["users_1"]
    assert ElementTree.fromstring(found.result["svg"]) is not None


def test_breakeven_charges_the_drafts_of_a_trace_by_their_method(tmp_path: Path) -> None:
    """The same rounds by four methods: a lookup is free, a head is dearer, a draft model dearest; of `auto` who drafts
    is not known."""
    rounds = Rounds((3,) * 4, (2,) * 4, (3,) * 4, (1,) * 4, (1.0,) * 4, (0.0,) * 4)
    header, path = TraceHeader({"name": "smollm2"}, "closed", 1, "bench"), tmp_path / "t.jsonl"
    names = ("pld", "eagle3", "draft-model#mine", "auto")
    write_trace(path, header, [TracedRequest("q", name, 5, 12, rounds) for name in names])
    wish: dict[str, Any] = {"models": ["llama-3.1-8b"], "hardware": ["h100"], "users": [1], "trace": str(path)}
    found = ran("breakeven", StudyContext("none", [], no_model), **wish)
    gains = {row["drafter"]: row["users_1"] for row in found.rows}
    assert gains["pld"] > gains["eagle3"] > gains["draft-model#mine"] > 0
    assert "left out, since what drafts of auto take is not known" in found.result["notes"][0]
    write_trace(path, header, [TracedRequest("q", "auto", 5, 12, rounds)])
    with pytest.raises(BadInput, match="what drafts of auto take is not known"):
        ran("breakeven", StudyContext("none", [], no_model), **wish)


def test_more_users_have_more_devices_where_their_k_v_need_them() -> None:
    wish: dict[str, Any] = {"models": ["llama-3.1-70b"], "hardware": ["h100"], "users": [1, 1000], "context": 1024}
    found = ran("breakeven", StudyContext("none", [], no_model), **wish)
    row = next(one for one in found.rows if one["drafter"] == "lookup")
    assert row["devices"] == {"1": 2, "1000": 8}
    assert row["hardware"] == "2 to 8 x h100"


def test_models_that_no_number_of_devices_holds_have_no_figure() -> None:
    found = ran(
        "breakeven", StudyContext("none", [], no_model), models=["llama-3.1-405b"], hardware=["t4"], users=[1]
    )  # fmt: skip
    assert all(row["users_1"] is None and row["pays_up_to"] is None for row in found.rows)
