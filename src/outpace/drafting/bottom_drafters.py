"""Drafters of chains after tokens that are not committed yet: the lowest level of a hierarchy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import DraftState
from outpace.drafting.context_chunks import streaming
from outpace.drafting.copying import continuation
from outpace.drafting.model_drafter import catch_up
from outpace.drafting.ngram_index import NgramIndex
from outpace.drafting.tree_builder import ChainBuilder, build_together
from outpace.targets.base import Sequence, Target
from outpace.targets.sub_graph import SubGraph

if TYPE_CHECKING:
    from torch import Tensor

S = TypeVar("S")


class BottomDrafter(ABC, Generic[S]):
    """Drafts chains after ``paths``, tokens that are not committed yet, which follow each sequence."""

    @abstractmethod
    def begin(self, sequence: Sequence) -> S:
        """A request joins. Returns its state."""

    @abstractmethod
    def draft(self, states: Seq[S], paths: Seq[Seq[int]], counts: Seq[int], chances: Seq[Chance]) -> list[TokenTree]:
        """Chains of at most ``counts[i]`` tokens after ``paths[i]``."""

    def end(self, state: S) -> None:
        """The request left: release K/V."""


@dataclass(slots=True)
class LookupState(DraftState):
    """One request and the index of its tokens."""

    index: NgramIndex


class LookupBottom(BottomDrafter[LookupState]):
    """Copies what followed the last tokens where they occurred before."""

    def __init__(self, longest: int = 3) -> None:
        self._longest = longest

    def begin(self, sequence: Sequence) -> LookupState:
        return LookupState(sequence, NgramIndex(1, self._longest))

    def draft(
        self, states: Seq[LookupState], paths: Seq[Seq[int]], counts: Seq[int], chances: Seq[Chance]
    ) -> list[TokenTree]:
        chains = []
        for state, path, count in zip(states, paths, counts, strict=True):
            index, tokens = state.index, state.sequence.tokens
            index.extend(tokens[len(index.text) :])
            found = index.find([*tokens[-self._longest :], *path])
            copied = continuation(index.text, found[0], count, periodic=False) if found else []
            chains.append(TokenTree.chain(copied))
        return chains


class ContinuedChainBuilder(ChainBuilder):
    """A chain that begins after tokens that are not committed."""

    def follow(self, path: Seq[int]) -> None:
        """Tokens after the committed ones. Called once, after ``catch_up``."""
        node = ROOT
        for token in path:
            node = self._run_after(node, token)


class StreamingBottom(BottomDrafter[Sequence]):
    """A draft model that reads the first ``sink`` and the last ``window`` tokens of its context.

    Its state is the draft model's sequence, which shares tokens and sampler with the request's.
    """

    def __init__(self, model: Target, sink: int, window: int) -> None:
        self.model = model
        self._sink, self._window = sink, window

    def begin(self, sequence: Sequence) -> Sequence:
        return replace(sequence, kv=self.model.open(), states=None)

    def draft(
        self, states: Seq[Sequence], paths: Seq[Seq[int]], counts: Seq[int], chances: Seq[Chance]
    ) -> list[TokenTree]:
        model, chains = self.model, [TokenTree() for _ in states]
        members: dict[int, ContinuedChainBuilder] = {}
        for index, (own, path, count, chance) in enumerate(zip(states, paths, counts, chances, strict=True)):
            room = model.context_length - len(own.tokens) - len(path)
            if (depth := min(count, room)) > 0:
                members[index] = ContinuedChainBuilder(own, Budget(depth), chance)
        sequences, builders = [states[index] for index in members], list(members.values())
        # A pass that reads a part of the K/V is never committed: committed tokens are prefilled now and then.
        catch_up(model, sequences, builders)
        kv: dict[int, Tensor] = {}
        for place, (index, builder) in enumerate(members.items()):
            builder.follow(paths[index])
            read = streaming(model.length(states[index].kv), self._sink, self._window)
            if read is not None:
                kv[place] = read
        build_together(model, sequences, builders, SubGraph(kv=kv))
        for index, builder in members.items():
            chains[index] = builder.proposal()
        return chains

    def end(self, state: Sequence) -> None:
        self.model.close(state.kv)
