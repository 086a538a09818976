"""TableTarget: a target whose logits are a function of the token path. For certification and tests.

Any function will do, the default is a fixed pseudo-random table over the last few tokens. It follows the whole
protocol (its K/V is the list of committed tokens, so that a wrong commit shows), but has no layers to skip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.errors import BadInput
from outpace.targets.base import FULL, Scores, Sequence, SubGraph, TapChunk, Target, TreeScores
from outpace.tree import ROOT, TokenTree

Table = Callable[[tuple[int, ...]], Tensor]


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


class TableTarget(Target):
    """A target without a network. ``table`` maps all tokens up to a row to the logits after it."""

    def __init__(
        self, vocab_size: int, table: Table | None = None, *, seed: int = 0, context_length: int = 256
    ) -> None:
        self.vocab_size = vocab_size
        self.num_layers = 1
        self.hidden_size = vocab_size
        self.dtype = "float32"
        self.context_length = context_length
        self.table = table or random_table(vocab_size, seed)

    def open(self) -> list[int]:
        return []

    def length(self, kv: Any) -> int:
        return len(kv)

    def prefill(self, sequences: Seq[Sequence], taps: Seq[int] = (), on_chunk: TapChunk | None = None) -> None:
        for sequence in sequences:
            start = len(sequence.kv)
            sequence.kv.extend(sequence.tokens[start:-1])
            if taps and on_chunk is not None and len(sequence.kv) > start:
                rows = self.embed(torch.tensor(sequence.tokens[start:-1]))
                on_chunk(sequence, start, dict.fromkeys(taps, rows))

    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        taps: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        if graph != FULL:
            raise BadInput("a table target has no layers; it cannot run a sub-graph")
        parts = []
        for sequence, tree in batch:
            prefix = (*sequence.kv, sequence.tokens[len(sequence.kv)])
            rows = [self.table(prefix)]
            rows += [self.table((*prefix, *tree.path_tokens(node))) for node in range(len(tree))]
            for side in tree.side:
                seen = sorted(node for node in side.attends if 0 <= node < len(tree))
                path = tree.path_tokens(seen[-1]) if seen else []
                rows.append(self.table((*prefix, *path, side.token)))
            tokens = torch.tensor(tree.row_tokens(prefix[-1]))
            states: Mapping[int, Tensor] = dict.fromkeys(taps, self.embed(tokens)) if taps else {}
            parts.append(TreeScores(sequence, tree, torch.stack(rows), states))
        return Scores(parts, None)

    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        for part, path in zip(scores.parts, paths, strict=True):
            if path is None:
                continue
            kv, tree = part.sequence.kv, part.tree
            root = part.sequence.tokens[len(kv)]
            parent = ROOT
            for node in path:
                if tree.parents[node] != parent:
                    raise ValueError(f"path {list(path)} is not a path of the tree")
                parent = node
            kv.extend([root, *(tree.tokens[node] for node in path)])

    def fork(self, kv: Any, length: int | None = None) -> list[int]:
        return list(kv[:length])

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, self.vocab_size).float()

    def head(self, hidden: Tensor) -> Tensor:
        return hidden
