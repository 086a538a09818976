"""A draft model over the target's vocabulary, whatever its own.

Token-level intersection (TLI; Timor et al. 2025, arXiv 2502.05202): of the draft model's distribution the tokens that
both vocabularies have stay, renormalised. Seen through this target any draft model samples target tokens with a true q,
so that every method that takes a draft model takes it, and ordinary rejection judges it.

The draft model reads its own tokens. Each committed target token is translated by itself: what was translated stays,
and K/V grows by the new tokens alone. A token that both have is one row; any other token is as many as its text needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import FULL, HiddenStateChunk, Scores, Sequence, SubGraph, Target, TreeScores
from outpace.targets.following import Follower
from outpace.vocabulary.shared import VocabularyMap
from outpace.vocabulary.strings import StringSum


@dataclass(eq=False, slots=True)
class BridgedKV:
    """What is kept of one sequence: the draft model's own, whose tokens are the translation and whose K/V may lag
    behind. ``ids`` translate the committed tokens; ``ends[i]`` of them the first i + 1."""

    inner: Follower
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Side:
    """The draft model's side of a score: its own scores, and per sequence the row of its tree (``ROOT`` -1) where the
    root and every node end, the rows that each one's logits are made of, and the target tokens committed then."""

    scores: Scores
    ends: list[list[int]]
    reads: list[list[tuple[int, ...]]]
    lengths: list[int]


