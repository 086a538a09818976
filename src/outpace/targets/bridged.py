"""BridgedTarget: a draft model over the target's vocabulary, whatever its own.

Token-level intersection (TLI; Timor et al. 2025, arXiv 2502.05202): the draft model's distribution over the tokens that
both vocabularies have, renormalised. Through this target any draft model samples target tokens with a true q, so that
every method that takes a draft model takes it, under ordinary rejection.

The draft model reads its own tokens. Each committed target token is translated by itself and never again, and K/V
grows by the new tokens alone. A token that both have is one row; any other token is as many as its text needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import HiddenStateChunk, Scores, Sequence, Target, Trees, TreeScores
from outpace.targets.costs import Costs
from outpace.targets.draft_model_sequence import DraftModelSequence
from outpace.targets.kv_store import rows_to_keep
from outpace.targets.sub_graph import FULL, SubGraph
from outpace.vocabulary.shared import VocabularyMap
from outpace.vocabulary.strings import StringSum


@dataclass(eq=False, slots=True)
class BridgedKV:
    """State of one sequence. ``inner``: the draft model's own, whose K/V may lag behind. ``ids``: the committed tokens
    in the draft model's tokens; the first ``ends[i]`` of them translate the first i + 1 committed tokens."""

    inner: DraftModelSequence
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _DraftForward:
    """The draft model's own scores, and per sequence the node of its tree (``ROOT``: -1) where the root and every node
    end, the nodes whose rows each one's logits are made of, and how many target tokens were committed."""

    scores: Scores
    ends: list[list[int]]
    reads: list[list[tuple[int, ...]]]
    lengths: list[int]


