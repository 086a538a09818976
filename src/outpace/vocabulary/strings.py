"""StringSum: the probability that a draft model writes a string whose first target token is a given one, for
string-level rejection sampling (Timor et al. 2025, arXiv 2502.05202).

The draft model writes its tokens one after the other. The target token that its string begins with is the longest one
that fits, and is decided as soon as no longer one can fit any more. So the probability of a target token is a sum over
the draft token sequences that decide for it: every beginning that is undecided is one context to run the draft model
in. Their number is known from the two vocabularies alone, and is what :class:`StringSum` bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.models.base import ChatTokenizer

_NONE = -1


@dataclass(slots=True)
class _Node:
    """A beginning of target tokens: the token that it is, or the longest that it begins with."""

    best: int = _NONE
    next: dict[int, _Node] = field(default_factory=dict)


class StringSum:
    """The sum for one pair of vocabularies.

    ``contexts``: draft token sequences that leave the target token undecided, as (earlier context, draft token), the
    empty one left out; context 0 is the text itself, context i ``contexts[i - 1]``. Raises BadInput when they are more
    than ``most``.
    """

    def __init__(
        self, target: ChatTokenizer, draft: ChatTokenizer, target_size: int, draft_size: int, most: int
    ) -> None:
        self.target_size = target_size
        root = _trie(target, target_size)
        texts = {token: draft.token_bytes(token) for token in range(min(draft_size, len(draft)))}
        spoken = {token: text for token, text in texts.items() if text}
        if not spoken or not root.next:
            raise BadInput("string-level rejection needs two vocabularies with text in them")
        self.spoken = torch.tensor(list(spoken))
        """Draft tokens with a text, (d,): the only ones that are sampled."""
        self.contexts: list[tuple[int, int]] = []
        self._columns = {token: at for at, token in enumerate(spoken)}
        places, self.depths, outcomes = [root], [0], []
        for index, place in enumerate(places):  # grows as it is walked through
            row = []
            for token, text in spoken.items():
                best, open_at = _walk(place, text)
                row.append(target_size if best == _NONE else best)
                if open_at is not None:
                    row[-1] = target_size  # not yet decided: what it leads to counts
                    places.append(open_at)
                    self.depths.append(self.depths[index] + 1)
                    self.contexts.append((index, token))
            outcomes.append(row)
            if len(places) > most:
                raise BadInput(
                    "string-level rejection would sum over more than "
                    f"{most} sequences of draft tokens for every token that it drafts: the target's tokens can be "
                    "written by the draft model's in too many ways; use algorithm=tli or slem, or raise terms"
                )
        self.outcomes = torch.tensor(outcomes)
        """The target token that context i and spoken token j decide for, (1 + contexts, d); V where none."""
        self.depth = max(self.depths)

    def logits(self, rows: Tensor) -> Tensor:
        """Log-probabilities over the target's vocabulary, (V,), from the draft model's logits in every context,
        (1 + contexts, draft V). Strings that no target token begins are left out: they need not sum to one."""
        spoken = self.spoken.to(rows.device)
        log_q = rows[:, spoken].double().log_softmax(-1)
        reach = [log_q.new_zeros(())]
        for before, token in self.contexts:
            reach.append(reach[before] + log_q[before, self._columns[token]])
        mass = (log_q + torch.stack(reach)[:, None]).exp()
        sums = mass.new_zeros(self.target_size + 1)
        sums.index_add_(0, self.outcomes.to(rows.device).flatten(), mass.flatten())
        return sums[: self.target_size].log().float()


def _trie(tokenizer: ChatTokenizer, size: int) -> _Node:
    root = _Node()
    for token in range(min(size, len(tokenizer)) - 1, -1, -1):  # of several for one string the lowest stays
        text = tokenizer.token_bytes(token)
        if not text:
            continue
        node = root
        for byte in text:
            node = node.next.setdefault(byte, _Node())
        node.best = token
    pending = [root]
    while pending:
        node = pending.pop()
        for child in node.next.values():
            child.best = node.best if child.best == _NONE else child.best
            pending.append(child)
    return root


def _walk(node: _Node, text: bytes) -> tuple[int, _Node | None]:
    """The longest target token when ``text`` goes on from ``node``; and where it is left undecided, if it is."""
    for byte in text:
        child = node.next.get(byte)
        if child is None:
            return node.best, None
        node = child
    return node.best, node if node.next else None
