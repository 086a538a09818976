"""The baseline of learned drafters: what most often followed a token in the target's own answers.

A head whose draft tokens are not accepted more often has learned nothing beyond such counts. The method is only
measured by the bench, not registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor

from outpace.acceptance.rejection import RecursiveRejection
from outpace.core.errors import BadInput
from outpace.drafting.best_first import BestFirst, CandidateState, Successor, tree_controller
from outpace.drafting.calibration import Calibration
from outpace.engine.method import Method
from outpace.targets.base import Sequence, Target
from outpace.training.dataset import held_out
from outpace.training.shards import MANIFEST, Shards

FOLLOWERS = 8
"""Most followers that are kept of a token."""
_BINS = 20


class Bigrams:
    """The likeliest followers of each token, with their shares."""

    def __init__(self, tokens: int, followers: dict[int, list[tuple[int, float]]]) -> None:
        self.tokens, self._followers = tokens, followers

    @classmethod
    def fit(cls, texts: Iterable[Seq[int]], vocab_size: int) -> Bigrams:
        """Counted in ``texts``; what follows a text's end is not. Raises BadInput for tokens that do not exist."""
        pairs: list[Tensor] = []
        for text in texts:
            row = torch.tensor(text, dtype=torch.long)
            if len(row) and int(row.max()) >= vocab_size:
                raise BadInput(f"the conversations hold token {int(row.max())}, and the model has {vocab_size} tokens")
            pairs.append(row[:-1] * vocab_size + row[1:])
        whole = torch.cat(pairs) if pairs else torch.zeros(0, dtype=torch.long)
        codes, counts = torch.unique(whole, return_counts=True)
        order = counts.argsort(descending=True, stable=True)  # of equals the lower id
        totals: dict[int, int] = {}
        kept: dict[int, list[tuple[int, float]]] = {}
        for code, count in zip(codes[order].tolist(), counts[order].tolist(), strict=True):
            first, second = divmod(code, vocab_size)
            totals[first] = totals.get(first, 0) + count
            row_of = kept.setdefault(first, [])
            if len(row_of) < FOLLOWERS:
                row_of.append((second, float(count)))
        shares = {first: [(token, count / totals[first]) for token, count in row] for first, row in kept.items()}
        return cls(len(whole), shares)

    @classmethod
    def of(cls, folder: Path, vocab_size: int) -> Bigrams:
        """Fitted on the conversations that heads were trained on, the held-out ones left out. Raises BadInput."""
        if not (folder / MANIFEST).is_file():
            raise BadInput(f"there are no conversations at '{folder}': it has no {MANIFEST}")
        shards = Shards(folder, {})
        conversations = (one for path in shards.paths for one in shards.read(path) if not held_out(one.key))
        return cls.fit(([*one.prompt[-1:], *one.answer] for one in conversations), vocab_size)

    def after(self, token: int) -> list[tuple[int, float]]:
        """(token, share), likeliest first."""
        return self._followers.get(token, [])


class BigramDrafter(BestFirst[CandidateState]):
    """Drafts along the table, the ``topk`` likeliest followers of each token."""

    def __init__(self, table: Bigrams, topk: int) -> None:
        self._table, self._topk = table, topk

    def begin(self, sequence: Sequence) -> CandidateState:
        return CandidateState(sequence, Calibration(lambda kind: (kind + 0.5) / _BINS))

    def root(self, state: CandidateState) -> int:
        return state.sequence.tokens[-1]

    def successors(self, state: CandidateState, place: int) -> Iterable[Successor]:
        for token, share in self._table.after(place)[: self._topk]:
            yield Successor(token, min(_BINS - 1, int(_BINS * share)), token)


def bigram_method(target: Target, table: Bigrams, topk: int = FOLLOWERS, max_nodes: int | None = None) -> Method:
    """The table as a method: a tree, or a chain with ``topk`` 1. ``max_nodes``: draft tokens a round, on a path too;
    by default as many as the measured costs justify."""
    controller = tree_controller(target, max_nodes or 0, max_nodes)
    return Method("bigram", BigramDrafter(table, topk), RecursiveRejection(), controller)
