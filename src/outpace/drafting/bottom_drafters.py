"""Drafters of chains behind tokens that are not committed yet: the lowest level of a hierarchy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from torch import Tensor

from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.context_chunks import streaming
from outpace.drafting.copying import continuation
from outpace.drafting.model_drafter import CATCH_UP
from outpace.drafting.ngram_index import NgramIndex
from outpace.drafting.tree_builder import ChainBuilder, build_together
from outpace.targets.base import Sequence, SubGraph, Target


class Bottom(ABC):
    """Drafts chains after ``paths``, tokens that are not committed yet, behind each sequence."""

    sampled = False
    """Whether its draws may be random."""

    @abstractmethod
    def begin(self, sequence: Sequence) -> None:
        """A request joins."""

    @abstractmethod
    def draft(
        self, sequences: Seq[Sequence], paths: Seq[Seq[int]], counts: Seq[int], chances: Seq[Chance]
    ) -> list[TokenTree]:
        """Chains of at most ``counts[i]`` tokens that go on after ``paths[i]``."""

    @abstractmethod
    def end(self, sequence: Sequence) -> None:
        """The request left."""


class Lookup(Bottom):
    """Copies what followed the last tokens where they occurred before."""

    def __init__(self, longest: int = 3) -> None:
        self._longest = longest
        self._indices: dict[Sequence, NgramIndex] = {}

    def begin(self, sequence: Sequence) -> None:
        self._indices[sequence] = NgramIndex(1, self._longest)

    def draft(
        self, sequences: Seq[Sequence], paths: Seq[Seq[int]], counts: Seq[int], chances: Seq[Chance]
    ) -> list[TokenTree]:
        chains = []
        for sequence, path, count in zip(sequences, paths, counts, strict=True):
            index = self._indices[sequence]
            index.extend(sequence.tokens[len(index.text) :])
            found = index.find([*sequence.tokens[-self._longest :], *path])
            copied = continuation(index.text, found[0], count, periodic=False) if found else []
            chains.append(TokenTree.chain(copied))
        return chains

    def end(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)


class _Continued(ChainBuilder):
    """A chain that begins behind tokens that are not committed."""

    def follow(self, path: Seq[int]) -> None:
        """Tokens behind the committed ones. Called once, after ``catch_up``."""
        node = ROOT
        for token in path:
            node = self._run_after(node, token)


class Streaming(Bottom):
    """A draft model that reads the first ``sink`` and the last ``window`` tokens of its context."""

    sampled = True

    def __init__(self, model: Target, sink: int, window: int) -> None:
        self.model = model
        self._sink, self._window = sink, window
        self._twins: dict[Sequence, Sequence] = {}

    def begin(self, sequence: Sequence) -> None:
        kv = self.model.open()
        self._twins[sequence] = Sequence(sequence.tokens, sequence.prompt_length, kv, sequence.sampler, sequence.chance)

    def draft(
        self, sequences: Seq[Sequence], paths: Seq[Seq[int]], counts: Seq[int], chances: Seq[Chance]
    ) -> list[TokenTree]:
        model, chains = self.model, [TokenTree() for _ in sequences]
        members: list[tuple[int, Sequence, _Continued]] = []
        for index, (sequence, path, count, chance) in enumerate(zip(sequences, paths, counts, chances, strict=True)):
            room = model.context_length - len(sequence.tokens) - len(path)
            if (depth := min(count, room)) > 0:
                members.append((index, self._twins[sequence], _Continued(self._twins[sequence], Budget(depth), chance)))
        # A pass that reads a part of the K/V is never committed: what has come since is prefilled now and then.
        behind = [twin for _, twin, _ in members if self._lag(twin) > CATCH_UP]
        if behind:
            model.prefill(behind)
        kv: dict[int, Tensor] = {}
        for place, (index, twin, builder) in enumerate(members):
            builder.catch_up(twin.tokens[len(twin.tokens) - self._lag(twin) :])
            builder.follow(paths[index])
            read = streaming(model.length(twin.kv), self._sink, self._window)
            if read is not None:
                kv[place] = read
        build_together(model, [twin for _, twin, _ in members], [one for _, _, one in members], SubGraph(kv=kv))
        for index, _, builder in members:
            chains[index] = builder.proposal()
        return chains

    def _lag(self, twin: Sequence) -> int:
        return len(twin.tokens) - 1 - self.model.length(twin.kv)

    def end(self, sequence: Sequence) -> None:
        twin = self._twins.pop(sequence, None)
        if twin is not None:
            self.model.close(twin.kv)
