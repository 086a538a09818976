"""Ray itself: replicas and workers that are killed, for real, with the embedded model. Takes minutes.

make ray
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from ray_replicas import Ended, account, asked, conversations, replicas, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(
        find_spec("ray") is None and not os.environ.get("OUTPACE_RAY"),  # set by make ray, which installs it
        reason="ray is not installed: make ray, or pip install 'outpace[serve,ray]'",
    ),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two replicas need two CPUs"),
]
WORKER = "ray::MapWorker"
TWO = ("--model", "smollm2", "--replicas", "2", "--threads", "1")


def text_of(ended: list[Ended]) -> list[str]:
    assert [one.outcome for one in ended] == ["complete"] * len(ended)
    return [one.text for one in ended]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with served((*TWO, "--log-requests"), log) as found:
        yield found
    assert found[1].returncode == 0


def until(true: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.5)


def status(url: str, path: str) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request("GET", path)
    return connection.getresponse().status


def test_every_request_has_its_line_in_the_log(server: tuple[str, subprocess.Popen[bytes]], log: Path) -> None:
    """Also requests that are alike, of which Ray would write one line for several."""
    url, _ = server
    text_of(asked(url, conversations(1, "smollm2", 4) * 24, 4))

    def ids() -> list[str]:
        lines = [line for line in log.read_text().splitlines() if '"event": "request"' in line]
        return [json.loads(line[line.index("{") :])["id"] for line in lines]

    until(lambda: len(ids()) >= 24, 30)
    assert len(set(ids())) == len(ids()) == 24


def running(url: str) -> int:
    """Replicas that answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request("GET", "/ready")
    return int(json.loads(connection.getresponse().read())["replicas"])


@pytest.mark.parametrize("count", [1, 2])
def test_every_request_is_accounted_for_when_replicas_are_killed(
    server: tuple[str, subprocess.Popen[bytes]], count: int
) -> None:
    url, process = server
    until(lambda: running(url) == 2)
    # Questions that nobody has asked: a replica that has answered one may get it again.
    bodies = conversations(16 * count, "smollm2", 48, sampled=True)[-16:]
    undisturbed = asked(url, bodies, 8)
    text_of(undisturbed)
    assert len({one.replica for one in undisturbed}) == 2
    disturbed: list[Ended] = []
    quarter = threading.Event()
    asking = threading.Thread(target=lambda: disturbed.extend(asked(url, bodies, 8, quarter)))
    asking.start()
    quarter.wait()
    for victim in replicas(process)[:count]:
        victim.kill()
    asking.join()
    counts = account(bodies, undisturbed, disturbed)
    assert sum(counts.values()) == len(bodies)
    # An answer that is not streamed always survives, and so does a greedy stream; a sampled one may end with an error.
    assert counts["complete whole"] == len(bodies) // 2
    assert counts["complete stream"] == len(bodies) // 4
    assert set(counts) <= {"complete whole", "complete stream", "complete sampled stream", "broken sampled stream"}
    until(lambda: running(url) == 2)


def test_a_hangup_replaces_all_replicas_while_requests_are_answered(
    server: tuple[str, subprocess.Popen[bytes]],
) -> None:
    url, process = server
    until(lambda: running(url) == 2)
    before = {one.pid for one in replicas(process)}
    bodies = conversations(8, "smollm2", 16)
    expected = text_of(asked(url, bodies, 4))
    process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 240
    while before & {one.pid for one in replicas(process)}:
        assert time.monotonic() < end
        assert text_of(asked(url, bodies, 2)) == expected
    assert status(url, "/ready") == 200
    assert text_of(asked(url, bodies, 4)) == expected


def test_a_server_that_is_told_to_end_finishes_its_answers(server: tuple[str, subprocess.Popen[bytes]]) -> None:
    """The last test of this server."""
    url, process = server
    until(lambda: running(url) == 2)
    started = psutil.Process(process.pid).children(recursive=True)
    bodies = conversations(8, "smollm2", 64)
    expected = text_of(asked(url, bodies, 8))
    ended: list[Ended] = []
    quarter = threading.Event()
    asking = threading.Thread(target=lambda: ended.extend(asked(url, bodies, 8, quarter)))
    asking.start()
    quarter.wait()
    process.send_signal(signal.SIGTERM)
    asking.join()
    assert text_of(ended) == expected
    assert process.wait(120) == 0
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


def batch(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    given = [str(folder / "in.jsonl"), str(folder / "out.jsonl"), "--replicas", "2", "--threads", "1", "-n", "8"]
    command = [sys.executable, "-m", "outpace", "generate", "--ray", *given, *more]
    return subprocess.Popen(command, start_new_session=True)


def begun(folder: Path) -> int:
    """Results so far."""
    partial = folder / "out.jsonl.partial"
    return max(0, partial.read_bytes().count(b"\n") - 1) if partial.exists() else 0


def rows(folder: Path, count: int = 32) -> Path:
    folder.mkdir()
    asked = [body["messages"][0]["content"] for body in conversations(count, "smollm2", 1)]
    lines = [json.dumps({"id": f"q{number}", "prompt": text}) for number, text in enumerate(asked)]
    (folder / "in.jsonl").write_text("\n".join([*lines, '{"id": "bad"}']) + "\n")
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of a batch that nothing disturbs."""
    quiet = rows(tmp_path_factory.mktemp("batch") / "quiet")
    assert batch(quiet).wait(600) == 1  # one row has no prompt
    text = (quiet / "out.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert [one["id"] for one in found] == [*(f"q{number}" for number in range(32)), "bad"]
    assert "error" in found[-1]
    assert all(one["usage"]["completion_tokens"] == 8 or one["finish_reason"] == "stop" for one in found[:-1])
    return text


def test_a_batch_has_the_same_output_when_a_worker_is_killed(tmp_path: Path, expected: str) -> None:
    killed = rows(tmp_path / "killed")
    process = batch(killed)
    until(lambda: begun(killed) > 8, 300)
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [one for one in children if " ".join(one.cmdline()).startswith(WORKER)]
    workers[0].kill()
    assert process.wait(600) == 1
    assert (killed / "out.jsonl").read_text() == expected


def test_a_batch_goes_on_after_ctrl_c(tmp_path: Path, expected: str) -> None:
    cut = rows(tmp_path / "cut")
    process = batch(cut)
    until(lambda: begun(cut) > 8, 300)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    kept = begun(cut)
    assert 8 < kept < 33
    assert not (cut / "out.jsonl").exists()
    assert batch(cut).wait(120) == 2  # without --resume
    assert begun(cut) == kept
    assert batch(cut, "--resume").wait(600) == 1
    assert (cut / "out.jsonl").read_text() == expected
