"""RowTarget: what targets share whose forward runs over the rows of all trees laid end to end.

Such a target says how a :class:`Plan` is run, where K/V is kept and how the K/V of rows is cut and joined; chunked
prefill, scoring, resuming and committing are written here once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from outpace.core.tree import TokenTree
from outpace.targets.base import FULL, HiddenStateChunk, Scores, Sequence, SubGraph, Target, TreeScores

PREFILL_CHUNK = 512


class Store(Protocol):
    """K/V of one sequence's committed tokens."""

    length: int

    def take(self, side: Any, rows: Seq[int]) -> None:
        """Commit these rows of a forward's K/V."""
        ...

    def advance(self, rows: int) -> None:
        """Commit the rows that a chunk of prefill has just laid behind the committed ones."""
        ...

    def fork(self, length: int | None = None) -> Self:
        """An independent copy of the first ``length`` rows."""
        ...

    def clear(self) -> None:
        """Free the memory."""
        ...


@dataclass(slots=True)
class Part:
    """One sequence's share of a forward: rows ``start:stop`` of the flat input.

    ``tree``: whose rows they are; None for a causal chunk of the prompt. The tree's first rows may have been run by
    an earlier pass, whose K/V is ``old``; ``positions`` are of old and new rows. ``subset``: committed positions to
    read. ``side``: K/V of old and new rows, left by the forward. ``memo``: what the target keeps between layers.
    """

    store: Any
    start: int
    stop: int
    positions: list[int]
    tree: TokenTree | None = None
    old: Any = None
    subset: Tensor | None = None
    side: Any = None
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def new_rows(self) -> int:
        return self.stop - self.start

    @property
    def old_rows(self) -> int:
        return len(self.positions) - self.new_rows


@dataclass(slots=True)
class Plan:
    """What one forward is to do, and what it found. ``calls`` records (layer, extra arguments) for the probe.

    ``before``, (R, inputs): what a blueprint's entry makes the first states of. ``second``, (R): tokens whose
    embeddings layer 0 reads beside the residual stream where a blueprint says that it does. ``normed``: whether what
    leaves the last layer is wanted behind the final norm.
    """

    parts: list[Part]
    start: int = 0
    stop: int = 0
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    states: Tensor | None = None
    before: Tensor | None = None
    second: Seq[int] | None = None
    wanted: frozenset[int] = frozenset()
    normed: bool = False
    hidden_states: dict[int, Tensor] = field(default_factory=dict)
    calls: list[tuple[Any, dict[str, Any]]] | None = None


@dataclass(slots=True)
class _Side:
    """What a forward leaves behind for commit and resume: per sequence K/V, boundary states, and where it started."""

    graph: SubGraph
    kv: list[Any]
    states: list[Tensor | None]
    """Residual stream entering layer ``graph.first_difference``, (rows, hidden) per sequence."""
    lengths: list[int]


