"""The simulator against what queueing theory, the roofline and recorded runs say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outpace
from cli_support import Run, refused, toy
from outpace.core.errors import BadInput
from outpace.engine.scheduler import WHOLE_CHUNK, Limits
from outpace.model import Model
from outpace.simulate import simulation
from outpace.simulate.acceptance import Rates, Recorded, SimulatedRound, Undrafted, drafting_share, rates_of
from outpace.simulate.draft_times import FreeDrafts, ModelDrafts, RecordedDrafts
from outpace.simulate.hardware import PRESETS
from outpace.simulate.load import Arrivals, Users, poisson
from outpace.simulate.machines import Machine, RooflineMachine
from outpace.simulate.model_shape import SHAPES
from outpace.simulate.roofline import Roofline, Work
from outpace.simulate.serving_model import Prefixes
from outpace.simulate.simulating import simulate
from outpace.simulate.simulation import Outcome, simulate_requests
from outpace.simulate.simulation_settings import Settings
from outpace.targets.costs import FixedCosts
from outpace.traces.trace_format import Rounds, TracedRequest, TraceHeader, read_trace
from outpace.traces.trace_writer import write_trace

pytest.importorskip("simpy")


class Clockwork(Machine):
    """Every round takes a second, and every row of a prompt ``row`` seconds."""

    def __init__(self, row: float = 0.0, kv_capacity: int | None = None, stages: int = 1) -> None:
        self.costs, self.row, self.stages = FixedCosts(), row, stages
        self.kv_bytes_per_token, self.kv_capacity, self.watts = 1, kv_capacity, 3.0

    def chunk(self, rows: list[int], contexts: list[int]) -> list[float]:
        return [self.row * sum(rows) / self.stages] * self.stages

    def round(self, rows: list[int], contexts: list[int]) -> list[float]:
        return [1.0 / self.stages] * self.stages

    def public(self) -> dict[str, Any]:
        return {}


def request(prompt: int = 1, accepted: tuple[int, ...] = (0,), drafted: int = 0, name: str = "q", **about: Any) -> Any:
    committed = tuple(1 + one for one in accepted)
    count = len(accepted)
    rounds = Rounds((drafted,) * count, accepted, committed, (1,) * count, (1.0,) * count, (0.0,) * count)
    return TracedRequest(name, "pld" if drafted else "none", prompt, sum(committed), rounds, **about)


def served(requests: list[TracedRequest], machine: Machine, load: Any, **about: Any) -> Outcome:
    limits = about.pop("limits", Limits(max_batch=1))
    return simulate_requests(requests, Recorded(), machine, FreeDrafts(), load, limits, **about)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_queue_of_one_server_waits_as_long_as_m_d_1_says(load: float) -> None:
    """Poisson arrivals, service of exactly a second: the mean wait is load / (2 (1 - load)) seconds."""
    count = 20_000
    found = served([request()], Clockwork(), poisson(load, count, seed=5), count=count)
    waits = [(one.admitted or 0.0) - one.arrived for one in found.answered]
    assert len(waits) == count
    assert sum(waits) / count == pytest.approx(load / (2 * (1 - load)), rel=0.08)
    assert found.public()["utilization"][0] == pytest.approx(load, rel=0.03)


def test_one_request_alone_takes_the_sum_of_its_forwards() -> None:
    roofline = Roofline(SHAPES["llama-3.1-8b"], PRESETS["h100"])
    accepted, prompt, drafted = (2, 0, 4, 1), 1301, 4
    one = request(prompt, accepted, drafted)
    found = served([one], RooflineMachine(roofline), Users(1))
    expected, context = 0.0, 0
    while context < prompt - 1:
        rows = min(WHOLE_CHUNK, prompt - 1 - context)
        expected += roofline.forward(Work.of_chunk([rows], [context]))
        context += rows
    for more in accepted:
        expected += roofline.forward(Work.of_round([1 + drafted], [context]))
        context += 1 + more
    assert found.seconds == pytest.approx(expected)
    figures = found.public()
    assert (figures["rounds"], figures["tokens"], figures["forwards"]) == (4, 11, 4)
    assert figures["latency_ms"]["mean"] == pytest.approx(1e3 * expected)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """As in the server: by turns the shortest and the oldest are read first, and pieces of several in one forward."""
    first, long, short = request(1, (0,) * 300, name="first"), request(2000, name="long"), request(20, name="short")
    machine = RooflineMachine(Roofline(SHAPES["llama-3.1-8b"], PRESETS["h100"]))
    limits = Limits(max_batch=3, prefill_rows=16)
    found = served([first, long, short], machine, Users(3), limits=limits)
    begun = {one.traced.id: one.first_token or 0.0 for one in found.answered}
    assert begun["short"] < 0.1 * begun["long"]
    assert found.counters.prompt_rows == 1999 + 19
    assert machine.chunk([5, 11], [30, 8])[0] < machine.chunk([5], [30])[0] + machine.chunk([11], [8])[0]


def test_a_draft_model_takes_a_forward_for_each_level() -> None:
    roofline = Roofline(SHAPES["llama-3.1-8b"], PRESETS["h100"])
    small = Roofline(SHAPES["llama-3.2-1b"], PRESETS["h100"])
    one = request(1, (1, 1), 3)
    limits = Limits(max_batch=1)
    found = simulate_requests([one], Recorded(), RooflineMachine(roofline), ModelDrafts(small), Users(1), limits)
    expected = sum(
        roofline.forward(Work.of_round([4], [at])) + 3 * small.forward(Work.of_round([1], [at])) for at in (0, 2)
    )
    assert found.seconds == pytest.approx(expected)


def test_a_draft_model_drafts_a_tree_level_by_level() -> None:
    """Forty tokens in four levels are four forwards of ten rows, and not forty of one."""
    roofline, small = (Roofline(SHAPES[name], PRESETS["h100"]) for name in ("llama-3.1-8b", "llama-3.2-1b"))
    rounds = Rounds((40,), (2,), (3,), (1,), (1.0,), (0.0,), (4,))
    one = TracedRequest("q", "eagle3", 1, 3, rounds)
    limits = Limits(max_batch=1)
    found = simulate_requests([one], Recorded(), RooflineMachine(roofline), ModelDrafts(small), Users(1), limits)
    drafts = 4 * small.forward(Work.of_round([10], [0]))
    assert found.counters.draft_seconds == pytest.approx(drafts)
    assert rates_of([one]) == [1.0, 1.0, 0.0]


def test_a_draft_model_reads_prompts_and_takes_memory(cli: Run, tmp_path: Path) -> None:
    machine = RooflineMachine(Roofline(SHAPES["llama-3.1-8b"], PRESETS["h100"]))
    draft = Roofline(SHAPES["llama-3.2-1b"], PRESETS["h100"])
    one = TracedRequest("q", "draft-model", 101, 1, request(accepted=(0,)).rounds)
    found = simulate_requests([one], Recorded(), machine, ModelDrafts(draft), Users(1), Limits(max_batch=1))
    chunk = Work.of_chunk([100], [0])
    reading = machine.roofline.forward(chunk) + draft.forward(chunk)
    assert found.seconds == pytest.approx(reading + machine.roofline.forward(Work.of_round([1], [100])))
    path = tmp_path / "t.jsonl"
    write_trace(path, HEADER, [TracedRequest("q", "draft-model", 50, 12, request(50, (2,) * 4, 3).rounds)])
    common = ("simulate", "--trace", str(path), "--hardware", "h100", "--draft-model")
    refused(cli(*common, "llama-3.1-405b"), "llama-3.1-405b", "takes 811.7 GB", "beside smollm2-135m")
    assert "without the levels of drafts" in " ".join(cli(*common, "head").out.split())
    held = machine.beside(draft, draft.weight_bytes)
    assert held.kv_capacity == (machine.kv_capacity or 0) - int(draft.weight_bytes)
    assert held.kv_bytes_per_token == machine.kv_bytes_per_token + SHAPES["llama-3.2-1b"].kv_bytes()


def test_a_draft_model_is_charged_to_the_methods_that_draft_with_it(tmp_path: Path) -> None:
    """A trace of none, pld and eagle3: lookups take no time, alone and beside eagle3 in one round."""
    path = tmp_path / "t.jsonl"
    looked_up = request(50, (2,) * 4, 3, name="a", arrival=0.0)
    drafted = replace(looked_up, id="b", method="eagle3")
    requests = [request(50, (0,) * 12, name="c", arrival=0.0), looked_up, drafted]
    write_trace(path, HEADER, requests)
    rows = {row["method"]: row for row in simulate(path, "h100", Settings(draft_model="head")).rows}
    assert rows["none"]["draft_seconds"] == rows["pld"]["draft_seconds"] == 0.0 < rows["eagle3"]["draft_seconds"]
    write_trace(path, replace(HEADER, kind="open", at_once=3), requests)
    [together] = simulate(path, "h100", Settings(draft_model="head")).rows
    assert together["draft_seconds"] == pytest.approx(rows["eagle3"]["draft_seconds"], rel=0.02)
    with pytest.raises(BadInput, match="unknown model shape"):
        simulate(path, "h100", Settings(draft_model="haed", methods=("pld",)))


def test_recorded_drafts_take_their_mean_time_for_each_method() -> None:
    """Requests without drafts beside those that draft do not make drafting cheaper."""

    def one(method: str, seconds: float) -> TracedRequest:
        return TracedRequest("q", method, 1, 2, Rounds((1,), (1,), (2,), (4,), (1.0,), (1e3 * seconds,)))

    requests = [one("none", 0.0), one("eagle3", 4.0), one("eagle3", 2.0), one("pld", 0.5)]
    limits = Limits(max_batch=4)
    found = simulate_requests(requests, Recorded(), Clockwork(), RecordedDrafts(), Users(4), limits)
    assert found.counters.draft_seconds == pytest.approx(3.0 + 0.5)


def test_a_server_s_requests_arrive_when_they_did_not_when_they_ended(tmp_path: Path) -> None:
    """The long request came first and was written last."""
    path = tmp_path / "t.jsonl"
    quick = request(accepted=(0,) * 2, arrival=104.0, name="quick")
    long = request(accepted=(0,) * 40, arrival=100.0, name="long")
    write_trace(path, replace(HEADER, kind="open"), [quick, long])
    [outcome] = simulate(path, "h100").simulated
    assert {one.traced.id: one.arrived for one in outcome.requests} == {"long": 0.0, "quick": 4.0}


def test_loads_that_memory_cannot_hold_are_refused(cli: Run, trace: str) -> None:
    common = ("simulate", "--trace", trace, "--hardware", "h100")
    refused(cli(*common, "--rate", "5", "--requests", "1000000000"), "--requests must be at most 200,000")
    refused(cli(*common, "--users", "1000000000"), "--users must be at most 50,000")
    endless = request(accepted=(0,))
    rounds = Undrafted().rounds(replace(endless, output_tokens=10**15), 0)
    assert next(rounds) == SimulatedRound(0, 1), "made one by one"


def test_users_pause_before_they_ask_again() -> None:
    requests = [request(accepted=(0,) * 3, name=f"q{at}") for at in range(4)]
    found = served(requests, Clockwork(), Users(1, 0.5))
    assert 4 * 3 + 3 * 0.25 <= found.seconds <= 4 * 3 + 3 * 0.75 + 0.5
    assert found.seconds == served(requests, Clockwork(), Users(1, 0.5)).seconds, "the same with the same seed"
    with pytest.raises(BadInput, match="--pause"):
        Users(1, -1.0)
    with pytest.raises(BadInput, match="--pause is for --users"):
        Settings(pause=1.0)


def test_users_who_pause_fall_out_of_step() -> None:
    """In step, both prompts are read before either is answered; out of step each holds up the other's answer."""
    requests = [request(11, accepted=(0,) * 5, name=f"q{at}") for at in range(12)]

    def decoding(pause: float) -> float:
        found = served(requests, Clockwork(row=1.0), Users(2, pause), limits=Limits(max_batch=2)).answered
        return sum((one.finished or 0.0) - (one.first_token or 0.0) for one in found) / len(found)

    assert decoding(0.0) == pytest.approx(4.0)
    assert decoding(0.1) > 8.0