class BridgedTarget(Target):
    """``draft`` as a target over the vocabulary that ``vocabulary`` translates from.

    Logits of tokens that the vocabularies share are the draft model's own, all others -inf. A text that outgrows the
    draft model's context is read from a later start, moved on by half a context at a time; ``context_length`` is
    therefore the target's. Auxiliary tokens, hidden states of the prefill and subsets of K/V are refused with BadInput:
    they name rows of the target. Numerics: the draft model's.
    """

    whole = False

    def __init__(self, draft: Target, vocabulary: VocabularyMap, context_length: int) -> None:
        self.draft = draft
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.target_size
        self.num_layers = draft.num_layers
        self.hidden_size = draft.hidden_size
        self.dtype, self.device = draft.dtype, draft.device
        self.context_length = context_length

    @cached_property
    def costs(self) -> Costs:
        return self.draft.costs  # nearly all tokens are one row of the draft model too

    def open(self) -> BridgedKV:
        return BridgedKV(DraftModelSequence(self.draft))

    def length(self, kv: BridgedKV) -> int:
        return len(kv.ends)

    def kv_bytes(self, kv: BridgedKV | None, rows: int = 0) -> int:
        # Nearly all tokens are one of the draft model's.
        return self.draft.kv_bytes(None if kv is None else kv.inner.sequence.kv, rows)

    # ---------------------------------------------------------------------------------------------- translation

    def _append(self, kv: BridgedKV, tokens: Iterable[int]) -> None:
        """Translate tokens that are being committed."""
        for token in tokens:
            kv.ids += self._pieces(kv, token)
            kv.ends.append(len(kv.ids))

    def _pieces(self, kv: BridgedKV, token: int) -> tuple[int, ...]:
        """The draft tokens of the token after the committed ones."""
        pieces, start = self.vocabulary.pieces(token), self.vocabulary.start
        if kv.ends:
            return pieces
        if start and pieces[: len(start)] != start:
            return (*start, *pieces)
        return pieces or (self.vocabulary.filler,)

    # ------------------------------------------------------------------------------------------------- protocol

    def prefill(
        self,
        sequences: Seq[Sequence],
        aux_hidden_state_layers: Seq[int] = (),
        on_chunk: HiddenStateChunk | None = None,
        most: int | None = None,
    ) -> None:
        if aux_hidden_state_layers:
            raise BadInput(
                "a draft model of another vocabulary has no hidden states for the target's tokens: its rows are others"
            )
        pending = [one for one in sequences if len(one.kv.ends) < len(one.tokens) - 1]
        left = sum(len(one.tokens) for one in pending) if most is None else most
        for one in pending:
            done = len(one.kv.ends)
            self._append(one.kv, one.tokens[done:-1][:left])
            left -= len(one.kv.ends) - done
            one.kv.inner.place([*one.kv.ids, *self._pieces(one.kv, one.tokens[len(one.kv.ends)])], 0)
        if pending:
            self.draft.prefill([one.kv.inner.sequence for one in pending])

    def score(
        self, batch: Trees, aux_hidden_state_layers: Seq[int] = (), graph: SubGraph = FULL, resume: Scores | None = None
    ) -> Scores:
        if graph.kv:
            raise BadInput(
                "a draft model of another vocabulary reads all of its K/V: its positions are not the target's"
            )
        earlier: _DraftForward | None = None if resume is None else resume.forward_state
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
        return Scores(parts, _DraftForward(scores, ends, reads, [len(sequence.kv.ends) for sequence, _ in batch]))

    def _place_tree(self, sequence: Sequence, tree: TokenTree) -> Sequence:
        """The draft model's sequence, ready for this tree."""
        if tree.auxiliary_tokens:
            raise BadInput(
                "a draft model of another vocabulary takes no auxiliary tokens: their positions are the target's"
            )
        kv: BridgedKV = sequence.kv
        deep: list[int] = []
        for parent, token in zip(tree.parents, tree.tokens, strict=True):
            deep.append(len(self.vocabulary.pieces(token)) + (0 if parent == ROOT else deep[parent]))
        ids = [*kv.ids, *self._pieces(kv, sequence.tokens[len(kv.ends)])]
        return kv.inner.place(ids, self._reach + max(deep, default=0))

    def _catch_up(self, inner: Sequence) -> tuple[TokenTree, list[int], list[tuple[int, ...]]]:
        """A chain of the draft tokens behind the draft model's root that have no K/V yet."""
        run = TokenTree.chain(inner.tokens[self.draft.length(inner.kv) + 1 :])
        end = len(run) - 1  # ROOT where there are none
        return run, [end], [self._reads(run, end)]

    def _grow(self, run: TokenTree, tree: TokenTree, where: list[int], rows: list[tuple[int, ...]]) -> None:
        """Give the nodes of ``tree`` that have no rows yet their own."""
        for node in range(len(where) - 1, len(tree)):
            end = where[tree.parents[node] + 1]
            for piece in self.vocabulary.pieces(tree.tokens[node]):
                end = run.add(end, piece)
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
        """Draft logits (n, draft V) as (n, V); -inf for tokens that are not shared."""
        out = rows.new_full((len(rows), self.vocab_size), float("-inf"))
        out[:, self.vocabulary.target_ids.to(rows.device)] = rows[:, self.vocabulary.draft_ids.to(rows.device)]
        return out

    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        found: _DraftForward = scores.forward_state
        inner: list[list[int] | None] = []
        for index, (part, path) in enumerate(zip(scores.parts, paths, strict=True)):
            if path is None:
                inner.append(None)
                continue
            if len(part.sequence.kv.ends) != found.lengths[index]:
                raise ValueError("these scores are stale: the sequence has moved on since they were computed")
            part.tree.check_path(path)
            last = path[-1] if path else ROOT
            inner.append(found.scores[index].tree.path(found.ends[index][last + 1]))
            self._commit_to(part.sequence.kv.inner.sequence, found.scores[index])
        self.draft.commit(found.scores, inner)
        for part, path in zip(scores.parts, paths, strict=True):
            if path is not None:
                kv: BridgedKV = part.sequence.kv
                self._append(kv, [part.sequence.tokens[len(kv.ends)], *(part.tree.tokens[node] for node in path)])
                kv.inner.follow(kv.ids)

    @staticmethod
    def _commit_to(sequence: Sequence, scores: TreeScores) -> None:
        """The draft model's rows go to ``sequence``: a fork of the one that was scored, where K/V was copied since."""
        if scores.sequence is not sequence:
            sequence.tokens[:] = scores.sequence.tokens
            scores.sequence = sequence

    def fork(self, kv: BridgedKV, length: int | None = None) -> BridgedKV:
        ends = kv.ends[: rows_to_keep(length, len(kv.ends))]
        ids = kv.ids[: ends[-1]] if ends else []
        return BridgedKV(kv.inner.fork(ids), ids, list(ends))

    def close(self, kv: BridgedKV) -> None:
        kv.inner.close()

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings (n, hidden) of each token's last draft token."""
        pieces = [self.vocabulary.pieces(token) or (self.vocabulary.filler,) for token in tokens.tolist()]
        return self.draft.embed(torch.tensor([one[-1] for one in pieces]))

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self._spread(self.draft.lm_head(hidden))


class StringTarget(BridgedTarget):
    """``draft`` over the target's vocabulary by strings: the logit of a token is the log-probability that the draft
    model writes a text that begins with the token's (SLRS in Timor et al. 2025, arXiv 2502.05202).

    Every node runs the draft model in all contexts of ``strings``.
    """

    def __init__(self, draft: Target, vocabulary: VocabularyMap, strings: StringSum, context_length: int) -> None:
        super().__init__(draft, vocabulary, context_length)
        self.strings = strings
        self._reach = strings.depth

    def _reads(self, run: TokenTree, end: int) -> tuple[int, ...]:
        nodes = [end]
        for before, token in self.strings.contexts:
            nodes.append(run.add(nodes[before], token))
        return tuple(nodes)

    def _logits(self, logits: Tensor, reads: Seq[tuple[int, ...]]) -> Tensor:
        rows = [self.strings.logits(logits[[node + 1 for node in nodes]]) for nodes in reads]
        return torch.stack(rows) if rows else logits.new_zeros(0, self.vocab_size)

    def lm_head(self, hidden: Tensor) -> Tensor:
        raise BadInput("probabilities of strings cannot be computed from one hidden state")
