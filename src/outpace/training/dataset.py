"""Batches of conversations for training: split, cut into rows, shuffled the same way for the same seed.

A row is a whole conversation, or where that is longer than ``window`` a part of it. Rows of a batch stand side by side,
padded at their ends, or packed end to end without padding.

Where a shard has no hidden states of a layer, the target computes them again from the tokens, each time the
conversation is read: slower, but without disk.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.heads.base import Batch
from outpace.targets.base import Target
from outpace.training.answers import states_of
from outpace.training.prefetch import prefetched
from outpace.training.shards import Conversation

HELD_OUT = 50
"""One prompt in so many is held out."""
OVERLAP = 32
"""Tokens of context that a row takes from the one before, of the same conversation."""
POOL = 4
"""Shards that are shuffled together."""
WINDOW = 2048
"""Tokens of a row, at most."""
BATCH = 2048
"""Positions of a batch, about."""


States = Callable[[Sequence[Conversation], Sequence[int]], list[dict[int, Tensor]]]
"""Hidden states (tokens, hidden) by layer of conversations, from elsewhere than the target."""


Own = Callable[[int], bool]
"""Whether the batch of this number in a pass is this process's."""


def every(number: int) -> bool:
    """All batches are this process's."""
    return True


def held_out(key: str) -> bool:
    """Whether the prompt of this key belongs to the held-out split; its key alone decides."""
    return int.from_bytes(hashlib.sha256(f"held out {key}".encode()).digest()[:4], "big") % HELD_OUT == 0


def _trained_on(key: str) -> bool:
    return not held_out(key)


class TrainingData(Protocol):
    """What the trainer learns from: a :class:`Dataset`, or what stands in for one."""

    @property
    def cut(self) -> list[int]:
        """What decides how a pass over the same conversations is cut into batches."""
        ...

    @property
    def reading(self) -> float:
        """Seconds that a token of answers has taken to be read, its states to be computed where they are not kept; 0
        where that is done beside training."""
        ...

    def answer_tokens(self) -> int:
        """Tokens of answers in a pass."""
        ...

    def train(self, epoch: int, skip: int = 0, own: Own = every) -> Iterator[Batch]:
        """One pass, the same for the same ``epoch``, without its first ``skip`` batches. Those whose number in the pass
        is not ``own`` are another process's: they need not be made ready for training."""
        ...

    def held_out(self) -> Iterator[Batch]:
        """Batches that are never trained on, the same every time: those that the loss is watched on."""
        ...

    def all_held_out(self) -> Iterator[Batch]:
        """The whole held-out split."""
        ...


class Conversations(Protocol):
    """Where conversations are read from: :class:`~outpace.training.shards.Shards`, or what stands in for them."""

    @property
    def paths(self) -> list[Path]:
        """Files, in order."""
        ...

    def read(
        self, path: Path, layers: Sequence[int] = (), wanted: Callable[[str], bool] = lambda _: True
    ) -> Iterator[Conversation]:
        """The conversations of one file whose key is ``wanted``, with states of ``layers`` where it has them."""
        ...


class Row(NamedTuple):
    """Tokens ``start`` to ``stop`` of a conversation, those before ``context`` for context alone."""

    conversation: Conversation
    start: int
    stop: int
    context: int

    @property
    def size(self) -> int:
        """Tokens."""
        return self.stop - self.start

    def answer(self) -> Tensor:
        """(size,) bool: tokens that the target wrote, and that no earlier row has asked for."""
        asked = torch.zeros(self.stop, dtype=torch.bool)
        for begin, end in self.conversation.answers:
            asked[max(begin, self.context) : end] = True
        return asked[self.start :]


