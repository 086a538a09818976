"""Two processes that train one head (gloo): equal to one, and resumable after one of them has died."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import outpace
from outpace.training.processes import LostProcess, Processes, started_together, take_own_gpu
from outpace.training.run import train_to_the_end
from outpace.training.run_state import read_state
from outpace.training.sharded_optimiser import dealt
from test_trainer import made, weights

HERE = Path(__file__).parent
PLACES = (HERE, HERE.parent, Path(outpace.__file__).parents[1])


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def started(folder: Path, dies_at: int = 0, *words: str) -> list[subprocess.CompletedProcess[str]]:
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
    command = [sys.executable, str(HERE / "one_of_two.py"), str(folder), str(dies_at), *words]
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


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    take_own_gpu()
    assert taken == []
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank in ("0", "3"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        take_own_gpu()
    assert taken == [0, 3]


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
    assert [process.returncode for process in started(folder, 0, "resume")] == [0, 0]
    one = made(tmp_path / "one", accumulate=2)
    one.run()
    found = torch.load(folder / "rank0.pt")
    for name, value in weights(one).items():
        torch.testing.assert_close(found["weights"][name], value, atol=2e-3, rtol=2e-3)


def test_a_process_that_dies_between_saves_costs_no_step(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    ended = started(folder, 4, "seldom")
    assert [process.returncode for process in ended] == [2, 9], ended
    state = read_state(folder)
    assert state is not None
    assert (state["progress"]["step"], state["progress"]["tokens"]) == (4, 4 * 2 * 20)
    assert [process.returncode for process in started(folder, 0, "resume")] == [0, 0]
    one = made(tmp_path / "one", accumulate=2)
    one.run()
    found = torch.load(folder / "rank0.pt")
    assert found["tokens"] == one.progress.tokens
    for name, value in weights(one).items():
        torch.testing.assert_close(found["weights"][name], value, atol=2e-3, rtol=2e-3)


class Lost(Processes):
    """A process whose companion dies when it is asked for the ``at``-th time."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def total(self, count: int) -> int:
        self.left -= 1
        if self.left == 0:
            raise LostProcess("it has ended")
        return count


def test_a_step_in_which_a_process_dies_is_made_again(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", accumulate=2)
    whole.run()
    first = made(tmp_path / "d", accumulate=2, processes=Lost(3))
    with pytest.raises(LostProcess):
        train_to_the_end(first, tmp_path / "d", lambda _: None)
    second = made(tmp_path / "d", accumulate=2)
    assert second.resume()
    assert (second.progress.step, second.progress.batch) == (2, 4)
    second.run()
    assert second.progress.tokens == whole.progress.tokens
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name


def test_an_optimiser_that_is_shared_out_makes_the_same_steps(tmp_path: Path) -> None:
    one = made(tmp_path / "one", accumulate=2)
    one.run()
    folder = tmp_path / "two"
    ended = started(folder, 0, "shard")
    assert [process.returncode for process in ended] == [0, 0], ended
    first, second = (torch.load(folder / f"rank{rank}.pt") for rank in range(2))
    size = sum(value.numel() for value in weights(one).values())
    assert first["copies"] + second["copies"] == size
    assert max(first["copies"], second["copies"]) < 0.6 * size
    for name, value in weights(one).items():
        assert torch.equal(first["weights"][name], second["weights"][name]), name
        torch.testing.assert_close(first["weights"][name], value, atol=2e-3, rtol=2e-3)
    alone = made(tmp_path / "two", epochs=4.0, accumulate=2)  # what two have saved, one goes on with, and the other way
    assert alone.resume()
    for name, value in weights(alone).items():
        assert torch.equal(first["weights"][name], value), name
    shared, whole = read_state(folder), read_state(tmp_path / "one")
    assert shared is not None and whole is not None
    for ours, theirs in zip(shared["optimisers"], whole["optimisers"], strict=True):
        assert ours["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]
        assert ours["state"].keys() == theirs["state"].keys()
        for number, moments in theirs["state"].items():
            for name, value in moments.items():
                torch.testing.assert_close(ours["state"][number][name], value, atol=2e-3, rtol=2e-3)


def test_a_shared_out_training_goes_on_after_a_process_has_died(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    ended = started(folder, 4, "shard")
    assert [process.returncode for process in ended] == [2, 9], ended
    assert ended[0].stdout.count("\n") == 1
    assert [process.returncode for process in started(folder, 0, "resume", "shard")] == [0, 0]
    one = made(tmp_path / "one", accumulate=2)
    one.run()
    found = torch.load(folder / "rank0.pt")
    for name, value in weights(one).items():
        torch.testing.assert_close(found["weights"][name], value, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_weights_are_dealt_by_their_sizes(count: int) -> None:
    sizes = [9, 100, 7, 40, 60, 3, 1]
    owners = dealt(sizes, count)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(count)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= max(100, sum(sizes) / count + 60)
