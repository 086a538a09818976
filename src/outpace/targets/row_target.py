"""RowTarget: what targets share whose forward runs over the rows of all trees laid end to end.

Such a target says how a :class:`~outpace.targets.forward_plan.ForwardPlan` is run, where K/V is kept and how the K/V of
rows is cut and joined; chunked prefill, scoring, resuming and committing are written here once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence as Seq
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outpace.core.tree import TokenTree
from outpace.targets.base import HiddenStateChunk, Scores, Sequence, SomeLogits, Target, Trees, TreeScores
from outpace.targets.branches import Begins, Branches
from outpace.targets.forward_plan import ForwardPlan, SequenceRows
from outpace.targets.hidden_rows import RowsOf
from outpace.targets.kv_store import KVStore
from outpace.targets.sub_graph import FULL, SubGraph
from outpace.targets.tree_rows import ForwardState, certain_rows, joined, lay_out, side_kv_of

PREFILL_CHUNK = 512
"""Rows of one chunk of prefill, over all sequences."""


class RowTarget(Target):
    """A target whose forward runs over flat rows."""

    prefill_chunk: int = PREFILL_CHUNK

    @abstractmethod
    def run(
        self, plan: ForwardPlan, tokens: Seq[int], *, logits: bool, embeddings: Mapping[int, Tensor] | None = None
    ) -> Tensor | None:
        """The forward over flat rows under ``plan``: (R, V) logits, or None where ``logits`` is False.

        Fills ``plan.hidden_states`` and, for parts that are trees, ``part.side_kv``; lays the K/V of other parts
        behind the committed rows of their stores. ``tokens``, (R). ``embeddings``, (hidden,) each, replace the input
        embeddings of the rows they name.
        """

    def branches(self, begins: Begins, *, normed: bool = False) -> Branches | None:
        """What grows rows of drafts through these layers in one call a level; None where nothing of its own does.

        ``normed``: their states are kept behind the final norm.
        """
        return None

    def first_rows(self, side_kv: Any, rows: int) -> Any:
        """A forward's K/V, (layers, 2, kv_heads, n, width) where nothing else is said, of its first ``rows`` rows."""
        return side_kv[..., :rows, :]

    def stacked(self, lower: Any, upper: Any, boundary: int) -> Any:
        """K/V of the same rows: layers below ``boundary`` from ``lower``, the others from ``upper``, which it takes."""
        upper[:boundary] = lower[:boundary]
        return upper

    def take(self, rows: Seq[tuple[Any, Any, Seq[int]]]) -> None:
        """Commit rows of a forward's K/V to the stores of several sequences: (store, K/V, which of its rows)."""
        for store, side_kv, chosen in rows:
            store.take(side_kv, chosen)

    def length(self, kv: KVStore) -> int:
        return kv.length

    def fork(self, kv: KVStore, length: int | None = None) -> KVStore:
        return kv.fork(length)

    def truncate(self, kv: KVStore, length: int) -> KVStore:
        kv.truncate(length)
        return kv

    def close(self, kv: KVStore) -> None:
        kv.clear()

    kv_blocks = True

    @torch.inference_mode()
    def kv_block(self, kv: KVStore, start: int, stop: int) -> Any:
        return kv.block(start, stop)

    @torch.inference_mode()
    def append_kv(self, kv: KVStore, block: Any, rows: int) -> None:
        kv.append(block, rows)

    @torch.inference_mode()
    def reserve_kv(self, kv: KVStore, rows: int) -> None:
        kv.reserve(rows)

    def kv_bytes(self, kv: KVStore | None, rows: int = 0) -> int:
        return (self.open() if kv is None else kv).bytes_with(rows)

    @torch.inference_mode()
    def keys(self, kv: KVStore, start: int, stop: int) -> Tensor:
        return kv.keys(start, stop)

    @torch.inference_mode()
    def queries(self, sequences: Seq[Sequence]) -> list[Tensor]:
        parts, tokens, _ = self._lay_out([(one, TokenTree()) for one in sequences], FULL, None)
        plan = ForwardPlan(parts, stop=self.num_layers, queries={})
        self.run(plan, tokens, logits=False)
        assert plan.queries is not None
        return list(torch.stack([plan.queries[layer] for layer in range(self.num_layers)], 1).float())

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Seq[Sequence],
        aux_hidden_state_layers: Seq[int] = (),
        on_chunk: HiddenStateChunk | None = None,
        most: int | None = None,
    ) -> None:
        pending = [one for one in sequences if one.kv.length < len(one.tokens) - 1]
        for one in pending:
            self.reserve_kv(one.kv, len(one.tokens) - one.kv.length)
        left = sum(len(one.tokens) for one in pending) if most is None else most
        while pending and left > 0:
            room, chunk = min(self.prefill_chunk, left), []
            for one in pending:
                start = one.kv.length
                stop = min(len(one.tokens) - 1, start + room)
                chunk.append((one, start, stop))
                room -= stop - start
                left -= stop - start
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
        parts: list[SequenceRows] = []
        tokens: list[int] = []
        for sequence, start, stop in chunk:
            row = len(tokens)
            tokens += sequence.tokens[start:stop]
            parts.append(SequenceRows(sequence.kv, row, len(tokens), list(range(start, stop))))
        plan = ForwardPlan(parts, stop=self.num_layers, wanted=frozenset(aux_hidden_state_layers))
        self.run(plan, tokens, logits=False)
        for (sequence, start, stop), part in zip(chunk, parts, strict=True):
            sequence.kv.advance(stop - start)  # the forward laid these rows right behind the committed ones
            if aux_hidden_state_layers and on_chunk is not None:
                states = {layer: plan.hidden_states[layer][part.start : part.stop] for layer in aux_hidden_state_layers}
                on_chunk(sequence, start, states)

    @torch.inference_mode()
    def score(
        self, batch: Trees, aux_hidden_state_layers: Seq[int] = (), graph: SubGraph = FULL, resume: Scores | None = None
    ) -> Scores:
        self._check_graph(graph)
        if resume is None:
            return self._score(batch, aux_hidden_state_layers, graph)
        earlier: ForwardState = resume.forward_state
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
        self, batch: Trees, aux_hidden_state_layers: Seq[int], graph: SubGraph, resume: Scores | None = None
    ) -> Scores:
        """One pass over the rows that ``resume`` (same graph) has not run yet."""
        stop = self.num_layers if graph.stop is None else graph.stop
        boundary = graph.first_difference(self.num_layers)
        parts, tokens, embeddings = self._lay_out(batch, graph, resume)
        kept_for_resume = [boundary] if boundary and graph is not FULL and graph != FULL else []
        wanted = frozenset([*aux_hidden_state_layers, *kept_for_resume])
        plan = ForwardPlan(parts, graph.start, stop, graph.skip_attention, graph.skip_mlp, wanted=wanted)
        if resume is None and any(sequence.sampler.takes_largest for sequence, _ in batch):
            plan.best = []
        # Elsewhere fewer rows round differently, and a forward with logits may be captured as it is.
        apart = self.batch_invariant and resume is None and graph == FULL
        if apart and (left_out := certain_rows(batch, parts)):
            return self._without(left_out, batch, plan, tokens, embeddings)
        logits = self.run(plan, tokens, logits=True, embeddings=embeddings) if tokens else None
        scored, states = [], []
        for index, ((sequence, tree), part) in enumerate(zip(batch, parts, strict=True)):
            rows = slice(part.start, part.stop)
            found: Mapping[int, Tensor] = RowsOf(plan.hidden_states, part.start, part.stop)
            mine = logits[rows] if logits is not None else None
            before = None if resume is None else resume[index]
            if before is not None:
                kept = 1 + before.nodes
                mine = joined(before.logits[:kept], mine)
                found = {
                    layer: joined(before.hidden_states[layer][:kept], found.get(layer))
                    for layer in before.hidden_states
                }
            assert mine is not None
            states.append(found.get(boundary))
            scored.append(TreeScores(sequence, tree, mine, found, plan.best[rows] if plan.best else ()))
        kv, lengths = [side_kv_of(part) for part in parts], [one.kv.length for one, _ in batch]
        return Scores(scored, ForwardState(graph, kv, states, lengths))

    def _without(
        self, left_out: Seq[int], batch: Trees, plan: ForwardPlan, tokens: Seq[int], embeddings: Mapping[int, Tensor]
    ) -> Scores:
        """A full pass that computes no logits of the rows ``left_out``, until somebody reads them."""
        last, asked = self.num_layers, self.num_layers in plan.wanted
        plan.wanted, plan.best = plan.wanted | {last}, None
        self.run(plan, tokens, logits=False, embeddings=embeddings)
        leaving = plan.hidden_states[last] if asked else plan.hidden_states.pop(last)
        absent = frozenset(left_out)
        read = [row for row in range(len(tokens)) if row not in absent]
        logits = self.lm_head(leaving[read]) if read else leaving.new_empty(0, self.vocab_size)
        at = {row: index for index, row in enumerate(read)}
        scored = []
        for (sequence, tree), part in zip(batch, plan.parts, strict=True):
            rows = range(part.start, part.stop)
            where = {row - part.start: at[row] for row in rows if row in at}
            some = SomeLogits(logits, where, partial(self._all_logits, leaving[part.start : part.stop]))
            scored.append(TreeScores(sequence, tree, some, RowsOf(plan.hidden_states, part.start, part.stop)))
        kv, lengths = [side_kv_of(part) for part in plan.parts], [one.kv.length for one, _ in batch]
        return Scores(scored, ForwardState(FULL, kv, [None] * len(kv), lengths))

    @torch.inference_mode()
    def _all_logits(self, leaving: Tensor) -> Tensor:
        return self.lm_head(leaving)

    def _resume_full(self, batch: Trees, aux_hidden_state_layers: Seq[int], resume: Scores) -> Scores:
        """Full scores on top of a sub-graph pass: layers below its first difference are taken over, not run again."""
        earlier: ForwardState = resume.forward_state
        boundary = earlier.graph.first_difference(self.num_layers)
        below = frozenset(layer for layer in aux_hidden_state_layers if layer < boundary)
        if boundary == 0 or not all(below <= part.hidden_states.keys() for part in resume.parts):
            return self._score(batch, aux_hidden_state_layers, FULL)
        lower, tokens, embeddings = self._lay_out(batch, earlier.graph, resume)
        first = ForwardPlan(lower, 0, boundary, wanted=below | {boundary})
        if tokens:
            self.run(first, tokens, logits=False, embeddings=embeddings)
        upper, all_tokens, _ = self._lay_out(batch, FULL, None)
        inputs = []
        for index, part in enumerate(lower):
            before = earlier.states[index]
            assert before is not None
            fresh = first.hidden_states[boundary][part.start : part.stop] if tokens else None
            inputs.append(joined(before[: 1 + resume[index].nodes], fresh))
        above_boundary = frozenset(aux_hidden_state_layers) - below
        second = ForwardPlan(upper, boundary, self.num_layers, states=torch.cat(inputs), wanted=above_boundary)
        logits = self.run(second, all_tokens, logits=True)
        assert logits is not None
        scored, kv = [], []
        for index, ((sequence, tree), part, above) in enumerate(zip(batch, lower, upper, strict=True)):
            rows = slice(above.start, above.stop)
            found = {layer: second.hidden_states[layer][rows] for layer in second.hidden_states}
            for layer in below:
                fresh = first.hidden_states[layer][part.start : part.stop] if tokens else None
                found[layer] = joined(resume[index].hidden_states[layer][: 1 + resume[index].nodes], fresh)
            scored.append(TreeScores(sequence, tree, logits[rows], found))
            kv.append(self.stacked(side_kv_of(part), above.side_kv, boundary))
        return Scores(scored, ForwardState(FULL, kv, [None] * len(kv), [one.kv.length for one, _ in batch]))

    def _lay_out(
        self, batch: Trees, graph: SubGraph, resume: Scores | None
    ) -> tuple[list[SequenceRows], list[int], dict[int, Tensor]]:
        return lay_out(batch, graph, resume, self.first_rows)

    @torch.inference_mode()
    def lengthen(self, sequence: Sequence, tokens: Seq[int]) -> None:
        # The K/V of one row, again and again: thousands of tokens without a prefill.
        if tokens:
            found: ForwardState = self.score([(sequence, TokenTree())]).forward_state
            sequence.kv.take(found.side_kv[0], [0] * len(tokens))
            sequence.tokens.extend(tokens)

    @torch.inference_mode()
    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        found: ForwardState = scores.forward_state
        if found.graph is not FULL and found.graph != FULL and any(path is not None for path in paths):
            raise ValueError("only a full forward can be committed; resume it with graph=FULL first")
        taken = []
        for index, (part, path) in enumerate(zip(scores.parts, paths, strict=True)):
            if path is None:
                continue
            store: KVStore = part.sequence.kv
            if store.length != found.lengths[index]:
                raise ValueError("these scores are stale: the sequence has moved on since they were computed")
            part.tree.check_path(path)
            taken.append((store, found.side_kv[index], [0, *(node + 1 for node in path)]))
        self.take(taken)

    def _check_graph(self, graph: SubGraph) -> None:
        if graph is FULL or graph == FULL:
            return
        stop = self.num_layers if graph.stop is None else graph.stop
        if not 0 <= graph.start <= stop <= self.num_layers:
            raise ValueError(f"layers {graph.start}..{stop} are not a range of the model's {self.num_layers}")
        self.check_skips(graph)
