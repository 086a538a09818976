"""Batches of conversations for training: split, cut into windows, shuffled the same way for the same seed.

Where a shard has no hidden states of a layer, the target computes them again from the tokens, each time the
conversation is read: slower, but without disk.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.heads.base import Batch
from outpace.targets.base import Target
from outpace.training.answers import states_of
from outpace.training.shards import Conversation, Shards

HELD_OUT = 50
"""One prompt in so many is held out."""
OVERLAP = 32
"""Tokens of context that a window takes from the one before."""
POOL = 4
"""Shards that are shuffled together."""


def held_out(key: str) -> bool:
    """Whether the prompt of this key belongs to the held-out split; its key alone decides."""
    return int.from_bytes(hashlib.sha256(f"held out {key}".encode()).digest()[:4], "big") % HELD_OUT == 0


def _trained_on(key: str) -> bool:
    return not held_out(key)


class TrainingData(Protocol):
    """What the trainer learns from: a :class:`Dataset`, or what stands in for one."""

    def answer_tokens(self) -> int:
        """Tokens of answers in a pass."""
        ...

    def train(self, epoch: int) -> Iterator[Batch]:
        """One pass, the same for the same ``epoch``."""
        ...

    def held_out(self) -> Iterator[Batch]:
        """Batches that are never trained on, the same every time."""
        ...


class Dataset:
    """The conversations of ``shards`` in batches, with hidden states of ``layers``.

    ``window``: tokens in a row, at most; ``tokens``: positions in a batch, about. ``target`` computes the hidden states
    that shards lack; without it a shard that lacks some raises BadInput.
    """

    def __init__(
        self,
        shards: Shards,
        layers: Sequence[int],
        *,
        window: int = 512,
        tokens: int = 2048,
        target: Target | None = None,
    ) -> None:
        self.shards, self.layers, self.target = shards, tuple(layers), target
        self.window, self.tokens = window, tokens

    def words(self, count: int, vocab_size: int, always: Sequence[int] = ()) -> Tensor:
        """The ``count`` tokens that the target's answers use most, ``always`` among them; ascending (count,) long.

        Ties go to lower ids, which are the more frequent ones in byte-level vocabularies.
        """
        uses = torch.zeros(vocab_size, dtype=torch.long)
        for path in self.shards.paths:
            for one in self.shards.read(path, wanted=_trained_on):
                uses += torch.bincount(torch.tensor(one.answer), minlength=vocab_size)[:vocab_size]
        uses[list(always)] = int(uses.max()) + 1
        return uses.argsort(descending=True, stable=True)[:count].sort().values

    def answer_tokens(self) -> int:
        return sum(len(one.answer) for path in self.shards.paths for one in self.shards.read(path, wanted=_trained_on))

    def train(self, epoch: int) -> Iterator[Batch]:
        order = random.Random(epoch)
        paths = self.shards.paths
        order.shuffle(paths)
        for start in range(0, len(paths), POOL):
            windows = [one for path in paths[start : start + POOL] for one in self._windows(path, False)]
            order.shuffle(windows)
            yield from self._batches(windows, order)

    def held_out(self) -> Iterator[Batch]:
        for path in self.shards.paths:
            yield from self._batches(list(self._windows(path, True)), random.Random(0))

    def _windows(self, path: Path, wanted: bool) -> Iterator[tuple[Conversation, int, int]]:
        """(conversation, start, stop) of every row, in tokens; a long conversation makes several rows that overlap.

        ``wanted``: of the held-out split, or of the training split.
        """
        found = list(self.shards.read(path, self.layers, held_out if wanted else _trained_on))
        self._complete(path, found)
        for one in found:
            start, end = 0, len(one.tokens)
            while start + OVERLAP < end or start == 0:
                stop = min(end, start + self.window)
                if stop > len(one.prompt):  # a window within the prompt has no answer to learn
                    yield one, start, stop
                start += self.window - OVERLAP

    def _complete(self, path: Path, found: list[Conversation]) -> None:
        """Let the target compute the hidden states that are missing. Raises BadInput where there is no target."""
        missing = sorted({layer for one in found for layer in self.layers if layer not in one.states})
        if not missing:
            return
        if self.target is None:
            raise BadInput(f"{path} has no states of layers {missing}")
        for one, states in zip(found, states_of(self.target, found, missing), strict=True):
            one.states |= states

    def _batches(self, windows: list[tuple[Conversation, int, int]], order: random.Random) -> Iterator[Batch]:
        windows = sorted(windows, key=lambda one: one[2] - one[1])  # rows of about the same length, for little padding
        groups: list[list[tuple[Conversation, int, int]]] = [[]]
        for one in windows:
            if groups[-1] and (len(groups[-1]) + 1) * (one[2] - one[1]) > self.tokens:
                groups.append([])
            groups[-1].append(one)
        order.shuffle(groups)
        yield from (self._batch(group) for group in groups if group)

    def _batch(self, group: list[tuple[Conversation, int, int]]) -> Batch:
        longest = max(stop - start for _, start, stop in group)
        tokens = torch.zeros(len(group), longest, dtype=torch.long)
        real = torch.zeros(len(group), longest, dtype=torch.bool)
        answer = torch.zeros_like(real)
        states = {
            layer: torch.zeros(len(group), longest, rows.shape[-1], dtype=rows.dtype)
            for layer, rows in group[0][0].states.items()
        }
        for row, (one, start, stop) in enumerate(group):
            size = stop - start
            tokens[row, :size] = torch.tensor(one.tokens[start:stop])
            real[row, :size] = True
            # Answer tokens that the window before has predicted are context here.
            answer[row, max(len(one.prompt) - start, OVERLAP if start else 0) : size] = True
            for layer, rows in one.states.items():
                states[layer][row, :size] = rows[start:stop]
        return Batch(tokens, states, real, answer)
