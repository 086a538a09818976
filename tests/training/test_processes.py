"""Two processes that train one head (gloo): equal to one, and resumable after one of them has died."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import outpace
from outpace.training.processes import Processes, started_together
from test_trainer import made, weights

HERE = Path(__file__).parent
PLACES = (HERE, HERE.parent, Path(outpace.__file__).parents[1])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def started(folder: Path, dies_at: int = 0, resume: bool = False) -> list[subprocess.CompletedProcess[str]]:
    """Run both processes to their ends."""
    folder.mkdir(exist_ok=True)
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, PLACES)),
    }
    command = [sys.executable, str(HERE / "one_of_two.py"), str(folder), str(dies_at), "resume" if resume else "new"]
    running = [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = []
    try:
        for one in running:
            out, err = one.communicate(timeout=120)
            ended.append(subprocess.CompletedProcess(command, one.returncode, out, err))
    finally:
        for one in running:
            one.kill()
    return ended


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = started_together("cpu")
    assert (alone.rank, alone.count, alone.first) == (0, 1, True)
    assert alone.of_first(0.25) == 0.25
    alone.wait()
    assert torch.equal(Processes().mean(torch.arange(3.0)), torch.arange(3.0))


def test_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    one = made(tmp_path / "one", accumulate=2)
    one.run()
    ended = started(tmp_path / "two")
    assert [process.returncode for process in ended] == [0, 0], ended
    first, second = (torch.load(tmp_path / "two" / f"rank{rank}.pt") for rank in range(2))
    assert first["tokens"] == second["tokens"] == one.progress.tokens
    for name, value in weights(one).items():
        assert torch.equal(first["weights"][name], second["weights"][name]), name
        torch.testing.assert_close(first["weights"][name], value, atol=2e-3, rtol=2e-3)


def test_a_training_goes_on_after_a_process_has_died(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    ended = started(folder, dies_at=4)
    assert [process.returncode for process in ended] == [2, 9], ended
    assert "another process of this training has ended" in ended[0].stdout
    assert "--resume" in ended[0].stdout and ended[0].stdout.count("\n") == 1
    assert [process.returncode for process in started(folder, resume=True)] == [0, 0]
    one = made(tmp_path / "one", accumulate=2)
    one.run()
    found = torch.load(folder / "rank0.pt")
    for name, value in weights(one).items():
        torch.testing.assert_close(found["weights"][name], value, atol=2e-3, rtol=2e-3)