def test_what_lies_between_rounds_comes_after_the_tokens() -> None:
    class Slow(Clockwork):
        def between(self, batch: int) -> float:
            return 0.25 * batch

    [one] = served([request(accepted=(0,) * 3)], Slow(), Users(1)).answered
    assert (one.first_token, one.finished) == pytest.approx((1.0, 3.5))


def test_a_queue_that_nobody_can_plan_for_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "QUEUED", 10_000)
    found = served([request()], Clockwork(), Users(500), count=500, limits=Limits(max_batch=500))
    assert not found.public()["drained"]
    assert "requests at once" in found.notes[0] and "does not drain" in found.notes[0]


def test_requests_share_rounds_up_to_the_batch() -> None:
    requests = [request(accepted=(0,) * 10, name=f"q{at}") for at in range(8)]
    for batch, seconds in ((1, 80), (2, 40), (8, 10), (100, 10)):
        found = served(requests, Clockwork(), Users(8), limits=Limits(max_batch=batch))
        assert found.seconds == pytest.approx(seconds)
        assert found.public()["mean_batch"] == pytest.approx(min(batch, 8))


def test_a_pipeline_of_two_stages_works_on_two_batches_at_once() -> None:
    requests = [request(accepted=(0,) * 10, name=f"q{at}") for at in range(4)]
    one = served(requests, Clockwork(), Users(4), limits=Limits(max_batch=2))
    two = served(requests, Clockwork(stages=2), Users(4), limits=Limits(max_batch=4))
    assert one.seconds == pytest.approx(20)
    assert two.seconds == pytest.approx(10.5)  # each stage takes half; the second batch follows half a second later
    assert two.public()["utilization"] == [pytest.approx(20 * 0.5 / 10.5)] * 2