class Dataset:
    """The conversations of ``shards`` in batches, with hidden states of ``layers``.

    ``window``: tokens in a row, at most; ``tokens``: positions in a batch, about; ``pack``: whether rows are packed end
    to end. ``sample``: tokens of held-out answers that :meth:`held_out` gives, 0 for all. ``prefetch``: batches of a
    pass that are made ahead, in another thread. ``target`` computes the hidden states that shards lack, or ``served``
    gives them, from any thread; without either a shard that lacks some raises BadInput.
    """

    def __init__(
        self,
        shards: Conversations,
        layers: Sequence[int],
        *,
        window: int = WINDOW,
        tokens: int = BATCH,
        pack: bool = False,
        sample: int = 0,
        prefetch: int = 0,
        target: Target | None = None,
        served: States | None = None,
    ) -> None:
        self.shards, self.layers, self.target, self._served = shards, tuple(layers), target, served
        self.window, self.tokens, self.pack = window, tokens, pack
        self._sample, self._prefetch = sample, prefetch
        self._kept: list[Batch] | None = None
        self._reading, self._had = 0.0, 0
        """Seconds of reading for training, and the tokens of answers that were read."""

    def words(self, count: int, vocab_size: int, always: Sequence[int] = ()) -> Tensor:
        """The ``count`` tokens that the target's answers use most, ``always`` among them; ascending (count,) long.

        Ties go to lower ids, which are the more frequent ones in byte-level vocabularies.
        """
        uses = torch.zeros(vocab_size, dtype=torch.long)
        for one in self._read(_trained_on):
            tokens = torch.tensor(one.tokens)
            for start, stop in one.answers:
                uses += torch.bincount(tokens[start:stop], minlength=vocab_size)[:vocab_size]
        uses[list(always)] = int(uses.max()) + 1
        return uses.argsort(descending=True, stable=True)[:count].sort().values

    def answer_tokens(self) -> int:
        return sum(one.answer_tokens for one in self._read(_trained_on))

    def _read(self, wanted: Callable[[str], bool]) -> Iterator[Conversation]:
        for path in self.shards.paths:
            yield from self.shards.read(path, wanted=wanted)

    @property
    def cut(self) -> list[int]:
        return [self.window, self.tokens, int(self.pack)]

    @property
    def reading(self) -> float:
        return 0.0 if self._prefetch or not self._had else self._reading / self._had

    def train(self, epoch: int, skip: int = 0, own: Own = every) -> Iterator[Batch]:
        return prefetched(self._pass(epoch, skip, own), self._prefetch)

    def _pass(self, epoch: int, skip: int, own: Own) -> Iterator[Batch]:
        order = random.Random(epoch)
        paths = self.shards.paths
        order.shuffle(paths)
        number = 0
        for start in range(0, len(paths), POOL):
            # The sizes of texts alone tell what the batches are: hidden states are read for the wanted ones.
            texts = {path: list(self.shards.read(path, wanted=_trained_on)) for path in paths[start : start + POOL]}
            rows = [row for some in texts.values() for row in self._cut(some)]
            order.shuffle(rows)
            groups = list(enumerate(self._groups(rows, order), number))
            number += len(groups)
            mine = [row for at, group in groups if at >= skip and own(at) for row in group]
            whole = self._with_states(texts, {id(row.conversation) for row in mine})
            for at, group in groups:
                if at >= skip and own(at):
                    yield self._batch([row._replace(conversation=whole[id(row.conversation)]) for row in group])
                elif at >= skip:
                    yield self._batch(group)

    def _with_states(self, texts: Mapping[Path, Sequence[Conversation]], wanted: Set[int]) -> dict[int, Conversation]:
        """Those of the conversations whose id is ``wanted``, by that id, with their hidden states."""
        began, found = perf_counter(), dict[int, Conversation]()
        for path, some in texts.items():
            keys = {one.key for one in some if id(one) in wanted}
            if not keys:
                continue
            again = self.shards.read(path, self.layers, keys.__contains__)  # several may have a key, in the same order
            pairs = zip((one for one in some if one.key in keys), again, strict=True)
            mine = {id(text): one for text, one in pairs if id(text) in wanted}
            self._complete(path, list(mine.values()), compute=not self._prefetch)
            found |= mine
        self._reading += perf_counter() - began
        self._had += sum(one.answer_tokens for one in found.values())
        return found

    def held_out(self) -> Iterator[Batch]:
        if not self._sample:
            return self.all_held_out()
        if self._kept is None:  # read once: it is asked for again and again
            self._kept = list(self._held_out(self._sampled().__contains__))
        return iter(self._kept)

    def all_held_out(self) -> Iterator[Batch]:
        return self._held_out(held_out)

    def _held_out(self, wanted: Callable[[str], bool]) -> Iterator[Batch]:
        for path in self.shards.paths:
            yield from map(self._batch, self._groups(list(self._rows(path, wanted)), random.Random(0)))

    def _sampled(self) -> set[str]:
        """Keys of held-out conversations with about as many answer tokens as the sample has; their hashes decide."""
        sizes: dict[str, int] = {}
        for one in self._read(held_out):
            sizes[one.key] = sizes.get(one.key, 0) + one.answer_tokens
        found: set[str] = set()
        left = self._sample
        for key in sorted(sizes, key=lambda key: hashlib.sha256(f"sample {key}".encode()).digest()):
            if left <= 0:
                break
            found.add(key)
            left -= sizes[key]
        return found

    def _rows(self, path: Path, wanted: Callable[[str], bool]) -> Iterator[Row]:
        """Rows of a shard's conversations whose key is ``wanted``."""
        found = list(self.shards.read(path, self.layers, wanted))
        self._complete(path, found, compute=True)
        yield from self._cut(found)

    def _cut(self, found: Iterable[Conversation]) -> Iterator[Row]:
        """The rows of conversations; those of a long one overlap."""
        for one in found:
            start, end = 0, len(one.tokens)
            while start + OVERLAP < end or start == 0:
                stop = min(end, start + self.window)
                context = start + OVERLAP if start else 0
                if any(max(first, context) < min(last, stop) for first, last in one.answers):
                    yield Row(one, start, stop, context)  # a row within a prompt has no answer to learn
                start += self.window - OVERLAP

    def _complete(self, path: Path, found: Sequence[Conversation], *, compute: bool) -> None:
        """Get the hidden states that are missing, where ``compute`` says so from the target. Raises BadInput where they
        cannot be had."""
        missing = sorted({layer for one in found for layer in self.layers if layer not in one.states})
        if not missing:
            return
        if self._served is not None:
            for one, states in zip(found, self._served(found, missing), strict=True):
                one.states |= states
            return
        if self.target is None:
            raise BadInput(f"{path} has no states of layers {missing}")
        if not compute:  # it is in use by the training, in another thread
            raise BadInput(
                f"{path} has no states of layers {missing}, and --prefetch reads only what is on disk; give more "
                "--cache-bytes, or --prefetch 0"
            )
        for one, states in zip(found, states_of(self.target, found, missing), strict=True):
            one.states |= states

    def _batch(self, rows: Sequence[Row]) -> Batch:
        return (packed if self.pack else padded)(rows)

    def _groups(self, rows: list[Row], order: random.Random) -> list[list[Row]]:
        """Which rows make a batch, in an order that ``order`` draws; their sizes decide."""
        if not self.pack:
            rows = sorted(rows, key=lambda row: row.size)  # rows of about the same length, for little padding
        groups: list[list[Row]] = [[]]
        for row in rows:
            before = sum(one.size for one in groups[-1]) if self.pack else len(groups[-1]) * row.size
            if groups[-1] and before + row.size > self.tokens:
                groups.append([])
            groups[-1].append(row)
        order.shuffle(groups)
        return [group for group in groups if group]