class RowTarget(Target):
    """A target whose forward runs over flat rows."""

    prefill_chunk: int = PREFILL_CHUNK

    @abstractmethod
    def run(
        self, plan: Plan, tokens: Seq[int], *, logits: bool, embeddings: Mapping[int, Tensor] | None = None
    ) -> Tensor | None:
        """The forward over flat rows under ``plan``: (R, V) logits, or None.

        Fills ``plan.taps`` with each wanted layer's (R, hidden) and, for parts of trees, ``part.side``.
        ``embeddings`` replace the input embeddings of the rows they name. ``plan.states``, (R, hidden), enter layer
        ``plan.start`` instead of embeddings.
        """

    @abstractmethod
    def first_rows(self, side: Any, rows: int) -> Any:
        """K/V of the first ``rows`` rows."""

    @abstractmethod
    def stacked(self, lower: Any, upper: Any, boundary: int) -> Any:
        """K/V of the same rows: layers below ``boundary`` from ``lower``, the others from ``upper``."""

    @abstractmethod
    def check_skips(self, graph: SubGraph) -> None:
        """Raise BadInput when a sublayer that ``graph`` skips cannot be."""

    def length(self, kv: Store) -> int:
        return kv.length

    def fork(self, kv: Store, length: int | None = None) -> Store:
        return kv.fork(length)

    def truncate(self, kv: Store, length: int) -> Store:
        if not 0 <= length <= kv.length:
            raise ValueError(f"cannot keep {length} of {kv.length} committed tokens")
        kv.length = length  # rows behind the committed ones are scratch, which nothing reads
        return kv

    def close(self, kv: Store) -> None:
        kv.clear()

    @torch.inference_mode()
    def prefill(
        self, sequences: Seq[Sequence], aux_hidden_state_layers: Seq[int] = (), on_chunk: HiddenStateChunk | None = None
    ) -> None:
        pending = [one for one in sequences if one.kv.length < len(one.tokens) - 1]
        while pending:
            room, chunk = self.prefill_chunk, []
            for one in pending:
                start = one.kv.length
                stop = min(len(one.tokens) - 1, start + room)
                chunk.append((one, start, stop))
                room -= stop - start
                if room <= 0:
                    break
            self._prefill_chunk(chunk, aux_hidden_state_layers, on_chunk)
            pending = [one for one in pending if one.kv.length < len(one.tokens) - 1]

    def _prefill_chunk(
        self,
        chunk: list[tuple[Sequence, int, int]],
        aux_hidden_state_layers: Seq[int],
        on_chunk: HiddenStateChunk | None,
    ) -> None:
        parts: list[Part] = []
        tokens: list[int] = []
        for sequence, start, stop in chunk:
            row = len(tokens)
            tokens += sequence.tokens[start:stop]
            parts.append(Part(sequence.kv, row, len(tokens), list(range(start, stop))))
        plan = Plan(parts, stop=self.num_layers, wanted=frozenset(aux_hidden_state_layers))
        self.run(plan, tokens, logits=False)
        for (sequence, start, stop), part in zip(chunk, parts, strict=True):
            sequence.kv.advance(stop - start)  # the forward laid these rows right behind the committed ones
            if aux_hidden_state_layers and on_chunk is not None:
                states = {layer: plan.hidden_states[layer][part.start : part.stop] for layer in aux_hidden_state_layers}
                on_chunk(sequence, start, states)

    @torch.inference_mode()
    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        aux_hidden_state_layers: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        self._check_graph(graph)
        if resume is None:
            return self._score(batch, aux_hidden_state_layers, graph)
        earlier: _Side = resume.side
        for (sequence, tree), part in zip(batch, resume.parts, strict=True):
            old, done = part.tree, part.nodes
            extends = old.tokens[:done] == tree.tokens[:done] and old.parents[:done] == tree.parents[:done]
            if part.sequence is not sequence or not extends:
                raise ValueError("resume takes the same sequences in the same order, and trees that extend theirs")
        if earlier.graph == graph:
            return self._score(batch, aux_hidden_state_layers, graph, resume)
        if graph != FULL:
            raise ValueError("a pass through one sub-graph can be resumed by the same sub-graph or the full forward")
        return self._resume_full(batch, aux_hidden_state_layers, resume)

    def _score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        aux_hidden_state_layers: Seq[int],
        graph: SubGraph,
        resume: Scores | None = None,
    ) -> Scores:
        """One pass over the rows that ``resume`` (same graph) has not run yet."""
        stop = self.num_layers if graph.stop is None else graph.stop
        boundary = graph.first_difference(self.num_layers)
        parts, tokens, embeddings = self._lay_out(batch, graph, resume)
        wanted = frozenset(aux_hidden_state_layers) | (
            frozenset([boundary]) if boundary and graph != FULL else frozenset()
        )
        plan = Plan(parts, graph.start, stop, graph.skip_attention, graph.skip_mlp, wanted=wanted)
        logits = self.run(plan, tokens, logits=True, embeddings=embeddings) if tokens else None
        scored, states = [], []
        for index, ((sequence, tree), part) in enumerate(zip(batch, parts, strict=True)):
            rows = slice(part.start, part.stop)
            found = {layer: plan.hidden_states[layer][rows] for layer in plan.hidden_states}
            mine = logits[rows] if logits is not None else None
            before = None if resume is None else resume[index]
            if before is not None:
                kept = 1 + before.nodes
                mine = _joined(before.logits[:kept], mine)
                found = {
                    layer: _joined(before.hidden_states[layer][:kept], found.get(layer))
                    for layer in before.hidden_states
                }
            assert mine is not None
            states.append(found.get(boundary))
            scored.append(TreeScores(sequence, tree, mine, found))
        side = _Side(graph, [_side(part) for part in parts], states, [one.kv.length for one, _ in batch])
        return Scores(scored, side)

    def _resume_full(
        self, batch: Seq[tuple[Sequence, TokenTree]], aux_hidden_state_layers: Seq[int], resume: Scores
    ) -> Scores:
        """Full scores on top of a sub-graph pass: layers below its first difference are taken over, not run again."""
        earlier: _Side = resume.side
        boundary = earlier.graph.first_difference(self.num_layers)
        below = frozenset(layer for layer in aux_hidden_state_layers if layer < boundary)
        if boundary == 0 or not all(below <= part.hidden_states.keys() for part in resume.parts):
            return self._score(batch, aux_hidden_state_layers, FULL)
        lower, tokens, embeddings = self._lay_out(batch, earlier.graph, resume)
        first = Plan(lower, 0, boundary, wanted=below | {boundary})
        if tokens:
            self.run(first, tokens, logits=False, embeddings=embeddings)
        upper, all_tokens, _ = self._lay_out(batch, FULL, None)
        inputs = []
        for index, part in enumerate(lower):
            before = earlier.states[index]
            assert before is not None
            fresh = first.hidden_states[boundary][part.start : part.stop] if tokens else None
            inputs.append(_joined(before[: 1 + resume[index].nodes], fresh))
        second = Plan(
            upper,
            boundary,
            self.num_layers,
            states=torch.cat(inputs),
            wanted=frozenset(aux_hidden_state_layers) - below,
        )
        logits = self.run(second, all_tokens, logits=True)
        assert logits is not None
        scored, kv = [], []
        for index, ((sequence, tree), part, above) in enumerate(zip(batch, lower, upper, strict=True)):
            rows = slice(above.start, above.stop)
            found = {layer: second.hidden_states[layer][rows] for layer in second.hidden_states}
            for layer in below:
                fresh = first.hidden_states[layer][part.start : part.stop] if tokens else None
                found[layer] = _joined(resume[index].hidden_states[layer][: 1 + resume[index].nodes], fresh)
            scored.append(TreeScores(sequence, tree, logits[rows], found))
            kv.append(self.stacked(_side(part), above.side, boundary))
        return Scores(scored, _Side(FULL, kv, [None] * len(kv), [one.kv.length for one, _ in batch]))

    def _lay_out(
        self, batch: Seq[tuple[Sequence, TokenTree]], graph: SubGraph, resume: Scores | None
    ) -> tuple[list[Part], list[int], dict[int, Tensor]]:
        """Rows of all trees end to end: parts, token ids, and input embeddings that replace a token's."""
        parts: list[Part] = []
        tokens: list[int] = []
        embeddings: dict[int, Tensor] = {}
        for index, (sequence, tree) in enumerate(batch):
            length = sequence.kv.length
            done = 0 if resume is None else 1 + resume[index].nodes
            rows = tree.row_tokens(sequence.tokens[length])
            start, stop = len(tokens), len(tokens) + len(rows) - done
            for number, side in enumerate(tree.side):
                if side.embedding is not None:
                    embeddings[stop - len(tree.side) + number] = side.embedding
            old = None if resume is None else self.first_rows(resume.side.kv[index], done)
            positions = [at + length for at in tree.positions()]
            parts.append(Part(sequence.kv, start, stop, positions, tree, old, graph.kv.get(index)))
            tokens += rows[done:]
        return parts, tokens, embeddings

    @torch.inference_mode()
    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        side: _Side = scores.side
        if any(path is not None for path in paths) and side.graph != FULL:
            raise ValueError("only a full forward can be committed; resume it with graph=FULL first")
        for index, (part, path) in enumerate(zip(scores.parts, paths, strict=True)):
            if path is None:
                continue
            store: Store = part.sequence.kv
            if store.length != side.lengths[index]:
                raise ValueError("these scores are stale: the sequence has moved on since they were computed")
            _check_path(part.tree, path)
            store.take(side.kv[index], [0, *(node + 1 for node in path)])

    def _check_graph(self, graph: SubGraph) -> None:
        if graph == FULL:
            return
        stop = self.num_layers if graph.stop is None else graph.stop
        if not 0 <= graph.start <= stop <= self.num_layers:
            raise ValueError(f"layers {graph.start}..{stop} are not a range of the model's {self.num_layers}")
        self.check_skips(graph)


def _side(part: Part) -> Any:
    """K/V of all of a part's rows; a pass without new rows leaves what there was."""
    return part.side if part.new_rows else part.old


def _joined(old: Tensor, new: Tensor | None) -> Tensor:
    return old if new is None or len(new) == 0 else torch.cat([old, new])


def _check_path(tree: TokenTree, path: Seq[int]) -> None:
    parent = -1
    for node in path:
        if tree.parents[node] != parent:
            raise ValueError(f"{list(path)} is not a path of the tree")
        parent = node