def test_common_beginnings_are_read_once() -> None:
    names = tuple(f"h{at}" for at in range(4))
    requests = [request(129, prefix=names, name=f"q{at}") for at in range(3)]
    machine = Clockwork(row=0.01)
    with_cache = served(requests, machine, Users(1))
    without = served(requests, machine, Users(1), prefix_cache=False)
    assert without.public()["prompt_rows"] == 3 * 128
    assert with_cache.public()["prompt_rows"] == 128
    assert with_cache.public()["cached_rows"] == 2 * 128
    assert without.seconds - with_cache.seconds == pytest.approx(2.56)


def test_kv_that_does_not_fit_makes_requests_wait_again_and_none_is_lost() -> None:
    requests = [request(40, (0,) * 100, name=f"q{at}") for at in range(3)]
    tight = served(requests, Clockwork(), Users(3), limits=Limits(max_batch=3, kv_bytes=300))
    assert len(tight.answered) == 3
    assert sum(one.preemptions for one in tight.requests) > 0
    assert all(one.committed == 100 for one in tight.requests)
    with pytest.raises(BadInput, match="Shorten the prompt"):
        served([request(500)], Clockwork(), Users(1), limits=Limits(max_batch=1, kv_bytes=300))


def test_a_load_that_never_drains_is_bounded_and_said() -> None:
    overload = served([request()], Clockwork(), poisson(50.0, 3000, seed=1), count=3000, hours=0.1)
    assert overload.public()["drained"] is False
    assert 350 <= len(overload.answered) <= 360
    assert "does not drain" in overload.notes[0]
    short = served([request()], Clockwork(), Users(1), count=500, forwards=20)
    assert (len(short.answered), short.public()["drained"]) == (20, False)
    growing = served([request()], Clockwork(), poisson(5.0, 300, seed=1), count=300)
    assert growing.public()["drained"] is True
    assert "queue was still growing" in growing.notes[0]


