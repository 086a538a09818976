"""TreeDistribution: the processed target distribution at every node of a tree.

Every processor is path-aware: at a node it sees the committed tokens and the draft tokens that lead to the node. The
order and meaning of the processors are in :mod:`outpace.core.sampling`.

Where no token can follow a node (a user's processor failed there, or every token is banned) the distribution has a
stand-in, the uniform one, and :meth:`TreeDistribution.failure` says why. Nothing is raised: a batch of requests is
judged together, and the engine ends those whose next token would come from a stand-in. The others' tokens, and those
that this one drew before, are what they would be in autoregressive decoding: rules keep the distribution of whatever
stands at the nodes that they reject.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from outpace.core.errors import BadInput
from outpace.core.processors import ProcessorFailure, States
from outpace.core.sampling import Sampler
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from torch import Tensor


def _dead_end() -> BadInput:
    return BadInput(
        "no token can follow: logit_bias bans every token, alone or with a processor (or the model's logits are NaN)"
    )


class TreeDistribution:
    """The processed distribution at the nodes of one tree, computed for the nodes that are asked for, and kept.

    ``logits``, (rows, V), are raw: row 0 is the root's, row i + 1 node i's. ``sampler`` holds the history up to the
    root; a node's path of draft tokens is added to it.
    """

    def __init__(self, sampler: Sampler, tree: TokenTree, logits: Tensor) -> None:
        # Penalties count in place: what is asked after the round's tokens are committed reads the history as it was.
        self.sampler = sampler.fork() if sampler.params.path_dependent else sampler
        self.tree = tree
        self.logits = logits
        self._found: dict[int, TokenDistribution] = {}
        self._states: dict[int, States] = {ROOT: sampler.states}
        self._failures: dict[int, BadInput] = {}

    def _states_at(self, node: int) -> States:
        if node not in self._states:
            before = self._states_at(self.tree.parents[node])
            self._states[node] = self.sampler.advanced(before, self.tree.tokens[node])
        return self._states[node]

    def failure(self, node: int) -> BadInput | None:
        """Why no token can follow ``node``, of which p or the argmax was asked; None: one can."""
        return self._failures.get(node)

    def processed(self, nodes: Sequence[int]) -> Tensor:
        """Float32 logits after bias, penalties and the user's processors, before temperature: (len(nodes), V).

        All -inf where a processor failed.
        """
        import torch

        sampler = self.sampler
        if not sampler.changes_logits:
            if len(nodes) == 1:
                return self.logits[nodes[0] + 1 : nodes[0] + 2].float()
            return self.logits[[node + 1 for node in nodes]].float()
        rows = self.logits[[node + 1 for node in nodes]].float()
        if sampler.bias is not None:
            ids, bias = sampler.bias
            rows[:, ids] += bias.to(rows.device)
        if not sampler.params.path_dependent:
            return rows
        found = [self._penalised(row, node) for row, node in zip(rows, nodes, strict=True)]
        return torch.stack(found) if sampler.params.processors else rows  # penalties are in place

    def _penalised(self, row: Tensor, node: int) -> Tensor:
        import torch

        found = self.sampler.penalise(row, self.tree.path_tokens(node), self._states_at(node))
        if not isinstance(found, ProcessorFailure):
            return found
        self._failures.setdefault(node, found)
        return torch.full_like(row, -math.inf)

    def ensure(self, nodes: Iterable[int]) -> None:
        """Open the distributions after all of ``nodes`` together."""
        missing = [node for node in dict.fromkeys(nodes) if node not in self._found]
        if not missing:
            return
        sampler = self.sampler
        if sampler.changes_logits:
            logits, rows = self.processed(missing), list(range(len(missing)))
        else:
            logits, rows = self.logits, [node + 1 for node in missing]
        for node, one in zip(missing, sampler.open_rows(logits, rows, sampler.params), strict=True):
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
        return not bool((self.processed([node])[0] > -math.inf).any())

    def argmax(self, node: int) -> int:
        """The greedy choice after ``node``; ties go to the smallest id. A stand-in where no token can follow."""
        import torch

        row = self.logits[node + 1] if not self.sampler.changes_logits else self.processed([node])[0]
        if row.device.type == "cpu" and row.dtype == torch.float32:
            values = row.numpy()  # whose argmax is several times quicker at these sizes
            token = int(values.argmax())
            best = float(values[token])
        else:
            token = int(row.argmax())
            best = float(row[token])
        if not best > -math.inf:
            self._failures.setdefault(node, _dead_end())
        return token

    def logprobs(self, node: int, token: int, top: int = 0) -> tuple[float, list[tuple[int, float]]]:
        """Natural log-probability of ``token`` under the raw logits after ``node``, and (id, log-probability) of the
        ``top`` most likely."""
        row = self.logits[node + 1].float().log_softmax(-1)
        best = row.topk(min(top, len(row))) if top else None
        pairs = [] if best is None else list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return float(row[token]), pairs
