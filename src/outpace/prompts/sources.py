"""Sources of prompts to be answered for training: files and data sets of the hub.

The target itself is one more, in :mod:`outpace.training.self_written`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput, MissingExtra
from outpace.core.files import home_expanded
from outpace.prompts.prompt import Prompt
from outpace.prompts.reader import FORMATS, WANTED, prompt_of, read_prompts

_HUB = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?(:[^:\s]*){0,2}")
_SHUFFLED = 10_000
"""Rows of a hub data set that are shuffled together while it streams in."""


class Source:
    """Prompts, in a fixed order, with ids ``name:number``; iteration may have no end."""

    name: str

    def __iter__(self) -> Iterator[Prompt]:
        raise NotImplementedError


class FileSource(Source):
    """What the user says in a file's prompts (:meth:`Prompt.asked`), shuffled by ``seed``.

    Raises BadInput for a file that cannot be read or has no usable row.
    """

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.name = path.name
        self._prompts = [prompt.asked(f"{path.name}:{at}") for at, prompt in read_prompts(path, strict=False).items()]
        random.Random(seed).shuffle(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)


class HubSource(Source):
    """A data set of the hub, ``NAME[:CONFIG[:SPLIT]]``, streamed. Needs the extra ``train``.

    Raises MissingExtra without that, and BadInput where the data set cannot be read or has no usable row.
    """

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name, self._seed = name, seed
        self._rows = self._opened()

    def _opened(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise MissingExtra(f"'{self.name}' is no file here; reading it as a data set of the hub", "train") from None
        from outpace.models.quiet import one_line

        repository, config, split = [*self.name.split(":"), "", ""][:3]
        try:
            datasets.disable_progress_bars()
            if not split:
                splits = datasets.get_dataset_split_names(repository, config or None)
                split = next((one for one in splits if str(one).startswith("train")), splits[0])
            found = datasets.load_dataset(repository, config or None, split=split, streaming=True)
            return found.shuffle(seed=self._seed, buffer_size=_SHUFFLED)
        except Exception as error:  # the library's own errors, those of the network, and what data sets raise
            raise BadInput(
                f"there is no file '{self.name}', and as a data set of the hub it cannot be read: {one_line(error)}"
            ) from error

    def __iter__(self) -> Iterator[Prompt]:
        from outpace.models.quiet import one_line

        usable, number, columns = 0, 0, ""
        rows = iter(self._rows)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # the network, in the middle of it
                raise BadInput(
                    f"data set '{self.name}' ended after {number} rows: {one_line(error)}; continue with --resume"
                ) from error
            if row is None:
                break
            number += 1
            columns = columns or ", ".join(map(str, row))
            try:
                found = prompt_of(row, number, strict=False)
            except ValueError:
                if not usable and number >= _SHUFFLED:
                    break
            else:
                usable += 1
                yield found.asked(f"{self.name}:{number}")
        if not usable:
            raise BadInput(f"data set '{self.name}' has no usable rows: its columns are {columns or 'none'}; {WANTED}")


def source(name: str, seed: int = 0) -> Source:
    """The prompts that a person named: a file, or a data set of the hub. Raises BadInput for what is neither."""
    path = home_expanded(name)
    if path.exists() or path.suffix.lower() in FORMATS or not _HUB.fullmatch(name):
        return FileSource(path, seed)
    return HubSource(name, seed)
