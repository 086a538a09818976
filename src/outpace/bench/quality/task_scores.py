"""Whether answers are right: exact match of the final answer, or pass@1 of a function's tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from outpace.bench.quality import sandbox
from outpace.bench.quality.program import program_of, syntax_error
from outpace.core.errors import BadInput
from outpace.prompts.final_answer import final_answer, is_right
from outpace.prompts.prompt import Prompt
from outpace.prompts.task import CodeTests, Task


def check_tasks(prompts: Sequence[Prompt]) -> None:
    """Raise BadInput for tests that could never pass: they are not Python, or do not define ``check``."""
    for prompt in prompts:
        if isinstance(prompt.task, CodeTests):
            wrong = syntax_error(prompt.task.tests)
            if wrong is None and "check" not in prompt.task.tests:
                wrong = "it does not define check(candidate)"
            if wrong is None and not prompt.task.entry_point.isidentifier():
                raise BadInput(f"prompt '{prompt.id}': 'entry_point' is not the name of a function: {_cut(prompt)}")
            if wrong is not None:
                raise BadInput(f"prompt '{prompt.id}': 'test' cannot be run: {wrong}; correct the row, or leave it out")


def _cut(prompt: Prompt) -> str:
    assert isinstance(prompt.task, CodeTests)
    return repr(prompt.task.entry_point[:40])


def scorable(task: Task | None) -> bool:
    """Whether an answer to the task can be scored on this machine."""
    return task is not None and (not isinstance(task, CodeTests) or sandbox.can_confine())


def score(task: Task, answer: str) -> bool | None:
    """Whether the answer is right; None where it gives no final answer, or no program, which counts as wrong."""
    if isinstance(task, CodeTests):
        program = program_of(task, answer)
        return None if program is None else _passes(program, task.tests, task.entry_point)
    final = final_answer(answer, task)
    return None if final is None else is_right(final, task)


@lru_cache(maxsize=1024)
def _passes(program: str, tests: str, entry_point: str) -> bool:
    """Methods often give the same answer to a prompt: it is run once."""
    return sandbox.run_tests(program, tests, entry_point) == "passed"