class BridgedTarget(Target):
    """``draft`` seen over the vocabulary that ``vocabulary`` translates from.

    Logits of tokens that the vocabularies share are the draft model's own, all others -inf. A text that outgrows the
    draft model's context is read from a later start, moved on by half a context at a time; ``context_length`` is
    therefore the target's. Side nodes, taps of the prefill and subsets of K/V are refused: they speak of the target's
    rows. Numerics: the draft model's.
    """

    whole = False

    def __init__(self, draft: Target, vocabulary: VocabularyMap, context_length: int) -> None:
        self.draft = draft
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.target_size
        self.num_layers = draft.num_layers
        self.hidden_size = draft.hidden_size
        self.dtype = draft.dtype
        self.context_length = context_length

    def open(self) -> BridgedKV:
        return BridgedKV(Follower(self.draft))

    def length(self, kv: BridgedKV) -> int:
        return len(kv.ends)

    # ---------------------------------------------------------------------------------------------- translation

    def _append(self, kv: BridgedKV, tokens: Iterable[int]) -> None:
        """Translate tokens that are being committed."""
        for token in tokens:
            kv.ids += self._pieces(kv, token)
            kv.ends.append(len(kv.ids))

    def _pieces(self, kv: BridgedKV, token: int) -> tuple[int, ...]:
        """The draft tokens of the token after the committed ones."""
        pieces, words = self.vocabulary.pieces(token), self.vocabulary
        if kv.ends:
            return pieces
        if words.start and pieces[: len(words.start)] != words.start:
            return (*words.start, *pieces)
        return pieces or (words.filler,)

    # ------------------------------------------------------------------------------------------------- protocol

    def prefill(
        self, sequences: Seq[Sequence], aux_hidden_state_layers: Seq[int] = (), on_chunk: HiddenStateChunk | None = None
    ) -> None:
        if aux_hidden_state_layers:
            raise BadInput("a draft model of another vocabulary streams no taps: its rows are not the target's tokens")
        pending = [one for one in sequences if len(one.kv.ends) < len(one.tokens) - 1]
        for one in pending:
            self._append(one.kv, one.tokens[len(one.kv.ends) : -1])
            one.kv.inner.place([*one.kv.ids, *self._pieces(one.kv, one.tokens[-1])], 0)
        if pending:
            self.draft.prefill([one.kv.inner.sequence for one in pending])

    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        aux_hidden_state_layers: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        if graph.kv:
            raise BadInput("a draft model of another vocabulary reads all of its K/V: positions are not the target's")
        earlier: _Side | None = None if resume is None else resume.side
        runs = [self._place_tree(sequence, tree) for sequence, tree in batch]
        if earlier is not None and any(
            part.sequence is not run for part, run in zip(earlier.scores.parts, runs, strict=True)
        ):
            earlier = None  # a text was moved on in its window: its rows are others now
        ends, reads, pairs = [], [], []
        for index, ((_, tree), inner) in enumerate(zip(batch, runs, strict=True)):
            if earlier is None:
                run, where, rows = self._catch_up(inner)
            else:
                run = earlier.scores[index].tree
                where, rows = list(earlier.ends[index]), list(earlier.reads[index])
            self._grow(run, tree, where, rows)
            ends.append(where)
            reads.append(rows)
            pairs.append((inner, run))
        scores = self.draft.score(pairs, aux_hidden_state_layers, graph, None if earlier is None else earlier.scores)
        parts = []
        for index, ((sequence, tree), part) in enumerate(zip(batch, scores.parts, strict=True)):
            known = None if resume is None or earlier is None else resume[index]
            done = 0 if known is None else 1 + known.nodes
            fresh = self._logits(part.logits, reads[index][done:])
            logits = fresh if known is None else torch.cat([known.logits[:done], fresh])
            rows_of = torch.tensor([end + 1 for end in ends[index]])
            parts.append(
                TreeScores(sequence, tree, logits, {at: rows[rows_of] for at, rows in part.hidden_states.items()})
            )
        return Scores(parts, _Side(scores, ends, reads, [len(sequence.kv.ends) for sequence, _ in batch]))

    def _place_tree(self, sequence: Sequence, tree: TokenTree) -> Sequence:
        """The draft model's sequence, ready for this tree."""
        if tree.side:
            raise BadInput("a draft model of another vocabulary takes no side nodes: their positions are the target's")
        kv: BridgedKV = sequence.kv
        deep: list[int] = []
        for parent, token in zip(tree.parents, tree.tokens, strict=True):
            deep.append(len(self.vocabulary.pieces(token)) + (0 if parent == ROOT else deep[parent]))
        ids = [*kv.ids, *self._pieces(kv, sequence.tokens[len(kv.ends)])]
        return kv.inner.place(ids, self._reach + max(deep, default=0))

    def _catch_up(self, inner: Sequence) -> tuple[TokenTree, list[int], list[tuple[int, ...]]]:
        """A tree of the tokens that are committed, or the root's, but have not been run."""
        run = TokenTree.chain(inner.tokens[self.draft.length(inner.kv) + 1 :])
        end = len(run) - 1  # ROOT where there are none
        return run, [end], [self._reads(run, end)]

    def _grow(self, run: TokenTree, tree: TokenTree, where: list[int], rows: list[tuple[int, ...]]) -> None:
        """Give the nodes of ``tree`` that have no rows yet their own."""
        for node in range(len(where) - 1, len(tree)):
            end = where[tree.parents[node] + 1]
            for piece in self.vocabulary.pieces(tree.tokens[node]):
                known = run.child(end, piece)
                end = run.add(end, piece) if known is None else known
            where.append(end)
            rows.append(self._reads(run, end))

    _reach = 0
    """How many rows deeper than a node the rows that its logits are made of may lie."""

    def _reads(self, run: TokenTree, end: int) -> tuple[int, ...]:
        """The nodes of ``run`` that the logits after ``end`` are made of, added where they are missing."""
        return (end,)

    def _logits(self, logits: Tensor, reads: Seq[tuple[int, ...]]) -> Tensor:
        """Logits over the target's vocabulary, (len(reads), V), from the draft model's rows."""
        return self._spread(logits[[end + 1 for (end,) in reads]])

    def _spread(self, rows: Tensor) -> Tensor:
        words = self.vocabulary
        out = rows.new_full((len(rows), words.target_size), float("-inf"))
        out[:, words.target_ids.to(rows.device)] = rows[:, words.draft_ids.to(rows.device)]
        return out

    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        side: _Side = scores.side
        inner: list[list[int] | None] = []
        for index, (part, path) in enumerate(zip(scores.parts, paths, strict=True)):
            if path is None:
                inner.append(None)
                continue
            if len(part.sequence.kv.ends) != side.lengths[index]:
                raise ValueError("these scores are stale: the sequence has moved on since they were computed")
            for parent, node in zip((ROOT, *path), path, strict=False):
                if part.tree.parents[node] != parent:
                    raise ValueError(f"{list(path)} is not a path of the tree")
            last = path[-1] if path else ROOT
            inner.append(side.scores[index].tree.path(side.ends[index][last + 1]))
        self.draft.commit(side.scores, inner)
        for part, path in zip(scores.parts, paths, strict=True):
            if path is not None:
                kv: BridgedKV = part.sequence.kv
                self._append(kv, [part.sequence.tokens[len(kv.ends)], *(part.tree.tokens[node] for node in path)])
                kv.inner.follow(kv.ids)

    def fork(self, kv: BridgedKV, length: int | None = None) -> BridgedKV:
        ends = kv.ends[:length]
        ids = kv.ids[: ends[-1]] if ends else []
        return BridgedKV(kv.inner.fork(ids), ids, list(ends))

    def close(self, kv: BridgedKV) -> None:
        kv.inner.close()

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings of each token's last draft token."""
        pieces = [self.vocabulary.pieces(token) or (self.vocabulary.filler,) for token in tokens.tolist()]
        return self.draft.embed(torch.tensor([one[-1] for one in pieces]))

    def head(self, hidden: Tensor) -> Tensor:
        return self._spread(self.draft.head(hidden))


class StringTarget(BridgedTarget):
    """``draft`` seen over the target's vocabulary through its strings: the logits of a token are the log-probability
    that the draft model writes a string that begins with it (SLRS in Timor et al. 2025, arXiv 2502.05202).

    Every node runs the draft model in all contexts of ``strings``.
    """

    def __init__(self, draft: Target, vocabulary: VocabularyMap, strings: StringSum, context_length: int) -> None:
        super().__init__(draft, vocabulary, context_length)
        self.strings = strings
        self._reach = strings.depth

    def _reads(self, run: TokenTree, end: int) -> tuple[int, ...]:
        nodes = [end]
        for before, token in self.strings.contexts:
            known = run.child(nodes[before], token)
            nodes.append(run.add(nodes[before], token) if known is None else known)
        return tuple(nodes)

    def _logits(self, logits: Tensor, reads: Seq[tuple[int, ...]]) -> Tensor:
        rows = [self.strings.logits(logits[[node + 1 for node in nodes]]) for nodes in reads]
        return torch.stack(rows) if rows else logits.new_zeros(0, self.vocab_size)

    def head(self, hidden: Tensor) -> Tensor:
        raise BadInput("strings are not read off one hidden state")
