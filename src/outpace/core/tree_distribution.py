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
from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from torch import Tensor

_COLDEST = 1e-30
"""Lower temperatures would overflow float32; their distribution is the same."""


def _dead_end() -> BadInput:
    return BadInput(
        "no token can follow: logit_bias bans every token, alone or with a processor (or the model's logits are NaN)"
    )


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Mask all but the smallest set of tokens whose probability reaches ``top_p``; (n, V) -> (n, V).

    Of equal logits at the edge the smallest ids stay, so that a row's set never depends on the other rows.
    """
    import torch

    vocab = logits.shape[-1]
    probs = logits.softmax(-1)
    size = min(512, vocab)
    while True:  # a full sort costs milliseconds a row; the largest nearly always suffice
        values, ids = logits.topk(size, dim=-1)
        mass = probs.gather(-1, ids).cumsum(-1)
        if size == vocab or bool((mass[:, -1] >= top_p).all()):
            break
        size = min(vocab, size * 8)
    before = torch.cat([mass.new_zeros(len(mass), 1), mass[:, :-1]], dim=-1)
    count = (before < top_p).sum(-1, keepdim=True)
    smallest = values.gather(-1, count - 1)
    dropped = logits < smallest
    if bool(((~dropped).sum(-1, keepdim=True) > count).any()):
        tied = logits == smallest
        dropped |= tied & (tied.cumsum(-1) > count - (logits > smallest).sum(-1, keepdim=True))
    return logits.masked_fill(dropped, -math.inf)


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p, min-p, softmax: (n, V) processed logits -> (n, V) float32 probabilities.

    A row's result is the same bits whatever rows are processed beside it: torch's softmax is computed row by row, while
    its sums over a row are split among threads in another way where there are several rows.
    """
    import torch

    if params.greedy:
        best = logits.max(-1, keepdim=True)
        # A row without a token that can follow is NaN here as it is after a softmax; see TreeDistribution.p.
        return torch.zeros_like(logits).scatter_(-1, best.indices, torch.where(best.values > -math.inf, 1.0, math.nan))
    logits = logits / max(params.temperature, _COLDEST)
    if 0 < params.top_k < logits.shape[-1]:
        smallest = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if params.top_p < 1.0:
        logits = _keep_top_p(logits, params.top_p)
    probs = logits.softmax(-1)
    if params.min_p > 0.0:
        floor = params.min_p * probs.max(-1, keepdim=True).values
        probs = logits.masked_fill(probs < floor, -math.inf).softmax(-1)
    return probs


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
        self._probs: dict[int, Tensor] = {}
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
        if not sampler.params.path_dependent and sampler.bias is None:
            if len(nodes) == 1:
                return self.logits[nodes[0] + 1 : nodes[0] + 2].float()
            return self.logits[[node + 1 for node in nodes]].float()
        rows = self.logits[[node + 1 for node in nodes]].float()
        if sampler.bias is not None:
            ids, bias = sampler.bias
            rows[:, ids] += bias.to(rows.device)
        if not sampler.params.path_dependent:
            return rows
        return torch.stack([self._penalised(row, node) for row, node in zip(rows, nodes, strict=True)])

    def _penalised(self, row: Tensor, node: int) -> Tensor:
        import torch

        found = self.sampler.penalise(row, self.tree.path_tokens(node), self._states_at(node))
        if not isinstance(found, ProcessorFailure):
            return found
        self._failures.setdefault(node, found)
        return torch.full_like(row, -math.inf)

    def ensure(self, nodes: Iterable[int]) -> None:
        """Compute p for all of ``nodes`` in one vectorised pass."""
        import torch

        missing = [node for node in dict.fromkeys(nodes) if node not in self._probs]
        if missing:
            rows = self.processed(missing)
            alive = rows.amax(-1).isfinite().tolist()
            for at, node in enumerate(missing):
                if not alive[at]:
                    self._failures.setdefault(node, _dead_end())
            if not all(alive):
                rows = rows.masked_fill(~torch.tensor(alive, device=rows.device)[:, None], 0.0)
            self._probs.update(zip(missing, warp(rows, self.sampler.params).unbind(0), strict=True))

    def p(self, node: int) -> Tensor:
        """The distribution after ``node``: (V,) float32, sums to one; a stand-in where no token can follow."""
        if node not in self._probs:
            self.ensure([node])
        return self._probs[node]

    def dead_end(self, node: int) -> bool:
        """Whether no token can follow ``node``: every one is banned. Drafters do not draw there."""
        if not self.sampler.params.path_dependent and self.sampler.bias is None:
            return False
        return not bool((self.processed([node])[0] > -math.inf).any())

    def argmax(self, node: int) -> int:
        """The greedy choice after ``node``; ties go to the smallest id. A stand-in where no token can follow."""
        import torch

        plain = not self.sampler.params.path_dependent and self.sampler.bias is None
        row = self.logits[node + 1] if plain else self.processed([node])[0]
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
