"""TableTarget: a target whose logits are a function of the token path. For certification and tests.

The default function is a fixed pseudo-random table over the last few tokens. The target implements the whole protocol:
its K/V is the list of committed tokens, so that a wrong commit changes the scores, and its residual stream is the
token's one-hot embedding plus what every sublayer adds, other fixed tables whose sum is the difference to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.core.token_distribution import OpenRows, dense_distributions
from outpace.targets.base import HiddenStateChunk, Scores, Sequence, Target, Trees, TreeScores
from outpace.targets.costs import FixedCosts
from outpace.targets.dense.native_distribution import available, native_distributions
from outpace.targets.kv_store import check_block, rows_to_keep
from outpace.targets.sub_graph import FULL, SubGraph

Table = Callable[[tuple[int, ...]], Tensor]
Read = tuple[tuple[tuple[int, ...], ...], ...]
"""The committed tokens that attention reads, by layer and head."""
_HEADS = 2
"""K/V heads, each with one query head: their keys and queries are fixed tables, which nothing else depends on."""


def random_table(vocab_size: int, seed: int = 0, order: int = 2, sharpness: float = 1.5) -> Table:
    """Logits (V,) that depend on the last ``order`` tokens: normal numbers times ``sharpness``, in float32."""
    cache: dict[tuple[int, ...], Tensor] = {}

    def logits(path: tuple[int, ...]) -> Tensor:
        context = path[-order:] if order else ()
        if context not in cache:
            key = seed
            for token in context:
                key = (key * 1_000_003 + token + 1) % (2**63 - 1)
            generator = torch.Generator().manual_seed(key)
            cache[context] = sharpness * torch.randn(vocab_size, generator=generator)
        return cache[context]

    return logits


def without(table: Table, tokens: Seq[int]) -> Table:
    """The same logits, but -inf for ``tokens``: a model over a part of the vocabulary."""

    def logits(path: tuple[int, ...]) -> Tensor:
        return table(path).index_fill(0, torch.tensor(tokens), -torch.inf)

    return logits


class TableTarget(Target):
    """A target without a network. ``table`` maps all tokens up to a row to the logits (V,) after it.

    Each of ``layers`` layers has an attention and an MLP sublayer. A sub-graph leaves out what the sublayers that it
    skips would add; attention that reads a subset of K/V adds something else, which depends on the tokens it reads.
    Norm and LM head are the identity: the hidden states of layer ``num_layers`` are the logits. Its costs are fixed:
    how long a table takes says nothing of a model.
    """

    batch_invariant = True

    def __init__(
        self, vocab_size: int, table: Table | None = None, *, seed: int = 0, context_length: int = 256, layers: int = 4
    ) -> None:
        self.vocab_size = vocab_size
        self.num_layers = layers
        self.hidden_size = vocab_size
        self.dtype = "float32"
        self.context_length = context_length
        self.costs = FixedCosts()
        self.table = table or random_table(vocab_size, seed)
        # (2 * layers, V) per context, flat: attention of layer 0, its MLP, attention of layer 1, ...
        self._noise = random_table(vocab_size * 2 * layers, seed + 7919, order=3, sharpness=0.4)

    @property
    def open_rows(self) -> OpenRows:
        """By the kernels where there are any: what is certified is what runs."""
        return native_distributions if available() else dense_distributions

    def open(self) -> list[int]:
        return []

    def length(self, kv: Any) -> int:
        return len(kv)

    kv_blocks = True

    def kv_block(self, kv: Any, start: int, stop: int) -> Any:
        check_block(start, stop, len(kv))
        return kv[start:stop]

    def append_kv(self, kv: Any, block: Any, rows: int) -> None:
        check_block(len(kv), len(kv) + rows, len(kv) + rows)
        kv.extend(block)

    def prefill(
        self,
        sequences: Seq[Sequence],
        aux_hidden_state_layers: Seq[int] = (),
        on_chunk: HiddenStateChunk | None = None,
        most: int | None = None,
    ) -> None:
        left = sum(len(one.tokens) for one in sequences) if most is None else most
        for sequence in sequences:
            start = len(sequence.kv)
            sequence.kv.extend(sequence.tokens[start:-1][:left])
            left -= len(sequence.kv) - start
            if aux_hidden_state_layers and on_chunk is not None and len(sequence.kv) > start:
                paths = [tuple(sequence.tokens[: end + 1]) for end in range(start, len(sequence.kv))]
                states = {
                    layer: torch.stack([self._state(path, FULL, layer) for path in paths])
                    for layer in aux_hidden_state_layers
                }
                on_chunk(sequence, start, states)

    def score(
        self, batch: Trees, aux_hidden_state_layers: Seq[int] = (), graph: SubGraph = FULL, resume: Scores | None = None
    ) -> Scores:
        stop = self.num_layers if graph.stop is None else graph.stop
        if not 0 <= graph.start <= stop <= self.num_layers:
            raise ValueError(f"layers {graph.start}..{stop} are not a range of the table's {self.num_layers}")
        parts = []
        for index, (sequence, tree) in enumerate(batch):
            prefix = (*sequence.kv, sequence.tokens[len(sequence.kv)])
            paths = [prefix, *((*prefix, *tree.path_tokens(node)) for node in range(len(tree)))]
            for auxiliary in tree.auxiliary_tokens:
                seen = sorted(node for node in auxiliary.attends if 0 <= node < len(tree))
                path = tree.path_tokens(seen[-1]) if seen else []
                paths.append((*prefix, *path, auxiliary.token))
            read = self._read(sequence.kv, graph.kv[index]) if index in graph.kv else None
            rows = torch.stack([self._state(path, graph, stop, read) for path in paths])
            states = {
                layer: torch.stack([self._state(path, graph, layer, read) for path in paths])
                for layer in aux_hidden_state_layers
            }
            parts.append(TreeScores(sequence, tree, rows, states))
        return Scores(parts, graph)

    def keys(self, kv: Any, start: int, stop: int) -> Tensor:
        noise = [self._noise((-1, token)) for token in kv[start:stop]]  # (2 * layers * V,) each
        return torch.stack(noise, 1).view(self.num_layers, _HEADS, self.vocab_size, stop - start).transpose(2, 3)

    def queries(self, sequences: Seq[Sequence]) -> list[Tensor]:
        return [self._noise((-2, *one.tokens[-2:])).view(self.num_layers, _HEADS, -1) for one in sequences]

    def _read(self, kv: list[int], positions: Tensor) -> Read | None:
        """The tokens that each layer's heads may read; None where that is all of them."""
        if positions.shape[-1] == len(kv):
            return None
        by_layer = positions.expand(self.num_layers, _HEADS, -1).tolist()
        return tuple(tuple(tuple(kv[at] for at in head) for head in heads) for heads in by_layer)

    def _state(self, path: tuple[int, ...], graph: SubGraph, layer: int, read: Read | None = None) -> Tensor:
        """Residual stream of the last token of ``path`` entering ``layer``, (V,); attention reads ``read`` of the
        committed tokens (None: all)."""
        run = [
            sublayer
            for index in range(graph.start, min(layer, self.num_layers if graph.stop is None else graph.stop))
            for sublayer, skipped in ((2 * index, graph.skip_attention), (2 * index + 1, graph.skip_mlp))
            if index not in skipped
        ]
        count = 2 * self.num_layers
        if len(run) == count and read is None:
            return self.table(path)
        embedding = torch.nn.functional.one_hot(torch.tensor(path[-1]), self.vocab_size).float()
        if not run:
            return embedding
        added = self._added(path[-2:])
        if read is not None:
            added = added.clone()
            added[::2] = self._added((hash(read) % 1_000_003, *path[-2:]))[::2]
        return embedding + added[run].sum(0) + (self.table(path) - embedding) * (len(run) / count)

    def _added(self, context: tuple[int, ...]) -> Tensor:
        """What every sublayer adds beside its share of the whole, (2 * layers, V); all together nothing."""
        noise = self._noise(context).view(2 * self.num_layers, self.vocab_size)
        return noise - noise.mean(0)

    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        if scores.forward_state != FULL and any(path is not None for path in paths):
            raise ValueError("only a full forward can be committed; resume it with graph=FULL first")
        for part, path in zip(scores.parts, paths, strict=True):
            if path is None:
                continue
            kv, tree = part.sequence.kv, part.tree
            tree.check_path(path)
            kv.extend([part.sequence.tokens[len(kv)], *(tree.tokens[node] for node in path)])

    def fork(self, kv: Any, length: int | None = None) -> list[int]:
        return list(kv[: rows_to_keep(length, len(kv))])

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, self.vocab_size).float()

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden

    def lm_head_rows(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)
