"""HFTarget: any Hugging Face causal LM as a target, by its own forward.

The model is used as it is: its attention goes through :mod:`outpace.targets.attention`, its K/V is kept by us and
written only at commit, and small gates around its layers make taps and sub-graph forwards possible. Models whose
state is not attention K/V, or whose scaling would change keys already stored, are refused by name.

Numerics: the model's own dtype. Scoring several rows at once rounds differently from one at a time; in float32 the
difference is about 1e-5 of the logits' size, in bfloat16 near-ties of the top two logits may fall the other way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outpace.targets.attention import IMPLEMENTATION, Part, Plan, SideKV, running
from outpace.targets.base import FULL, Scores, Sequence, SubGraph, TapChunk, Target, TreeScores
from outpace.targets.hf_support import Anatomy, check_supported, context_limit, dissect, self_check
from outpace.targets.kv import KVStore
from outpace.tree import TokenTree

PREFILL_CHUNK = 512


@dataclass(slots=True)
class _Side:
    """What a forward leaves behind for commit and resume: per sequence K/V, boundary states, and where it started."""

    graph: SubGraph
    kv: list[SideKV]
    states: list[Tensor | None]
    """Residual stream entering layer ``graph.first_difference``, (rows, hidden) per sequence."""
    lengths: list[int]


class HFTarget(Target):
    """A target around a ``transformers`` model in evaluation mode, on its own device and in its own dtype.

    Raises BadInput for architectures that keep another state than attention K/V.
    """

    def __init__(self, model: Any, *, prefill_chunk: int = PREFILL_CHUNK) -> None:
        check_supported(model)
        self.model = model.eval()
        config = model.config.get_text_config()
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.context_length, self.context_note = context_limit(config)
        self.device = model.get_input_embeddings().weight.device
        self.prefill_chunk = prefill_chunk
        self._configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        self._anatomy: Anatomy = dissect(model, self.num_layers, self._attending)
        self_check(self)

    def open(self) -> KVStore:
        return KVStore(self.num_layers)

    def length(self, kv: KVStore) -> int:
        return kv.length

    def fork(self, kv: KVStore, length: int | None = None) -> KVStore:
        return kv.fork(length)

    def close(self, kv: KVStore) -> None:
        kv.clear()

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        rows: Tensor = self.model.get_input_embeddings()(tokens.to(self.device))
        return rows

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        # Every layer is gated to the identity, so what is left of the forward is the final norm and the LM head.
        plan = Plan([], start=0, stop=0, states=hidden[None].to(self.device))
        rows = len(hidden)
        logits = self._forward(plan, torch.zeros(rows, dtype=torch.long), torch.arange(rows), logits=True)
        assert logits is not None
        return logits

    @torch.inference_mode()
    def prefill(self, sequences: Seq[Sequence], taps: Seq[int] = (), on_chunk: TapChunk | None = None) -> None:
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
            self._prefill_chunk(chunk, taps, on_chunk)
            pending = [one for one in pending if one.kv.length < len(one.tokens) - 1]

    def _prefill_chunk(self, chunk: list[tuple[Sequence, int, int]], taps: Seq[int], on_chunk: TapChunk | None) -> None:
        parts, tokens, positions, row = [], [], [], 0
        for sequence, start, stop in chunk:
            where = torch.arange(start, stop, device=self.device)
            parts.append(Part(sequence.kv, row, row + stop - start, where))
            tokens += sequence.tokens[start:stop]
            positions.append(where)
            row += stop - start
        plan = Plan(parts, stop=self.num_layers, wanted=frozenset(taps), keep=False)
        self._forward(plan, torch.tensor(tokens), torch.cat(positions), logits=False)
        for (sequence, start, stop), part in zip(chunk, parts, strict=True):
            sequence.kv.advance(stop - start)  # the forward laid these rows right behind the committed ones
            if taps and on_chunk is not None:
                states = {layer: plan.taps[layer][part.start : part.stop] for layer in taps}
                on_chunk(sequence, start, states)

    @torch.inference_mode()
    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        taps: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        self._check_graph(graph)
        if resume is None:
            return self._score(batch, taps, graph)
        earlier: _Side = resume.side
        for (sequence, tree), part in zip(batch, resume.parts, strict=True):
            old, done = part.tree, part.nodes
            extends = old.tokens[:done] == tree.tokens[:done] and old.parents[:done] == tree.parents[:done]
            if part.sequence is not sequence or not extends:
                raise ValueError("resume takes the same sequences in the same order, and trees that extend theirs")
        if earlier.graph == graph:
            return self._score(batch, taps, graph, resume)
        if graph != FULL:
            raise ValueError("a pass through one sub-graph can be resumed by the same sub-graph or the full forward")
        return self._resume_full(batch, taps, resume)

    def _score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        taps: Seq[int],
        graph: SubGraph,
        resume: Scores | None = None,
    ) -> Scores:
        """One pass over the rows that ``resume`` (same graph) has not run yet."""
        stop = self.num_layers if graph.stop is None else graph.stop
        boundary = graph.first_difference(self.num_layers)
        parts, tokens, positions, embeddings = self._lay_out(batch, graph, resume)
        wanted = frozenset(taps) | ({boundary} if boundary else frozenset())
        plan = Plan(parts, graph.start, stop, graph.skip_attention, graph.skip_mlp, wanted=wanted)
        logits = self._forward(plan, tokens, positions, logits=True, embeddings=embeddings) if len(tokens) else None
        scored, states = [], []
        for index, ((sequence, tree), part) in enumerate(zip(batch, parts, strict=True)):
            rows = slice(part.start, part.stop)
            found = {layer: plan.taps[layer][rows] for layer in plan.taps}
            mine = logits[rows] if logits is not None else None
            before = None if resume is None else resume[index]
            if before is not None:
                kept = 1 + before.nodes
                mine = _joined(before.logits[:kept], mine)
                found = {layer: _joined(before.taps[layer][:kept], found.get(layer)) for layer in before.taps}
            assert mine is not None
            states.append(found.get(boundary))
            scored.append(TreeScores(sequence, tree, mine, found))
        side = _Side(graph, [part.side for part in parts], states, [one.kv.length for one, _ in batch])
        return Scores(scored, side)

    def _resume_full(self, batch: Seq[tuple[Sequence, TokenTree]], taps: Seq[int], resume: Scores) -> Scores:
        """Full scores on top of a sub-graph pass: layers below its first difference are taken over, not run again."""
        earlier: _Side = resume.side
        boundary = earlier.graph.first_difference(self.num_layers)
        if boundary == 0 or any(layer < boundary for layer in taps):
            return self._score(batch, taps, FULL)
        lower, tokens, positions, embeddings = self._lay_out(batch, earlier.graph, resume)
        first = Plan(lower, 0, boundary, wanted=frozenset([boundary]))
        if len(tokens):
            self._forward(first, tokens, positions, logits=False, embeddings=embeddings)
        upper, _, all_positions, _ = self._lay_out(batch, FULL, None)
        inputs = []
        for index, part in enumerate(lower):
            before = earlier.states[index]
            assert before is not None
            fresh = first.taps[boundary][part.start : part.stop] if len(tokens) else None
            inputs.append(_joined(before[: 1 + resume[index].nodes], fresh))
        states = torch.cat(inputs)[None]
        second = Plan(upper, boundary, self.num_layers, states=states, wanted=frozenset(taps))
        ids = torch.zeros(states.shape[1], dtype=torch.long)
        logits = self._forward(second, ids, all_positions, logits=True)
        assert logits is not None
        scored, kv = [], []
        for (sequence, tree), below, above in zip(batch, lower, upper, strict=True):
            rows = slice(above.start, above.stop)
            found = {layer: second.taps[layer][rows] for layer in second.taps}
            scored.append(TreeScores(sequence, tree, logits[rows], found))
            under = below.side if below.new_rows else below.old
            assert under is not None
            kv.append([*under[:boundary], *above.side[boundary:]])
        return Scores(scored, _Side(FULL, kv, [None] * len(kv), [one.kv.length for one, _ in batch]))

    def _lay_out(
        self, batch: Seq[tuple[Sequence, TokenTree]], graph: SubGraph, resume: Scores | None
    ) -> tuple[list[Part], Tensor, Tensor, dict[int, Tensor]]:
        """Rows of all trees end to end: parts, token ids, positions, and input embeddings that replace a token's."""
        parts: list[Part] = []
        tokens: list[int] = []
        positions: list[Tensor] = []
        embeddings: dict[int, Tensor] = {}
        for index, (sequence, tree) in enumerate(batch):
            length = sequence.kv.length
            done = 0 if resume is None else 1 + resume[index].nodes
            rows = tree.row_tokens(sequence.tokens[length])
            where = torch.tensor(tree.positions(), device=self.device) + length
            start, stop = len(tokens), len(tokens) + len(rows) - done
            for number, side in enumerate(tree.side):
                if side.embedding is not None:
                    embeddings[stop - len(tree.side) + number] = side.embedding
            parts.append(
                Part(
                    sequence.kv,
                    start,
                    stop,
                    where,
                    visible=tree.ancestor_mask()[done:].to(self.device),
                    old=None if resume is None else _trimmed(resume.side.kv[index], done),
                    subset=graph.kv.get(index),
                    side=[None] * self.num_layers,
                )
            )
            tokens += rows[done:]
            positions.append(where[done:])
        return parts, torch.tensor(tokens), torch.cat(positions), embeddings

    @torch.inference_mode()
    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        side: _Side = scores.side
        if any(path is not None for path in paths) and side.graph != FULL:
            raise ValueError("only a full forward can be committed; resume it with graph=FULL first")
        for index, (part, path) in enumerate(zip(scores.parts, paths, strict=True)):
            if path is None:
                continue
            store: KVStore = part.sequence.kv
            if store.length != side.lengths[index]:
                raise ValueError("these scores are stale: the sequence has moved on since they were computed")
            _check_path(part.tree, path)
            rows: slice | Tensor = slice(0, len(path) + 1)
            if any(node != depth for depth, node in enumerate(path)):
                rows = torch.tensor([0, *(node + 1 for node in path)], device=self.device)
            store.append([(kv[0][:, rows], kv[1][:, rows]) for kv in side.kv[index] if kv is not None])

    def _forward(
        self,
        plan: Plan,
        tokens: Tensor,
        positions: Tensor,
        *,
        logits: bool,
        embeddings: Mapping[int, Tensor] | None = None,
    ) -> Tensor | None:
        """The model's own forward over flat rows under ``plan``: (R, V) logits, or None."""
        ids = tokens.to(self.device)[None]
        inputs: dict[str, Tensor] = {"input_ids": ids}
        if embeddings:
            rows = self.model.get_input_embeddings()(ids).clone()
            for row, embedding in embeddings.items():
                rows[0, row] = embedding.to(rows)
            inputs = {"inputs_embeds": rows}
        run = self.model if logits else self.model.base_model
        with running(plan), self._attending():
            out = run(**inputs, position_ids=positions.to(self.device)[None], use_cache=False)
        return out.logits[0] if logits else None

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Our attention while a forward of ours runs; the model is left as the caller had it."""
        before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = IMPLEMENTATION
        try:
            yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation

    def _check_graph(self, graph: SubGraph) -> None:
        if graph == FULL:
            return
        stop = self.num_layers if graph.stop is None else graph.stop
        if not 0 <= graph.start <= stop <= self.num_layers:
            raise ValueError(f"layers {graph.start}..{stop} are not a range of the model's {self.num_layers}")
        self._anatomy.check_skips(graph.skip_attention, graph.skip_mlp)


def _joined(old: Tensor, new: Tensor | None) -> Tensor:
    return old if new is None or len(new) == 0 else torch.cat([old, new])


def _trimmed(kv: SideKV, rows: int) -> SideKV:
    """K/V of the first ``rows`` rows: the side nodes of an earlier pass are not taken over."""
    return [None if pair is None else (pair[0][:, :rows], pair[1][:, :rows]) for pair in kv]


def _check_path(tree: TokenTree, path: Seq[int]) -> None:
    parent = -1
    for node in path:
        if tree.parents[node] != parent:
            raise ValueError(f"{list(path)} is not a path of the tree")
        parent = node
