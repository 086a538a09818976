"""bench-peers: the protocol with libraries that misbehave, turns in rotation, the figures and the JSON contract."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace.bench.page import render
from outpace.bench.peers import processes as planning, weights
from outpace.bench.peers.cpu_contention import CpuContention
from outpace.bench.peers.entries import Answer, Entry, Question
from outpace.bench.peers.libraries import PEERS, choose
from outpace.bench.peers.peer_rows import compared
from outpace.bench.peers.peers_report import PeersReport
from outpace.bench.peers.round_robin import RoundRobin, shuffled
from outpace.bench.peers.worker import Worker, WorkerError, environment
from outpace.bench.peers.workers.serve import Clock
from outpace.bench.settings import Progress
from outpace.bench.statistics import speedup_interval
from outpace.core.errors import BadInput
from peers_support import QUESTIONS, fake, plan_of, run_of

ROW = ["name", "config", "version", "precision", "decode_tokens_per_second", "ci95", "ttft_ms", "by_category", "error"]


# --- processes


def test_rows_take_turns_in_another_order_each_time(tmp_path: Path) -> None:
    plan = plan_of(fake(tmp_path, "a", ["x", "y"], ours=True), fake(tmp_path, "b"), fake(tmp_path, "c"))
    assert run_of(plan).go() is True
    said = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    order = ["a/x", "a/y", "b/plain", "c/plain"]
    assert [who for who, *_ in said[:4]] == order
    assert {token for _, token, _ in said[:4]} == {"9"}, "the warm-up has a prompt of its own"
    for number, question in enumerate(QUESTIONS):
        turn = said[4 + 4 * number : 8 + 4 * number]
        assert [who for who, *_ in turn] == shuffled(order, number)
        assert {(token, length) for _, token, length in turn} == {(str(question.tokens[0]), "5")}
    for entry in plan.entries:
        assert entry.error is None
        assert (entry.version, entry.precision) == ("9.9", "toy")
        assert {name: answer.tokens[0] for name, answer in entry.answers.items()} == {
            question.id: question.tokens[0] for question in QUESTIONS
        }
        for answer in entry.answers.values():
            assert answer.rate[0] == 4
            assert answer.ttft_ms >= 9
            assert answer.seconds >= 0.009
            assert answer.memory_mb is None or answer.memory_mb > 1


@pytest.mark.parametrize(
    ("mode", "answered", "why"),
    [
        ("refuses", 0, "FileNotFoundError: no such file"),
        ("dies", 1, "the process ended with exit code 3 while answering prompt 2: out of memory, it seems"),
        ("crashes", 1, "the process ended by SIGSEGV while answering prompt 2: chatter"),
        ("is killed", 1, "the process ended by SIGKILL (did the memory run out?) while answering prompt 2: chatter"),
        ("crashes while loading", 0, 'the process ended by SIGSEGV while loading: {"error": "not a reply"}'),
        ("silent", 0, "it answered no token"),
        ("short", 0, "answered 4 of 5 tokens to prompt 'warm-up'"),
    ],
)
def test_one_that_fails_says_why_and_the_others_go_on(tmp_path: Path, mode: str, answered: int, why: str) -> None:
    plan = plan_of(fake(tmp_path, mode), fake(tmp_path, "good"))
    assert run_of(plan).go() is True
    bad, good = plan.entries
    assert (bad.error, len(bad.answers)) == (why, answered)
    assert (good.error, len(good.answers)) == (None, 4)


@pytest.mark.parametrize(("mode", "doing"), [("hangs", "answering prompt 2"), ("hangs while loading", "loading")])
def test_one_that_hangs_is_ended(tmp_path: Path, mode: str, doing: str) -> None:
    plan = plan_of(fake(tmp_path, "good"), fake(tmp_path, mode))
    assert run_of(plan, timeout=4).go() is True
    good, bad = plan.entries
    assert bad.error == f"no reply within 4 s while {doing}"
    assert len(good.answers) == 4


def test_configurations_of_a_process_fail_alone_but_die_together(tmp_path: Path) -> None:
    plan = plan_of(fake(tmp_path, "raises", ["good", "bad", "odd"]), fake(tmp_path, "dies", ["x", "y"]))
    assert run_of(plan).go() is True
    errors = {f"{entry.name}/{entry.config}": entry.error for entry in plan.entries}
    assert errors["raises/good"] is None
    assert errors["raises/bad"] == "ValueError: cannot compute"
    assert errors["raises/odd"] == "needs a draft model"
    assert errors["dies/x"] == errors["dies/y"] != None  # noqa: E711 - one comparison of three


def test_what_was_not_asked_for_is_not_counted(tmp_path: Path) -> None:
    plan = plan_of(fake(tmp_path, "long"))
    run_of(plan).go()
    assert [len(answer.tokens) for answer in plan.entries[0].answers.values()] == [5] * 4
    clock = Clock(3)
    clock.emit([1, 2])
    clock.emit([3, 4])
    last = clock.last
    clock.emit([5])
    assert clock.tokens == [1, 2, 3]
    assert clock.reply()["first"] == 2
    assert clock.last == last


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    plan = plan_of(fake(tmp_path, "a"), fake(tmp_path, "b"))
    told: list[Progress] = []

    def press(now: Progress) -> None:
        told.append(now)
        if now.done == 3:
            raise KeyboardInterrupt

    run = run_of(plan)
    run.on_progress = press
    assert run.go() is False
    assert (run.stopped, run.answered) == ("Ctrl-C", 1)
    first, second = shuffled(plan.entries, 1)
    assert [list(entry.answers) for entry in (first, second)] == [["q0", "q1"], ["q0"]]
    assert told[-1].total == 8
    assert all(worker._process.poll() is not None for _, worker in run._running.values())


def test_a_program_that_is_no_worker_is_an_error_row(tmp_path: Path) -> None:
    gone = fake(tmp_path, "a")
    gone.command[0] = str(tmp_path / "no-such-python")
    other = fake(tmp_path, "b")
    other.command[1:] = ["-c", "print('junk', flush=True); raise SystemExit('not today')"]
    plan = plan_of(gone, other)
    RoundRobin(plan, QUESTIONS, QUESTIONS[0], length=3, threads=1, timeout=20).go()
    assert plan.entries[0].error == f"cannot start {gone.command[0]}: No such file or directory"
    assert plan.entries[1].error == "the process ended with exit code 1 while loading: not today"


def test_junk_before_the_reply_is_passed_over() -> None:
    code = 'input(); print("Loading 10 %"); print([1]); print(\'{"version": 1}\', flush=True); input()'
    worker = Worker([sys.executable, "-c", code], environment(1, foreign=False, offline=True), 20)
    assert worker.ask({"do": "load"}) == {"version": 1}
    worker.end()
    with pytest.raises(WorkerError, match="ended by SIGKILL"):
        worker.ask({"do": "load"})


def test_threads_of_waiting_workers_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    found = environment(3, foreign=True, offline=False)
    assert found["OMP_NUM_THREADS"] == "3"
    assert "OMP_WAIT_POLICY" not in found
    assert int(found["GOMP_SPINCOUNT"]) <= 10000
    assert int(found["KMP_BLOCKTIME"]) <= 1
    assert "PYTHONPATH" not in found
    assert "PYTHONPATH" in environment(3, foreign=False, offline=True)


def test_other_programs_on_the_machine_are_noticed() -> None:
    others = CpuContention()
    assert others.share is None
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        own, not_own = CpuContention(), CpuContention()
        own.begin([busy.pid])
        not_own.begin([])
        time.sleep(0.8)
        own.end()
        not_own.end()
        busy.kill()
    assert own.share is not None
    assert not_own.share is not None
    assert not_own.share > own.share + 0.1 / (os.cpu_count() or 1)


def test_workers_stand_alone() -> None:
    """The peers' workers run where outpace is not installed, and serve.py where nothing is."""
    for path in planning.WORKERS.glob("*.py"):
        names = set()
        for node in ast.parse(path.read_text()).body:  # what is under TYPE_CHECKING is not at this level
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
        assert ("outpace" in names) == (path.name == "ours.py"), path
        if path.name == "serve.py":
            assert names <= sys.stdlib_module_names
    assert {peer.worker for peer in PEERS.values()} <= {path.name for path in planning.WORKERS.glob("*.py")}


