"""The prompts that gates are trained on: those of files, tasks that are made up, or prompts that the model writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence as Seq
from pathlib import Path

from outpace.core.errors import BadInput
from outpace.core.files import home_expanded
from outpace.model import Model
from outpace.prompts.overlap import Overlap
from outpace.prompts.prompt import Prompt
from outpace.prompts.reader import read_prompts
from outpace.prompts.sources import Source
from outpace.prompts.task import ExactAnswer
from outpace.training.gates.tasks import tasks
from outpace.training.self_written import SelfWritten

_WRITTEN = 32
"""Prompts that the model writes at once."""
_FRUITLESS = 8
"""Times in a row that it may write nothing usable."""


def given_tasks(files: Seq[str | Path], excluded: Overlap, seed: int) -> list[Prompt] | None:
    """The tasks of files, in an order that the seed decides; None where no file was given.

    Raises BadInput for files without a task that has a known answer, once the bench's own are left out.
    """
    if not files:
        return None
    found = [prompt for file in files for prompt in read_prompts(home_expanded(file)).values()]
    usable = [one for one in found if isinstance(one.task, ExactAnswer) and one.text not in excluded]
    if not usable:
        raise BadInput(
            f"none of the {len(found)} prompts of {', '.join(map(str, files))} has a known 'answer' and is not one of "
            "the bench's own (or of --exclude); a gate for pad is trained on tasks whose answers can be checked"
        )
    random.Random(seed).shuffle(usable)
    return usable


def task_prompts(given: Seq[Prompt] | None, excluded: Overlap, seed: int) -> Iterator[Prompt]:
    """Tasks: those that were given, else made-up ones without end."""
    return iter(given) if given is not None else (one for one in tasks(seed) if one.text not in excluded)


def open_prompts(
    model: Model, sources: Seq[Source], excluded: Overlap, seed: int, over: Callable[[], bool]
) -> Iterator[Prompt]:
    """The prompts of sources, and where there are none, prompts that the model writes, without end."""
    for one in sources:
        yield from (prompt for prompt in one if prompt.text not in excluded)
    if sources:
        return
    writer, start, fruitless = SelfWritten(model, seed), 0, 0
    while not over() and fruitless < _FRUITLESS:
        written = [one for one in writer.turns(start, _WRITTEN, _WRITTEN, over) if one.text not in excluded]
        start, fruitless = start + _WRITTEN, 0 if written else fruitless + 1
        yield from written
