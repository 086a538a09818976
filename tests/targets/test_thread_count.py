"""How many threads a forward uses beside busy neighbours, and that its results do not depend on it."""

from __future__ import annotations

import random
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dense_support import KEPT_IN_BLOCKS, PRECISIONS, Plain, target_of, threads
from outpace.targets.dense import kernel_build
from target_suite import random_tokens, random_tree

# Reads lines "threads seconds work now" (0 threads: ask only) and prints the number for the next forward after each.
_PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "thread_count.h"
int main(int, char** arguments) {
    outpace::ThreadCount count(std::atoi(arguments[1]));
    double seconds, work, now;
    int threads;
    while (std::scanf("%d %lf %lf %lf", &threads, &seconds, &work, &now) == 4) {
        if (threads) count.record(threads, seconds, work, now);
        std::printf("%d\\n", count.next(now));
        std::fflush(stdout);
    }
}
"""

Machine = Callable[[int, float], tuple[float, float]]
"""Seconds of a forward and of its threads' work, by number of threads and time."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thread_count")
    source, program = folder / "main.cpp", folder / "main"
    source.write_text(_PROGRAM)
    command = [*kernel_build._compiler(), "-std=c++17", f"-I{shlex.quote(str(kernel_build.SOURCE))}"]
    subprocess.run([*command, str(source), "-o", str(program)], check=True)
    return program


def chosen(program: Path, most: int, machine: Machine, forwards: int) -> list[tuple[int, float]]:
    """The number of threads of each forward and when it began."""
    with subprocess.Popen(
        [program, str(most)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as running:
        assert running.stdin is not None and running.stdout is not None

        def say(line: str) -> int:
            assert running.stdin is not None and running.stdout is not None
            running.stdin.write(line + "\n")
            return int(running.stdout.readline())

        now, found = 0.0, []
        threads = say("0 0 0 0")
        for _ in range(forwards):
            found.append((threads, now))
            seconds, work = machine(threads, now)
            now += seconds
            threads = say(f"{threads} {seconds} {work} {now}")
        running.stdin.close()
    return found


def quiet(threads: int, now: float) -> tuple[float, float]:
    """Eight milliseconds of work, shared out well."""
    return 0.008 / threads, 0.008


def neighbour(cores: int) -> Machine:
    """One core is a busy neighbour's for half of the time: threads on all cores wait for the one there."""

    def machine(threads: int, now: float) -> tuple[float, float]:
        alone = 0.008 / threads
        return (alone, 0.008) if threads < cores else (2 * alone + 0.003, 0.008)

    return machine


def test_a_quiet_machine_uses_all_threads(program: Path) -> None:
    assert {threads for threads, _ in chosen(program, 2, quiet, 200)} == {2}
    assert {threads for threads, _ in chosen(program, 8, quiet, 200)} == {8}
    assert {threads for threads, _ in chosen(program, 1, quiet, 20)} == {1}


@pytest.mark.parametrize("most", [2, 8])
def test_a_busy_neighbour_gets_its_core(program: Path, most: int) -> None:
    found = [threads for threads, _ in chosen(program, most, neighbour(most), 1500)]
    assert found[:3] == [most, most, most - 1]
    # Trying again takes a few forwards, ever fewer.
    assert found.count(most) <= 60 and set(found) == {most, most - 1}


def test_one_long_forward_changes_nothing(program: Path) -> None:
    def machine(threads: int, now: float) -> tuple[float, float]:
        return (0.1, 0.008) if 0.1 < now < 0.104 else quiet(threads, now)

    assert {threads for threads, _ in chosen(program, 2, machine, 200)} == {2}


def test_all_threads_are_back_soon_after_the_neighbour_has_gone(program: Path) -> None:
    def machine(threads: int, now: float) -> tuple[float, float]:
        return (neighbour(4) if now < 2 else quiet)(threads, now)

    found = chosen(program, 4, machine, 3000)
    assert any(threads == 3 for threads, now in found if now < 2)
    assert {threads for threads, now in found if now > 3.0} == {4}


def test_several_neighbours(program: Path) -> None:
    """Six of eight cores are taken: whoever uses more than two threads waits."""
    found = [threads for threads, _ in chosen(program, 8, neighbour_of_six, 600)]
    assert found[-20:].count(2) >= 18


def neighbour_of_six(threads: int, now: float) -> tuple[float, float]:
    return (0.008 / threads, 0.008) if threads <= 2 else (0.008 / threads + 0.008, 0.008)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_results_do_not_depend_on_the_number_of_threads(precision: str) -> None:
    rng = random.Random(4)
    target = target_of(KEPT_IN_BLOCKS[0], precision)
    prompt, tree = random_tokens(70, rng), random_tree(21, rng)
    expected = Plain(target, prompt).tree(tree)
    for count in (8, 2, 5, 1, 8, 3):
        with threads(count):
            sequence = target.sequence(prompt)
            target.prefill([sequence])
            for _ in range(5):
                assert torch.equal(target.score([(sequence, tree)])[0].logits, expected)
            target.close(sequence.kv)