def test_rounds_without_drafts_stay_as_many() -> None:
    """A lookup that finds something in a quarter of the rounds does not in all of them."""
    rounds = Rounds((0, 0, 0, 2) * 50, (0, 0, 0, 2) * 50, (1, 1, 1, 3) * 50, (1,) * 200, (1.0,) * 200, (0.0,) * 200)
    one = TracedRequest("q", "pld", 1, 300, rounds)
    share = drafting_share([one])
    assert share == pytest.approx(0.25, abs=0.01)
    drawn = list(Rates(rates_of([one]), 2, seed=1, drafting=share).rounds(request(accepted=(0,) * 4000), 0))
    assert sum(each.drafted > 0 for each in drawn) / len(drawn) == pytest.approx(0.25, abs=0.03)
    assert 4000 / len(drawn) == pytest.approx(1.5, rel=0.05)


def test_cached_beginnings_leave_their_memory_to_running_requests() -> None:
    one = TracedRequest(
        "q", "none", 130, 1, Rounds((0,), (0,), (1,), (1,), (1.0,), (0.0,)), prefix=("a", "b", "c", "d")
    )
    cached = Prefixes(8, block_bytes=100)
    cached.keep(one)
    assert cached.lend(one) == 128
    cached.shrink(250)
    assert cached.lend(one) == 64
    cached.shrink(-1)
    assert cached.lend(one) == 0