# --- figures


def entry(name: str, config: str, rates: dict[str, float], *, wait: float = 100.0, error: str | None = None) -> Entry:
    """Nine tokens a prompt; the rate is the eight after the first."""
    made = Entry(name, config, ours=name == "outpace", precision="int4", version="1", error=error)
    for prompt, rate in rates.items():
        tokens = tuple(range(9)) if name == "outpace" else (*range(6), 0, 0, 0)
        made.answers[prompt] = Answer(tokens, 1, wait, 8 / rate, 200.0)
    return made


ASKED = [Question("a", "chat", (1,)), Question("b", "chat", (1,)), Question("c", "qa", (1,))]
ENTRIES = [
    entry("outpace", "none", {"a": 10, "b": 12, "c": 10}),
    entry("outpace", "sam", {"a": 40, "b": 40, "c": 20}, wait=80),
    entry("transformers", "plain", {"a": 8, "b": 8, "c": 8}),
    entry("llama-cpp-python", "plain", {"a": 20, "b": 16, "c": 25}, wait=160),
    entry("vllm", "suffix", {"a": 10, "b": 10, "c": 50}, wait=400),
    entry("vllm", "n-gram", {"a": 90}, error="the process ended by signal 9"),
    Entry("openvino-genai", "plain", ours=False, error="needs a GGUF file"),
]


