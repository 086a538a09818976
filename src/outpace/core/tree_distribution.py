"""TreeDistribution: the processed target distribution at every node of a tree.

Every processor is path-aware: at a node it sees the committed tokens and the draft tokens that lead to the node. The
order and meaning of the processors are in :mod:`outpace.core.sampling`.

Where no token can follow a node (a user's processor failed there, or every token is banned, by a grammar perhaps) the
distribution has a stand-in, the uniform one, and :meth:`TreeDistribution.failure` says why. Nothing is raised: a batch
of requests is judged together, and the engine ends those whose next token would come from a stand-in. The others'
tokens, and those that this one drew before, are what they would be in autoregressive decoding: rules keep the
distribution of whatever stands at the nodes that they reject.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from outpace.core.constraint import Bits, GrammarState, holds, mask, single, words
from outpace.core.errors import BadInput
from outpace.core.future_validity import TokenWeights
from outpace.core.processors import ProcessorFailure, States
from outpace.core.sampling import Sampler
from outpace.core.token_distribution import Certain, TokenDistribution
from outpace.core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from torch import Tensor


def _dead_end() -> BadInput:
    return BadInput(
        "no token can follow: logit_bias bans every token, alone or with a processor or grammar (or the model's logits "
        "are NaN)"
    )


class TreeDistribution:
    """The processed distribution at the nodes of one tree, computed for the nodes that are asked for, and kept.

    ``logits``, (rows, V), are raw: row 0 is the root's, row i + 1 node i's. ``sampler`` holds the history up to the
    root; a node's path of draft tokens is added to it. Where one token alone can follow a node its logits are not read:
    ``logits`` may then hold some rows only. ``rows`` says where each of these is, and ``whole`` makes all.
    """

    def __init__(
        self,
        sampler: Sampler,
        tree: TokenTree,
        logits: Tensor,
        rows: Mapping[int, int] | None = None,
        whole: Callable[[], Tensor] | None = None,
    ) -> None:
        # Penalties count in place: what is asked after the round's tokens are committed reads the history as it was.
        self.sampler = sampler.fork() if sampler.params.path_dependent else sampler
        self.tree = tree
        self.logits = logits
        self._rows, self._whole = rows, whole
        self._found: dict[int, TokenDistribution] = {}
        self._states: dict[int, States] = {ROOT: sampler.states}
        self._failures: dict[int, BadInput] = {}
        self._places: dict[int, GrammarState] = {ROOT: sampler.place}
        self._allowed: dict[int, Bits | None] = {}
        self._weights: dict[int, TokenWeights | None] = {}

    def _states_at(self, node: int) -> States:
        if node not in self._states:
            before = self._states_at(self.tree.parents[node])
            self._states[node] = self.sampler.advanced(before, self.tree.tokens[node])
        return self._states[node]

    def place(self, node: int) -> GrammarState:
        """The grammar's state after ``node``."""
        if node not in self._places:
            before = self.place(self.tree.parents[node])
            self._places[node] = self.sampler.moved(before, self.tree.tokens[node])
        return self._places[node]

    def allowed(self, node: int) -> Bits | None:
        """The tokens that a grammar lets follow ``node``; None: all. An empty set where it lets none."""
        import numpy as np

        if self.sampler.grammar is None:
            return None
        if node not in self._allowed:
            found = self.sampler.allowed(self.place(node))
            if isinstance(found, BadInput):
                self._failures.setdefault(node, found)
                found = np.zeros(words(self.sampler.vocab_size), np.uint32)
            self._allowed[node] = found
        return self._allowed[node]

    def weights(self, node: int) -> TokenWeights | None:
        """By what the probabilities of the allowed tokens after ``node`` are multiplied; None: all by the same."""
        if self.sampler.grammar is None:
            return None
        return self._weights[node] if node in self._weights else self.sampler.weights(self.place(node))

    def weigh(self, node: int, weights: TokenWeights | None) -> None:
        """Set the weights after ``node``, of which nothing was asked before."""
        self._weights[node] = weights

    def certain(self, node: int) -> int | None:
        """The token that follows ``node`` whatever the logits, as the grammar allows no other; None where several may
        follow, or none."""
        params = self.sampler.params
        if self.sampler.grammar is None or params.logit_bias or params.processors:
            return None
        allowed = self.allowed(node)
        return None if allowed is None else single(allowed)

    def _rows_of(self, nodes: Iterable[int]) -> list[int]:
        """Where the logits of nodes are."""
        rows = [node + 1 for node in nodes]
        if self._rows is None:
            return rows
        if all(row in self._rows for row in rows):
            return [self._rows[row] for row in rows]
        assert self._whole is not None
        self.logits, self._rows = self._whole(), None
        return rows

    def failure(self, node: int) -> BadInput | None:
        """Why no token can follow ``node``, of which p or the argmax was asked; None: one can."""
        return self._failures.get(node)

    def processed(self, nodes: Sequence[int]) -> Tensor:
        """Float32 logits after bias, penalties, the user's processors, the grammar and its weights, before temperature:
        (len(nodes), V).

        All -inf where a processor failed, and where the grammar lets nothing follow.
        """
        import torch

        sampler = self.sampler
        if not sampler.changes_logits:
            if len(nodes) == 1:
                [row] = self._rows_of(nodes)
                return self.logits[row : row + 1].float()
            where = self._rows_of(nodes)
            return self.logits[where].float()
        where = self._rows_of(nodes)
        rows = self.logits[where].float()
        processors = bool(sampler.params.processors)
        for row, node in zip(rows, nodes, strict=True):
            changes = sampler.changes(self.tree.path_tokens(node), None if processors else self.allowed(node))
            if changes is not None:
                changes.apply(row)
        if processors:
            rows = torch.stack([self._by_processors(row, node) for row, node in zip(rows, nodes, strict=True)])
        for row, node in zip(rows, nodes, strict=True):
            if (weights := self.weights(node)) is not None:
                weights.apply(row, sampler.params.temperature)
        return rows

    def _by_processors(self, row: Tensor, node: int) -> Tensor:
        import torch

        found = self.sampler.process(row, self._states_at(node))
        if not isinstance(found, ProcessorFailure):
            allowed = self.allowed(node)
            return found if allowed is None else mask(found.clone(), allowed)
        self._failures.setdefault(node, found)
        return torch.full_like(row, -math.inf)

    def ensure(self, nodes: Iterable[int]) -> None:
        """Open the distributions after all of ``nodes`` together."""
        sampler = self.sampler
        missing = []
        for node in dict.fromkeys(nodes):
            if node in self._found:
                continue
            if (only := self.certain(node)) is None:
                missing.append(node)
            else:
                self._found[node] = Certain(only, sampler.vocab_size)
        if not missing:
            return
        weighted = [node for node in missing if self.weights(node) is not None]
        if weighted:
            self._open(weighted, processed=True)
            missing = [node for node in missing if node not in weighted]
        if missing:
            self._open(missing, processed=False)

    def _open(self, missing: Sequence[int], *, processed: bool) -> None:
        """Open distributions, by way of processed logits or, which is faster, straight from the raw ones."""
        sampler = self.sampler
        if sampler.params.processors or processed:
            opened = sampler.open_rows(self.processed(missing), range(len(missing)), sampler.params)
        else:
            rows = self._rows_of(missing)
            changed = missing if sampler.changes_logits else []
            changes = [sampler.changes(self.tree.path_tokens(node), self.allowed(node)) for node in changed]
            opened = sampler.open_rows(self.logits, rows, sampler.params, changes)
        for node, one in zip(missing, opened, strict=True):
            if one is None:
                self._failures.setdefault(node, _dead_end())
            self._found[node] = self._stand_in() if one is None else one

    def _stand_in(self) -> TokenDistribution:
        import torch

        sampler = self.sampler
        [found] = sampler.open_rows(torch.zeros(1, sampler.vocab_size, device=self.logits.device), [0], sampler.params)
        assert found is not None
        return found

    def at(self, node: int) -> TokenDistribution:
        """The distribution after ``node``; a stand-in where no token can follow."""
        if node not in self._found:
            self.ensure([node])
        return self._found[node]

    def p(self, node: int) -> Tensor:
        """All probabilities after ``node``: (V,) float32, of :meth:`at`. Sums to one."""
        return self.at(node).dense()

    def dead_end(self, node: int) -> bool:
        """Whether no token can follow ``node``: every one is banned. Drafters do not draw there."""
        if not self.sampler.changes_logits:
            return False
        if self.sampler.params.processors:
            return not bool((self.processed([node])[0] > -math.inf).any())
        if self.sampler.params.greedy:
            self.argmax(node)
        else:
            self.ensure([node])
        return self.failure(node) is not None

    def argmax(self, node: int) -> int:
        """The greedy choice after ``node``; ties go to the smallest id. A stand-in where no token can follow."""
        if (only := self.certain(node)) is not None:
            return only
        [at] = self._rows_of([node])
        row, allowed = self.logits[at], None
        if self.sampler.params.processors or self.weights(node) is not None:
            row = self.processed([node])[0]
        elif self.sampler.changes_logits:
            allowed = self.allowed(node)
            changes = self.sampler.changes(self.tree.path_tokens(node))
            if changes is not None:
                row = changes.apply(row.float().clone())
        token, best = _highest(row)
        if allowed is not None and not holds(allowed, token):
            token, best = _highest(mask(row.float().clone(), allowed))
        if not best > -math.inf:
            self._failures.setdefault(node, _dead_end())
        return token

    def logprobs(self, node: int, token: int, top: int = 0) -> tuple[float, list[tuple[int, float]]]:
        """Natural log-probability of ``token`` under the raw logits after ``node``, and (id, log-probability) of the
        ``top`` most likely."""
        [at] = self._rows_of([node])
        row = self.logits[at].float().log_softmax(-1)
        best = row.topk(min(top, len(row))) if top else None
        pairs = [] if best is None else list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return float(row[token]), pairs


def _highest(row: Tensor) -> tuple[int, float]:
    """The first token of the largest logit of a row (V,), and that logit."""
    import torch

    if row.device.type == "cpu" and row.dtype == torch.float32:
        values = row.numpy()  # whose argmax is several times quicker at these sizes
        token = int(values.argmax())
        return token, float(values[token])
    token = int(row.argmax())
    return token, float(row[token])