def test_rates_are_drawn_as_often_as_they_say() -> None:
    one = request(accepted=(0,) * 4000)
    rounds = list(Rates([0.9, 0.5], 3, seed=2).rounds(one, 0))
    assert sum(each.committed for each in rounds) == 4000
    expected = 1 + 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.5
    assert 4000 / len(rounds) == pytest.approx(expected, rel=0.05)
    assert rounds == list(Rates([0.9, 0.5], 3, seed=2).rounds(one, 0))
    assert rounds != list(Rates([0.9, 0.5], 3, seed=3).rounds(one, 0))
    drawn = request(accepted=tuple(each.committed - 1 for each in rounds[:-3]), drafted=3)
    assert rates_of([drawn]) == pytest.approx([0.9, 0.5, 0.5], abs=0.05)
    for wrong in ([], [1.2]):
        with pytest.raises(BadInput, match="between 0 and 1"):
            Rates(wrong, 3)


HEADER = TraceHeader(
    {"name": "smollm2", "num_layers": 30, "hidden_size": 576, "vocab_size": 49152}, "closed", 2, "bench", "0"
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    plain = [request(50, (0,) * 12, name=f"q{at}") for at in range(4)]
    drafted = [request(50, (2,) * 4, 3, name=f"q{at}") for at in range(4)]
    write_trace(path, HEADER, [*plain, *drafted])
    return str(path)


def test_the_command_prints_figures_for_every_method(cli: Run, trace: str) -> None:
    ran = cli("simulate", "--trace", trace, "--hardware", "h100", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    rows = {row["method"]: row for row in found["simulations"]}
    assert found["prediction"] is True
    assert found["machine"]["hardware"]["source"].startswith("https://")
    assert rows["none"]["mean_acceptance_length"] == 1
    assert rows["pld"]["mean_acceptance_length"] == 3
    assert rows["none"]["speedup"] == 1
    # After the first round: 9 tokens in three rounds, each at nearly the cost of one row.
    assert 2.9 < rows["pld"]["speedup"] < 3.1
    text = cli("simulate", "--trace", trace, "--hardware", "h100")
    assert "Predicted, not measured" in text.out
    more = cli(
        "simulate", "--trace", trace, "--hardware", "a100", "--model", "llama-3.1-70b", "--transfer", "--users", "50",
        "--tensor-parallel", "4", "--pipeline-parallel", "2", "--bits", "8", "--draft-length", "5", "--json",
    )  # fmt: skip
    assert more.code == 0, more.err
    assert [row["requests"] for row in json.loads(more.out)["simulations"]] == [200, 200]


def test_what_cannot_be_simulated_is_refused_in_one_line(cli: Run, trace: str, tmp_path: Path) -> None:
    def go(*more: str) -> Any:
        return cli("simulate", "--trace", trace, "--hardware", "h100", *more)

    refused(cli("simulate"), "--trace FILE")
    refused(cli("simulate", "--trace", trace), "--hardware NAME", "h100", "measured")
    refused(cli("simulate", "--trace", trace, "--hardware", "h1000"), "unknown hardware 'h1000'", "raspberry-pi-5")
    refused(cli("simulate", "--trace", str(tmp_path / "no"), "--hardware", "h100"), "No such file")
    refused(go("--model", "llama-3.1-8b"), "recorded with 'smollm2', and not with llama-3.1-8b", "--transfer")
    refused(go("--model", "llama-4"), "unknown model shape", "config.json")
    refused(go("--method", "sam"), "unknown method of this trace 'sam'", "pld")
    refused(go("--users", "3", "--rate", "1"), "two loads")
    refused(go("--rate", "0"), "--rate")
    refused(go("--users", "0"), "--users must be at least 1")
    refused(go("--bits", "3"), "16, 8 or 4 bits")
    refused(go("--acceptance", "0.5"), "--draft-length")
    refused(go("--acceptance", "x", "--draft-length", "3"), "--acceptance takes rates")
    refused(go("--tensor-parallel", "2"), "does not divide the 9 heads")
    refused(go("--hours", "0"), "--hours")


def test_a_network_that_nobody_has_priced_is_refused(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rounds = request(50, (2,) * 4, 3).rounds
    write_trace(path, HEADER, [TracedRequest("q", "draft-model", 50, 12, rounds)])
    common = ("simulate", "--trace", str(path), "--hardware", "h100", "--json")
    refused(cli(*common), "'draft-model' drafts with a network", "--draft-model SHAPE")
    seconds = [
        json.loads(cli(*common, "--draft-model", name).out)["simulations"][0]["seconds"]
        for name in ("free", "head", "qwen2.5-0.5b")
    ]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 3


@pytest.mark.model
def test_a_real_run_is_played_again_round_by_round(smollm2: Model, tmp_path: Path) -> None:
    """The simulated rounds of a recorded bench are the bench's own: as many, and as many tokens in each."""
    path = tmp_path / "t.jsonl"
    report = outpace.bench(smollm2, ["pld"], limit=4, max_new_tokens=24, batch_size=2, trace=path)
    measured = {row["method"]: row for row in report.rows}
    found = simulate(path, "xeon-8480")
    assert {row["method"] for row in found.rows} == {"none", "pld"}
    recorded = read_trace(path).by_method()
    for row in found.rows:
        requests = recorded[row["method"]]
        assert row["rounds"] == sum(len(one.rounds) for one in requests)
        assert row["drafted"] == sum(sum(one.rounds.drafted) for one in requests)
        figure = measured[row["method"]]["mean_acceptance_length"]
        assert row["mean_acceptance_length"] == pytest.approx(figure)
    here = simulate(path, "measured", Settings(max_batch=2), load_model=lambda name: smollm2)
    assert here.rows[1]["rounds"] == found.rows[1]["rounds"]
    assert all(row["tokens_per_second"] > 0 for row in here.rows)
    with pytest.raises(BadInput, match="another model"):
        simulate(path, "measured", load_model=lambda name: _other(smollm2))


def _other(model: Model) -> Model:
    return toy(model.name)


def test_without_simpy_the_command_says_what_to_install(cli: Run, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "simpy", None)
    refused(cli("simulate", "--trace", trace, "--hardware", "h100"), "pip install 'outpace[simulate]'")


def test_a_server_s_traffic_is_simulated_together(tmp_path: Path) -> None:
    """Two requests of two methods that ran side by side share the rounds; a bench's methods do not."""
    path = tmp_path / "t.jsonl"
    header = TraceHeader(HEADER.model, "open", 2, "serve")
    write_trace(
        path, header, [request(accepted=(0,) * 6, arrival=5.0), request(accepted=(1,) * 3, drafted=2, arrival=5.0)]
    )
    [row] = simulate(path, "h100").rows
    assert row["method"] == "none + pld"
    assert (row["forwards"], row["tokens"], row["answered"]) == (6, 12, 2)
    assert simulate(path, "h100", Settings(methods=("pld",))).rows[0]["forwards"] == 3
    with pytest.raises(BadInput, match="--requests needs"):
        simulate(path, "h100", Settings(requests=5))


def test_a_repeated_request_is_another_prompt() -> None:
    """Ten prompts that have nothing in common, over and over: none of them is cached when it comes again."""
    requests = [request(129, prefix=tuple(f"{at}/{block}" for block in range(4)), name=f"q{at}") for at in range(10)]
    found = served(requests, Clockwork(row=0.01), Users(1), count=40).public()
    assert (found["cached_rows"], found["prompt_rows"]) == (0, 40 * 128)
    assert "40 requests were made of 10" in found["notes"][0]
    shared = [request(129, prefix=("a", "b"), name=f"q{at}") for at in range(10)]
    again = served(shared, Clockwork(row=0.01), Users(1), count=20).public()
    assert again["cached_rows"] == 2 * 9 * 64, "what requests of one pass have in common is still read once"


def test_requests_that_all_come_at_once_are_no_growing_queue() -> None:
    burst = Arrivals([0.0] * 8, "at once")
    found = served([request(name=f"q{at}") for at in range(8)], Clockwork(), burst)
    assert found.waiting == 7
    assert found.notes == []


def test_a_load_beyond_the_batch_names_the_batch(cli: Run, trace: str) -> None:
    growing = served([request()], Clockwork(), poisson(5.0, 300, seed=1), count=300)
    assert "--max-batch 1" in growing.notes[0]
    overload = served([request()], Clockwork(), poisson(50.0, 3000, seed=1), count=3000, hours=0.1)
    assert "larger --max-batch" in overload.notes[0]
    ran = cli("simulate", "--trace", trace, "--hardware", "h100", "--rate", "2000", "--json")
    rows = json.loads(ran.out)["simulations"]
    assert {row["max_batch"] for row in rows} == {8}, "as many as outpace serve decodes together by default"


def test_an_answer_without_tokens_ends_after_its_round(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    cut = TracedRequest("q", "pld", 5, 0, Rounds((3,), (0,), (0,), (1,), (1.0,), (0.0,)))
    write_trace(path, HEADER, [cut, request(50, (2,) * 4, 3)])
    [row] = simulate(path, "h100", Settings(draft_length=3)).rows
    assert row["answered"] == 2


def test_traffic_without_a_baseline_gets_one(tmp_path: Path, cli: Run) -> None:
    """The same requests with a token a round: the question that a server's trace is simulated for."""
    path = tmp_path / "t.jsonl"
    header = TraceHeader(HEADER.model, "open", 2, "serve")
    plain = request(accepted=(0,) * 6, arrival=5.0)
    write_trace(path, header, [plain, request(accepted=(2,) * 4, drafted=2, arrival=5.0)])
    [row] = simulate(path, "h100").rows
    assert (row["baseline"]["rounds"], row["baseline"]["tokens"], row["baseline"]["drafted"]) == (18, 18, 0)
    assert 1.0 < row["speedup"] < 3.0
    gain = row["tokens_per_second"] / row["baseline"]["tokens_per_second"]
    assert row["throughput_gain"] == pytest.approx(gain)
    [alone] = simulate(path, "h100", Settings(methods=("pld",))).rows
    assert 2.9 < alone["speedup"] < 3.1
    assert "without drafts" in cli("simulate", "--trace", str(path), "--hardware", "h100").out


def test_requests_without_drafts_draft_nothing_beside_longer_drafts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    header = TraceHeader(HEADER.model, "open", 2, "serve")
    plain = request(accepted=(0,) * 40, arrival=0.0, name="plain")
    write_trace(path, header, [plain, request(accepted=(1,) * 8, drafted=2, arrival=0.0)])
    report = simulate(path, "h100", Settings(draft_length=4))
    assert [one.drafted for one in report.simulated[0].requests if one.traced.method == "none"] == [0]
    assert report.rows[0]["drafted"] > 0


def test_prompts_that_the_model_has_no_room_for_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    model = {**HEADER.model, "context_length": 8192}
    write_trace(path, TraceHeader(model, "closed", 1, "bench"), [request(9000), request(50)])
    assert (
        "1 of the requests are longer than the model's context of 8,192 tokens"
        in simulate(path, "h100").result["notes"]
    )