def result(**more: Any) -> dict[str, Any]:
    base = {
        "version": "1", "complete": True, "machine": {"cpu": "x", "threads": 2}, "model": {"name": "m"},
        "settings": {"prompts": 3, "max_new_tokens": 9, "command": "outpace bench-peers"},
        "skipped": [{"name": "gone", "why": "not installed", "install": "pip install gone"}], "notes": ["a <note>"],
    }  # fmt: skip
    return {**base, **compared(ENTRIES, ASKED), **more}


def test_json_is_the_contract() -> None:
    found = json.loads(json.dumps(result(), allow_nan=False))
    for row in (*found["peers"], *found["ours"]):
        assert list(row)[: len(ROW)] == ROW
        assert set(row["by_category"]) == {"chat", "qa"}
    assert [(row["name"], row["config"]) for row in found["ours"]] == [("outpace", "none"), ("outpace", "sam")]
    assert len(found["peers"]) == 5
    for key in ("ratio_to_best_peer", "plain_ratio", "ttft_ratio"):
        assert {"overall", "ci95", "by_category"} <= set(found[key])
        assert all(set(cell) == {"ratio", "ci95", "peer"} for cell in found[key]["by_category"].values())


def test_rates_are_tokens_over_time_of_all_prompts() -> None:
    sam = result()["ours"][1]
    seconds = 8 / 40 + 8 / 40 + 8 / 20
    assert sam["decode_tokens_per_second"] == pytest.approx(24 / seconds)
    assert sam["by_category"] == pytest.approx({"chat": 40.0, "qa": 20.0})
    rates, alone = [(8, 8 / 40), (8, 8 / 40), (8, 8 / 20)], [(1.0, 1.0)] * 3
    assert sam["ci95"] == pytest.approx(list(speedup_interval(rates, alone) or ()))
    assert sam["ci95"][0] < 20 < 40 < sam["ci95"][1], "of three prompts little is known"
    assert sam["by_category_ci95"]["qa"] is None, "one prompt has no interval"
    assert (sam["ttft_ms"], sam["prompts"], sam["tokens"], sam["memory_mb"]) == (80.0, 3, 27, 200.0)
    assert sam["agreement"] == {"same": 3, "of": 3, "prefix": 1.0}


def test_the_best_is_compared_with_the_best_and_with_the_best_of_each_task() -> None:
    found = result()["ratio_to_best_peer"]
    assert (found["ours"], found["peer"]) == ("outpace sam int4", "llama-cpp-python plain")
    ours, theirs = [(8, 0.2), (8, 0.2), (8, 0.4)], [(8, 8 / 20), (8, 8 / 16), (8, 8 / 25)]
    assert found["overall"] == pytest.approx((24 / 0.8) / (24 / sum(seconds for _, seconds in theirs)))
    assert found["ci95"] == pytest.approx(list(speedup_interval(ours, theirs, seed=0) or ()))
    assert found["by_category"]["qa"]["peer"] == "vllm suffix"
    assert found["by_category"]["qa"]["ratio"] == pytest.approx(20 / 50)
    assert found["by_category"]["chat"]["peer"] == "llama-cpp-python plain"
    plain = result()["plain_ratio"]
    assert (plain["ours"], plain["peer"]) == ("outpace none int4", "llama-cpp-python plain")
    wait = result()["ttft_ratio"]
    assert (wait["peer"], wait["overall"]) == ("transformers plain", pytest.approx(0.8))