def padded(rows: Sequence[Row]) -> Batch:
    """Rows side by side, as long as the longest of them."""
    longest = max(row.size for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    answer = torch.zeros_like(real)
    states = {
        layer: torch.zeros(len(rows), longest, found.shape[-1], dtype=found.dtype)
        for layer, found in rows[0].conversation.states.items()
    }
    for at, row in enumerate(rows):
        one = row.conversation
        tokens[at, : row.size] = torch.tensor(one.tokens[row.start : row.stop])
        real[at, : row.size] = True
        answer[at, : row.size] = row.answer()
        for layer, found in one.states.items():
            states[layer][at, : row.size] = found[row.start : row.stop]
    return Batch(tokens, states, real, answer, offsets=[row.start for row in rows])


def packed(rows: Sequence[Row]) -> Batch:
    """Rows end to end, in one."""
    tokens = torch.tensor([token for row in rows for token in row.conversation.tokens[row.start : row.stop]])[None]
    states = {
        layer: torch.cat([row.conversation.states[layer][row.start : row.stop] for row in rows])[None]
        for layer in rows[0].conversation.states
    }
    answer = torch.cat([row.answer() for row in rows])[None]
    lengths, offsets = [row.size for row in rows], [row.start for row in rows]
    return Batch(tokens, states, torch.ones_like(answer), answer, lengths, offsets)
