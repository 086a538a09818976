"""Questions for bench and certification: the embedded set or a file; limits, batches, unique ids.

>>> [prompt.category for prompt in load_prompts(limit=3)]
['chat', 'translation', 'summarisation']

The embedded set (``data/*.jsonl``, written for outpace) has six prompts in each of seven groups: chat, translation,
summarisation, qa, math, rag and code-editing. Beside it stands a set of sixty prompts with grammars, ``structured``
(extraction, arguments of functions, SQL, lists and edits in JSON), and ``software``, eighteen prompts about code of the
categories generation, repair and edit; both are asked only by name. Questions in Spec-Bench's format keep these names
where the task is the same: its eight MT-bench categories are ``chat``, ``summarization`` is ``summarisation`` and
``math_reasoning`` is ``math``. Every JSON format may name any category of its own; without one it is ``other``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import resources
from itertools import zip_longest
from pathlib import Path

from outpace.core.errors import BadInput
from outpace.prompts.prompt import OTHER, Prompt
from outpace.prompts.reader import read_prompts

GROUPS = ("chat", "translation", "summarisation", "qa", "math", "rag", "code-editing")
"""The groups of the embedded set, in the order in which tables list them."""
NAMED = (*GROUPS, "structured", "software")
"""What can be named in place of a file: a group of the embedded set, the prompts with grammars, those about code."""


def load_prompts(path: str | Path | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, of a name in :data:`NAMED`, or the embedded set. A file counts before a name. ``limit``
    keeps that many, taken from all categories in turn.

    Raises BadInput for a file that cannot be read, holds nothing, or has a bad line (which it names).
    """
    if limit is not None and limit < 1:
        raise BadInput(f"the limit on prompts must be at least 1, not {limit}")
    if path is None:
        prompts = _embedded(GROUPS)
    elif str(path) in NAMED and not Path(path).exists():
        prompts = _embedded([str(path)])
    else:
        prompts = list(read_prompts(Path(path)).values())
    return prompts if limit is None else stratified(prompts, limit)


def prompts_of(given: Sequence[Prompt | str] | str | Path | None, limit: int | None = None) -> list[Prompt]:
    """Prompts as callers give them: questions or texts, the path of a file, or None for the embedded set.

    ``limit`` and errors as for :func:`load_prompts`.
    """
    if given is None or isinstance(given, str | Path):
        return load_prompts(given, limit)
    found = [Prompt(f"prompt-{i}", OTHER, (one,)) if isinstance(one, str) else one for i, one in enumerate(given, 1)]
    return found if limit is None else stratified(found, limit)


def without_grammars(prompts: Sequence[Prompt], where: str) -> Sequence[Prompt]:
    """The prompts. Raises BadInput for one with a grammar, which ``where`` would not hold its answers to."""
    if held := next((prompt for prompt in prompts if prompt.grammar is not None), None):
        raise BadInput(
            f"{where} decodes without grammars, and prompt '{held.id}' has one; leave out such prompts (bench and "
            "eval-head take them)"
        )
    return prompts


def stratified(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The first prompt of every category, then the second of every category, and so on: at most ``limit``."""
    turns = zip_longest(*_by_category(prompts))
    return [prompt for turn in turns for prompt in turn if prompt is not None][:limit]


def _by_category(prompts: Iterable[Prompt]) -> list[list[Prompt]]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return list(groups.values())


def unique(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts with ids of their own: records are kept by id."""
    seen: dict[str, int] = defaultdict(int)
    own = {prompt.id for prompt in prompts}
    named = []
    for prompt in prompts:
        name, first = prompt.id, not seen[prompt.id]
        seen[prompt.id] += 1
        while not first and name in own:
            name = f"{prompt.id}#{seen[prompt.id]}"
            seen[prompt.id] += name in own
        own.add(name)
        named.append(prompt if name == prompt.id else replace(prompt, id=name))
    return named


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Batches of one category where possible, categories in turn, so that a bench cut short has seen them all."""
    line = [prompt for group in _by_category(prompts) for prompt in group]
    cut: dict[str, list[list[Prompt]]] = {}
    for begin in range(0, len(line), size):
        cut.setdefault(line[begin].category, []).append(line[begin : begin + size])
    return [batch for turn in zip_longest(*cut.values()) for batch in turn if batch is not None]


def bench_texts(files: Iterable[Path] = ()) -> list[str]:
    """What benches ask: every user turn of the embedded sets and of ``files``. Raises BadInput for a bad file."""
    prompts = _embedded(NAMED)
    for file in files:
        prompts += read_prompts(file, strict=False).values()
    return [text for prompt in prompts for text in prompt.user_texts]


def _embedded(groups: Iterable[str]) -> list[Prompt]:
    with resources.as_file(resources.files("outpace.prompts") / "data") as folder:
        return [prompt for group in groups for prompt in read_prompts(folder / f"{group}.jsonl").values()]