def test_a_row_that_failed_stays_and_is_nobody_s_best() -> None:
    failed, never = result()["peers"][-2:]
    assert (failed["error"], failed["prompts"]) == ("the process ended by signal 9", 1)
    assert failed["decode_tokens_per_second"] == pytest.approx(90)
    assert never["decode_tokens_per_second"] is None
    assert failed["agreement"] == {"same": 0, "of": 1, "prefix": pytest.approx(6 / 9)}
    page = render(PeersReport(result()).report())
    shown = table(result())
    for words in ("the process ended by signal 9", "needs a GGUF file", "openvino-genai", "pip install gone"):
        assert words in page
        assert words in shown
    assert "was faster than outpace sam int4 before it failed" in shown.replace("\n", " ")
    assert "a &lt;note&gt;" in page
    assert "<script" not in page


def test_the_verdict_says_which_is_faster() -> None:
    def verdict(ci95: list[float] | None) -> str:
        found = result()
        found["ratio_to_best_peer"] |= {"ci95": ci95}
        return PeersReport(found).report().headline

    assert verdict([1.2, 2.0]).startswith("outpace sam int4 was faster than every other library: ")
    assert verdict([0.5, 0.9]).startswith("llama-cpp-python plain was faster than outpace: ")
    for unclear in ([0.9, 1.2], None):
        assert verdict(unclear).startswith("outpace sam int4 and llama-cpp-python plain were level within the noise: ")
    ending = "[1.20, 2.00] the decode rate of llama-cpp-python plain, the fastest of the others."
    assert verdict([1.2, 2.0]).endswith(ending)


def test_nothing_measured_is_said_in_words() -> None:
    broken = [Entry("outpace", "none", ours=True, error="no"), Entry("vllm", "plain", ours=False, error="no")]
    found = result(**compared(broken, ASKED))
    assert found["ratio_to_best_peer"] == {"overall": None, "ci95": None, "by_category": {}, "ours": None, "peer": None}
    assert "Nothing to compare" in table(found)
    assert "Nothing to compare" in render(PeersReport(found).report())
    json.dumps(found, allow_nan=False)


def table(found: dict[str, Any]) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    PeersReport(found).print(console)
    shown = console.export_text()
    assert all(len(line) <= 100 for line in shown.splitlines())
    return shown


# --- what runs where


def test_peers_by_name() -> None:
    assert [peer.name for peer in choose(None)] == list(PEERS)
    assert [peer.name for peer in choose(["llama.cpp", "VLLM", "vllm"])] == ["llama-cpp-python", "vllm"]
    with pytest.raises(BadInput, match="did you mean 'openvino-genai'"):
        choose(["openvino-gen"])
    with pytest.raises(BadInput, match="at least one peer"):
        choose([])


def test_peers_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "find_spec", lambda name: name == "transformers" or None)
    found, skipped = planning.available(choose(None), None)
    assert found == {"transformers": sys.executable}
    assert [one["name"] for one in skipped] == ["llama-cpp-python", "openvino-genai", "vllm"]
    assert skipped[0]["install"] == "pip install llama-cpp-python"
    assert "--vllm-python" in skipped[2]["install"]


def test_vllm_is_found_where_make_peers_puts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / ".peers" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho true\n")
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert planning.available([PEERS["vllm"]], None)[0] == {"vllm": str(python)}
    with pytest.raises(BadInput, match="has no vllm"):
        planning.available([PEERS["vllm"]], sys.executable)
    with pytest.raises(BadInput, match="does not run"):
        planning.available([PEERS["vllm"]], __file__)


def test_a_dtype_that_this_cpu_lacks_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_computes_in", lambda name: name == "float32")
    found, notes = weights.precisions(["bfloat16", "float32", "int8"], "smollm2")
    assert found == ["float32", "int8"]
    assert notes == ["this CPU does not compute in bfloat16: float32 instead"]
    assert weights.float_of(["int8"]) == ("float32", notes)
    with pytest.raises(BadInput, match="did you mean 'int8'"):
        weights.precisions(["int88"], "smollm2")


def test_a_model_that_is_no_gguf_file_is_said_to_be_none() -> None:
    job = planning.Job(weights.Weights("m", "/m", None, "", True), None, "bfloat16", 1, 256)
    plan = planning.make_plan(job, ["float32"], ["none"], dict.fromkeys(PEERS, sys.executable), [])
    errors = {one.label: one.error for one in plan.entries}
    assert errors["llama-cpp-python plain"] == errors["openvino-genai plain"] == "needs a GGUF file; m is none"
    assert errors["transformers plain"] is None
    assert "transformers draft-model" not in errors, "only with --draft-model"
    assert len(plan.processes) == 6, "ours; transformers twice; vLLM three times"
    assert math.isclose(planning.context_for(200, 100), 512)
