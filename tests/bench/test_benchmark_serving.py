"""benchmarks/serving.py: what it counts, and what it says of bad input."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import serving
from outpace.bench.peers.stopping import TimeLimit
from outpace.core.errors import BadInput
from outpace.serving.app import build_app
from outpace.serving.server import open_socket, url
from serving import arguments
from serving_load.asked import loads_of, rows_of
from serving_load.client import Client, Reply, Rounds, rounds_of
from serving_load.conversations import Conversation, questions, traces
from serving_load.figures import Bounds, cell, compared, percentiles
from serving_load.loads import Block, arrival_times, closed, open_loop
from serving_load.measuring import Load, Results, measure, pairs_of
from serving_load.servers import Running, Server, Variant, Wanted, check_free, ours, speculation
from serving_load.slices import Slices
from serving_support import service

COMMON: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 12,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
SAID = [Conversation(f"c{n}", "chat", (), (f"tell me tale {n}", "and another")) for n in range(5)]


@pytest.fixture(scope="module")
def where() -> Iterator[str]:
    """A server of the toy model, on a thread of this process."""
    served = service(max_batch=4)
    listening = open_socket("127.0.0.1", 0)
    runner = uvicorn.Server(uvicorn.Config(build_app(served), log_config=None, lifespan="off"))
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not runner.started:
        time.sleep(0.01)
    yield url(listening, "127.0.0.1")
    runner.should_exit = True
    thread.join()
    served.stop()


def variant(where: str) -> Variant:
    return Variant("ours", Server("ours", [], {}, "toy", "shared_prefix", where), {"speculation": {"off": True}})


def body(one: Variant) -> Any:
    return lambda messages, salt: one.body(messages, salt, COMMON)


def test_a_closed_loop_counts_what_the_server_counts(where: str) -> None:
    block = closed(Client(where), SAID, body(variant(where)), 2, "block")
    assert [one.error for one in block.replies] == [None] * 10
    assert all(one.counted and one.tokens == 12 for one in block.replies)
    assert all(one.sent == one.scheduled and one.scheduled < one.arrivals[0] <= one.ended for one in block.replies)
    found = cell([block], Bounds(60_000, 60_000), 2)
    assert (found["requests"], found["tokens"], found["goodput"]["share"]) == (10, 120, 1)
    assert found["errors"] == {}
    assert found["later_turns"]["requests"] == 5
    assert found["speculation"]["drafted"] == 0
    assert found["speculation"]["requests_share"] == 0
    assert found["speculation"]["rounds"] == 120


class Stoppable(Server):
    """Counts what it did while it was not stopped."""

    stopped = False
    turns = 0
    pid = 1

    def pause(self, *, paused: bool) -> None:
        self.turns += self.stopped and not paused
        self.stopped = paused


def two() -> list[Variant]:
    return [Variant(name, Stoppable(name, [], {}, "toy", "shared_prefix", "")) for name in ("first", "second")]


def test_servers_warm_up_one_at_a_time_and_answer_a_block_together() -> None:
    rows = two()
    alone: list[str] = []
    together = dict[str, list[float]]()

    class Watched(Load):
        def run(self, client: Client, block: Any, body: Any, name: str, seed: int) -> Block:
            row = next(one for one in rows if one.name == body([], "")["shared_prefix"].split()[0])
            other = next(one for one in rows if one is not row)
            assert isinstance(row.server, Stoppable) and isinstance(other.server, Stoppable)
            if "warm-up" in name:
                assert not row.server.stopped and other.server.stopped
                alone.append(row.name)
            else:
                began, at = time.perf_counter(), client.clock()
                time.sleep(0.3)
                together.setdefault(row.name, []).append((client.clock() - at) / (time.perf_counter() - began))
            return Block(0, 1, 1, [Reply(0, 0, 1, [0.5], "text", 1, counted=True)])

    running = Running(rows, patience=1)
    running.variants = rows
    loads = [Watched("questions", SAID, 12, users=users) for users in (1, 2)]
    results = Results(None, Bounds(1, 1), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving_load.slices.SLICE", 0.01)
        patch.setattr("serving_load.measuring.closed", lambda *_: Block(0, 1, 1, [Reply(0, 0, 1, [0.5], "text", 1)]))
        patch.setattr("serving_load.measuring.rounds_of", lambda _: None)
        measure(results, "toy", loads, running, {}, TimeLimit(None), 1)
    assert alone == ["first", "second"] * 2
    assert set(together) == {"first", "second"}
    assert all(0.3 < share < 0.7 for shares in together.values() for share in shares), "half of the time is its own"
    assert len(results.cells) == 2


def test_one_server_runs_at_a_time_and_its_clock_stands_still_otherwise() -> None:
    first, second = (one.server for one in two())
    assert isinstance(first, Stoppable) and isinstance(second, Stoppable)
    began = time.perf_counter()
    with Slices([first, second], 0.02) as slices:
        clocks = [slices.clock(first), slices.clock(second)]
        for _ in range(100):
            assert first.stopped or second.stopped
            time.sleep(0.002)
        slices.ended(first)
        time.sleep(0.1)
        at = clocks[0]()
        time.sleep(0.1)
        assert clocks[0]() == at, "it has no more turns"
        slices.ended(second)
    elapsed = time.perf_counter() - began
    assert first.turns >= 3 and second.turns >= 3
    assert not first.stopped and not second.stopped
    assert sum(clock() for clock in clocks) == pytest.approx(elapsed, abs=0.1)


def test_servers_go_on_when_a_block_fails() -> None:
    rows = two()
    running = Running(rows, patience=1)
    running.variants = rows

    class Broken(Load):
        def run(self, client: Client, block: Any, body: Any, name: str, seed: int) -> Block:
            if "warm-up" in name or body([], "")["shared_prefix"].startswith("second"):
                return Block(0, 1, 1, [])
            raise ValueError("no such block")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving_load.measuring.closed", lambda *_: Block(0, 1, 1, [Reply(0, 0, 1, [0.5], "text", 1)]))
        patch.setattr("serving_load.measuring.rounds_of", lambda _: None)
        with pytest.raises(ValueError, match="no such block"):
            measure(
                Results(None, Bounds(1, 1), {}),
                "toy",
                [Broken("questions", SAID, 12, users=1)],
                running,
                {},
                TimeLimit(None),
                1,
            )
    assert not any(isinstance(one.server, Stoppable) and one.server.stopped for one in rows)


def test_the_second_turn_repeats_the_first_and_its_answer() -> None:
    bodies: list[Any] = []

    class Echo:
        clock = staticmethod(time.perf_counter)

        def ask(self, body: dict[str, Any], scheduled: float | None = None) -> Reply:
            bodies.append(json.loads(json.dumps(body)))
            return Reply(0, 0, text=f"answer {len(bodies)}")

    closed(Echo(), SAID[:1], body(variant("")), 1, "block")
    assert [one["content"] for one in bodies[1]["messages"]] == ["tell me tale 0", "answer 1", "and another"]
    assert bodies[0]["shared_prefix"] == bodies[1]["shared_prefix"] == "ours block:0"


def test_latencies_of_an_open_load_begin_when_a_request_was_due() -> None:
    """A server that answers one request at a time, in a tenth of a second: the third of three waits for two others."""
    turn = threading.Lock()

    class Slow:
        clock = staticmethod(time.perf_counter)

        def ask(self, body: dict[str, Any], scheduled: float | None = None) -> Reply:
            assert scheduled is not None
            sent = time.perf_counter()
            with turn:
                time.sleep(0.1)
            now = time.perf_counter()
            return Reply(scheduled, sent, now, [now], "x", 1)

    single = [Conversation(f"c{n}", "chat", (), ("hello",)) for n in range(3)]
    block = open_loop(Slow(), single, body(variant("")), [0.0, 0.001, 0.002], "block")
    assert sorted(one.ttft or 0 for one in block.replies)[-1] >= 0.29
    assert cell([block], Bounds(1, 1000), 2)["goodput"]["value"] == 0


def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = arrival_times(4, 20_000, seed=1)
    assert times == sorted(times) == arrival_times(4, 20_000, seed=1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert sum((one - mean) ** 2 for one in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.06)


def test_goodput_counts_whole_answers_within_both_bounds() -> None:
    def reply(ttft: float, tpot: float, error: str | None = None) -> Reply:
        return Reply(0, 0, 1, [ttft, ttft + 10 * tpot], "text", 11, counted=True, error=error)

    block = Block(0, 10, 10, [reply(0.1, 0.01), reply(0.3, 0.01), reply(0.1, 0.03), reply(0.1, 0.01, "broken")])
    found = cell([block], Bounds(200, 20), 2)
    assert (found["goodput"]["share"], found["goodput"]["value"]) == (0.25, 0.1)
    assert found["errors"] == {"broken": 1}


def test_a_closed_load_is_timed_while_all_users_are_active() -> None:
    reply = Reply(0, 0, 4, [1, 2, 3, 4], "text", 8, counted=True)
    assert reply.tokens_before(2.5) == 4
    assert Block(0, 2.5, 4, [reply]).tokens == 4


def test_percentiles_are_those_of_all_values() -> None:
    found = percentiles([[0.001 * n] for n in range(1, 101)])
    assert found is not None
    assert [found[name]["value"] for name in ("p50", "p90", "p99")] == pytest.approx([50, 90, 99])
    low, high = found["p50"]["ci95"]
    assert 30 < low < 50 < high < 70


def test_ratios_are_those_of_blocks_side_by_side() -> None:
    def block(tokens: int, seconds: float) -> Block:
        return Block(0, seconds, seconds, [Reply(0, 0, seconds, [seconds / 2], "x", tokens)])

    slow, fast = [block(10, one) for one in (1, 2, 4)], [block(20, one) for one in (1, 2, 4)]
    found = compared(fast, slow)
    assert found["ratio"] == pytest.approx(2)
    assert found["ci95"] == pytest.approx((2, 2))


def test_an_idle_connection_that_was_closed_is_no_error(where: str) -> None:
    client = Client(where)
    [first] = closed(client, SAID[:1], body(variant(where)), 1, "a").replies[:1]
    assert first.error is None
    for connection in client._idle:
        connection.sock.shutdown(socket.SHUT_RDWR)
    assert [one.error for one in closed(client, SAID[:1], body(variant(where)), 1, "b").replies] == [None, None]


def test_an_answer_that_is_refused_is_an_error(where: str) -> None:
    reply = Client(where).ask({"model": "other", "messages": [], "stream": True})
    assert reply.error is not None
    assert reply.error.startswith("status 4")


def test_the_traces_are_forty_conversations_of_three_to_six_turns() -> None:
    found = traces()
    assert len(found) == 40
    assert {one.category for one in found} == {"chat", "tools", "code-editing"}
    assert all(3 <= len(one.turns) <= 6 for one in found)
    assert all("<tools>" in one.opening[0]["content"] for one in found if one.category == "tools")
    assert all("```" in one.turns[0] for one in found if one.category == "code-editing")
    assert len(questions(None)) > 0


def test_blocks_have_all_requests_and_room_for_all_users() -> None:
    load = Load("traces", SAID, 60, 4)
    blocks = list(load.blocks())
    assert sum(len(one.turns) for block in blocks for one in block) == 60
    assert min(map(len, blocks)) >= 2 * 4 - 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--users", "1.5"], "--users takes whole numbers above 0"),
        (["--users", "0", "--rates", "0"], "leave no load"),
        (["--users", "0", "--workloads", "traces"], "traces have closed loops alone"),
        (["--rates", "fast"], "--rates takes numbers above 0"),
        (["--servers", "vlm"], "did you mean 'vllm'"),
        (["--goodput", "100"], "--goodput takes two numbers"),
        (["--requests", "0"], "--requests must be above 0"),
        (["--prompts", "absent.jsonl"], "absent.jsonl"),
        (["--markdown", "absent.json"], "--markdown absent.json: No such file"),
        (["--markdown", __file__], "it is not what --json wrote"),
    ],
)
def test_bad_input_is_one_line(given: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(given) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_server_that_does_not_start_is_left_out() -> None:
    server = Server("broken", ["false"], {}, "toy", None, "http://127.0.0.1:9")
    with Running([Variant("broken", server)], 20) as running:
        assert running.variants == []
    assert "exit code 1" in running.skipped["broken"]


def test_rows_have_servers_of_their_own_and_are_compared_within_a_number_format() -> None:
    wanted = Wanted("toy", 1, 4, 512, ["auto", "none"], ["bfloat16", "int4"], "", None, "", None, 1, [])
    rows = ours(wanted)
    assert len({one.server.url for one in rows}) == 4
    assert rows[1].fields == {"speculation": {"off": True}}
    assert pairs_of(rows) == [
        ("outpace bfloat16 auto", "outpace bfloat16 none"),
        ("outpace int4 auto", "outpace int4 none"),
    ]


def test_arrivals_alone_need_no_users() -> None:
    given = ["--servers", "outpace", "--workloads", "questions", "--users", "0", "--rates", "50", "--methods", "none"]
    options = serving.arguments([*given, "--dtypes", "int4"])
    assert [load.rate for load in loads_of(options)] == [50.0]
    [row], missing = rows_of(options, "smollm2")
    command = row.server.command
    assert command[command.index("--max-batch") + 1] == "16" and not missing


def test_all_loads_are_measured_and_written(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole run, but for starting the servers."""
    one, other = variant(where), Variant("other", Server("other", [], {}, "toy", None, where))

    def start(server: Server, patience: float) -> None:
        server.note = "in this process"

    monkeypatch.setattr(Server, "start", start)
    monkeypatch.setattr(Server, "pid", property(lambda _: 0))
    monkeypatch.setattr(serving, "rows_of", lambda *_: ([one, other], {"llama-cpp": "not installed"}))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("tell me a tale\nand another\n")
    told = tmp_path / "serving.json"
    given = ["--workloads", "questions", "--users", "1,2", "--rates", "50", "--requests", "24", "--tokens", "4"]
    assert serving.main([*given, "--prompts", str(prompts), "--json", str(told), "--ignore-eos"]) == 0
    found = json.loads(told.read_text())
    assert found["complete"]
    assert found["skipped"] == {"llama-cpp": "not installed"}
    assert [each["load"] for each in found["cells"]] == [
        "questions, 1 user",
        "questions, 2 users",
        "questions, 50 requests/s",
    ]
    for each in found["cells"]:
        assert {name: figures["requests"] for name, figures in each["servers"].items()} == {"ours": 24, "other": 24}
        assert all(figures["tokens"] == 96 for figures in each["servers"].values())
        assert [(pair["of"], pair["to"]) for pair in each["ratios"]] == [("ours", "other")]
        drafted = {name: figures["speculation"]["rounds_share"] for name, figures in each["servers"].items()}
        assert all(0 <= share <= 1 for share in drafted.values()), "both rows ask the same server here"
    capsys.readouterr()
    assert serving.main(["--markdown", str(told)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sum(one.startswith("| ours |") for one in said) == len(found["cells"])
    assert len({one.count("|") for one in said if one.startswith("|")}) == 1
    assert sum(one.startswith("ours / other: ") for one in said) == len(found["cells"])


def test_rounds_are_those_that_the_server_counted(where: str) -> None:
    before = rounds_of(where)
    pld = Variant("ours", variant(where).server, {"speculation": {"method": "pld", "params": {"num_draft_tokens": 2}}})
    block = closed(Client(where), SAID, body(pld), 2, "rounds")
    after = rounds_of(where)
    assert before is not None
    assert after is not None
    assert after.all - before.all == sum(one.rounds for one in block.replies)
    block.rounds = Rounds(after.drafted - before.drafted, after.all - before.all)
    assert 0 < block.rounds.drafted < block.rounds.all
    found = cell([block, block], Bounds(60_000, 60_000), 2)["speculation"]
    assert found["rounds_share"] == block.rounds.drafted / block.rounds.all
    assert rounds_of("http://127.0.0.1:9") is None


def test_nothing_to_measure_is_bad_input() -> None:
    with pytest.raises(BadInput, match="no server is left"):
        check_free([])


@pytest.mark.parametrize(("method", "said"), [
    ("none", {"off": True}), ("auto", {"method": "auto"}),
    ("eagle3:max_nodes=8", {"method": "eagle3", "params": {"max_nodes": 8}}),
    ("auto:free=sam:namespaces=4", {"method": "auto", "params": {"free": "sam", "namespaces": 4}}),
])  # fmt: skip
def test_a_row_s_requests_name_its_method_and_lengths(method: str, said: dict[str, Any]) -> None:
    assert speculation(method) == said


@pytest.mark.parametrize("method", ["eagle3:8", "eagle3:", "eagle3:=8"])
def test_settings_of_a_row_have_names(method: str) -> None:
    with pytest.raises(BadInput, match="METHOD:KEY=VALUE"):
        arguments(["--methods", f"auto,{method}"])
