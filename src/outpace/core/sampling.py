"""SamplingParams and the processed target distribution at every node of a tree.

Every processor is path-aware: at a node it sees the committed tokens and the draft tokens that lead to the node.
Order, as in transformers' ``generate``: logit bias, repetition penalty, presence and frequency penalties, the
user's processors, then (temperature > 0) temperature, top-k, top-p, min-p.

Semantics: repetition penalty (Keskar et al. 2019, arXiv 1909.05858) over prompt and output as transformers has it;
presence and frequency penalties over the output alone as OpenAI and vLLM define them; top-k keeps ties of the k-th
logit; top-p (Holtzman et al. 2020, arXiv 1904.09751) keeps the smallest set whose mass reaches p; min-p (Nguyen et al.
2024, arXiv 2407.01082) keeps tokens with at least min_p times the largest probability left. Logprobs are those of
the raw logits, before any processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.tree import ROOT, TokenTree


@runtime_checkable
class LogitsProcessor(Protocol):
    """A user's processor. States are values: ``advance`` returns a new one, so a tree can fork it at every node."""

    def begin(self, prompt: Sequence[int]) -> Any:
        """The state after the prompt."""
        ...

    def advance(self, state: Any, token: int) -> Any:
        """The state after one more token; must not change ``state``."""
        ...

    def process(self, state: Any, logits: Tensor) -> Tensor:
        """New float32 logits, shape (V,), for the next token; must not change ``logits``."""
        ...


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = not math.isnan(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise BadInput(f"{name} must be in {interval}, not {value}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 is greedy. Raises BadInput for values out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: tuple[LogitsProcessor, ...] = ()
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        finite = 1e6
        _number("temperature", self.temperature, 0.0, finite)
        _number("top_k", self.top_k, 0, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, finite, open_low=True)
        _number("presence_penalty", self.presence_penalty, -finite, finite)
        _number("frequency_penalty", self.frequency_penalty, -finite, finite)
        _number("top_logprobs", self.top_logprobs, 0, 1000)
        for name, value in (("top_k", self.top_k), ("top_logprobs", self.top_logprobs)):
            if value != int(value):
                raise BadInput(f"{name} must be a whole number, not {value}")
        for token, bias in self.logit_bias.items():
            if not bias < math.inf:
                raise BadInput(f"logit_bias of token {token} must be a number or -inf (never this token), not {bias}")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature == 0.0

    @property
    def path_dependent(self) -> bool:
        """Whether the distribution at a node depends on more than its logits."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.processors
        )


_COLDEST = 1e-30
"""Temperatures below are as good as this one, and would overflow float32."""


def _dead_end() -> BadInput:
    return BadInput(
        "no token can follow: a logits processor or logit_bias bans every token (or the model's logits are NaN)"
    )


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Mask all but the smallest set of tokens whose probability reaches ``top_p``; (n, V) -> (n, V).

    Of equal logits at the edge the smallest ids stay, so that a row's set never depends on the other rows.
    """
    vocab = logits.shape[-1]
    total = logits.logsumexp(-1, keepdim=True)
    size = min(512, vocab)
    while True:  # a full sort costs milliseconds a row; the head nearly always suffices
        values = logits.topk(size, dim=-1).values
        mass = (values - total).exp().cumsum(-1)
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
    """Temperature, top-k, top-p, min-p, softmax: (n, V) processed logits -> (n, V) float32 probabilities."""
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
        probs = probs.masked_fill(probs < floor, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


class Sampler:
    """SamplingParams bound to the history of one sequence.

    Raises BadInput when a logit bias names a token outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.params = params
        self.stop_ids = stop_ids
        self.vocab_size = vocab_size
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            for token in params.logit_bias:
                if not 0 <= token < vocab_size:
                    raise BadInput(f"logit_bias names token {token}; the vocabulary has {vocab_size}")
            self._bias = (
                torch.tensor(list(params.logit_bias), dtype=torch.long),
                torch.tensor(list(params.logit_bias.values()), dtype=torch.float32),
            )
        # Counts cost a vocabulary-sized tensor, so they exist only where a penalty reads them.
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(list(prompt), dtype=torch.long)] = True
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32)
        self._states: list[Any] | None = [processor.begin(prompt) for processor in params.processors]
        """None behind a stop token: no answer goes on there, and a grammar need not know how one would."""

    def fork(self) -> Sampler:
        """An independent copy."""
        twin = object.__new__(Sampler)
        twin.params, twin.vocab_size, twin._bias = self.params, self.vocab_size, self._bias
        twin.stop_ids = self.stop_ids
        twin._seen = None if self._seen is None else self._seen.clone()
        twin._counts = None if self._counts is None else self._counts.clone()
        twin._states = self._states
        return twin

    def extend(self, tokens: Iterable[int]) -> None:
        """Take committed tokens into the history."""
        for token in tokens:
            if self._seen is not None:
                self._seen[token] = True
            if self._counts is not None:
                self._counts[token] += 1
            self._states = self._advanced(self._states, token)

    def _advanced(self, states: list[Any] | None, token: int) -> list[Any] | None:
        """The processors' states after one more token."""
        if states is None or token in self.stop_ids:
            return None
        return [
            processor.advance(state, token) for processor, state in zip(self.params.processors, states, strict=True)
        ]

    def _penalise(self, row: Tensor, path: Sequence[int], states: list[Any] | None) -> Tensor:
        params = self.params
        if self._seen is not None:
            seen = self._seen
            if path:
                seen = seen.clone()
                seen[list(path)] = True
            penalised = torch.where(row < 0, row * params.repetition_penalty, row / params.repetition_penalty)
            row = torch.where(seen.to(row.device), penalised, row)
        if self._counts is not None:
            counts = self._counts
            if path:
                index = torch.tensor(list(path), dtype=torch.long)
                counts = counts.index_add(0, index, torch.ones(len(path)))
            counts = counts.to(row.device)
            row = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        if states is not None:
            for processor, state in zip(params.processors, states, strict=True):
                row = processor.process(state, row)
        return row


class TreeDistribution:
    """The processed distribution at the nodes of one tree, computed for the nodes asked for and kept.

    ``logits`` has shape (rows, V): row 0 is the root's, row i + 1 node i's.
    """

    def __init__(self, sampler: Sampler, tree: TokenTree, logits: Tensor) -> None:
        # Penalties count in place: what is asked after the round's tokens are committed reads the history as it was.
        self.sampler = sampler.fork() if sampler.params.path_dependent else sampler
        self.tree = tree
        self.logits = logits
        self._probs: dict[int, Tensor] = {}
        self._states: dict[int, list[Any] | None] = {ROOT: sampler._states}

    def _states_at(self, node: int) -> list[Any] | None:
        if node not in self._states:
            before = self._states_at(self.tree.parents[node])
            self._states[node] = self.sampler._advanced(before, self.tree.tokens[node])
        return self._states[node]

    def processed(self, nodes: Sequence[int]) -> Tensor:
        """Float32 logits after bias, penalties and the user's processors, before temperature: (len(nodes), V)."""
        sampler = self.sampler
        if not sampler.params.path_dependent and sampler._bias is None:
            if len(nodes) == 1:
                return self.logits[nodes[0] + 1 : nodes[0] + 2].float()
            return self.logits[[node + 1 for node in nodes]].float()
        rows = self.logits[[node + 1 for node in nodes]].float()
        if sampler._bias is not None:
            ids, bias = sampler._bias
            rows[:, ids] += bias.to(rows.device)
        if not sampler.params.path_dependent:
            return rows
        return torch.stack(
            [
                sampler._penalise(row, self.tree.path_tokens(node), self._states_at(node))
                for node, row in zip(nodes, rows, strict=True)
            ]
        )

    def ensure(self, nodes: Iterable[int]) -> None:
        """Compute p for all of ``nodes`` in one vectorised pass."""
        missing = [node for node in dict.fromkeys(nodes) if node not in self._probs]
        if missing:
            rows = warp(self.processed(missing), self.sampler.params)
            self._probs.update(zip(missing, rows.unbind(0), strict=True))

    def p(self, node: int) -> Tensor:
        """The target's processed distribution after ``node`` (``ROOT`` allowed): (V,) float32, sums to one.

        Raises BadInput where no token can follow.
        """
        if node not in self._probs:
            self.ensure([node])
        probs = self._probs[node]
        if math.isnan(probs.max()):
            raise _dead_end()
        return probs

    def dead_end(self, node: int) -> bool:
        """Whether no token can follow ``node``. A drafter stops there, before the draw that it cannot make."""
        if not self.sampler.params.path_dependent and self.sampler._bias is None:
            return False
        return not bool((self.processed([node])[0] > -math.inf).any())

    def argmax(self, node: int) -> int:
        """The greedy choice after ``node``; never builds p. Ties go to the smallest id."""
        plain = not self.sampler.params.path_dependent and self.sampler._bias is None
        row = self.logits[node + 1] if plain else self.processed([node])[0]
        if row.device.type == "cpu" and row.dtype == torch.float32:
            values = row.numpy()  # whose argmax is several times quicker at these sizes
            token = int(values.argmax())
            best = float(values[token])
        else:
            token = int(row.argmax())
            best = float(row[token])
        if not best > -math.inf:
            raise _dead_end()
        return token

    def logprobs(self, node: int, token: int, top: int = 0) -> tuple[float, list[tuple[int, float]]]:
        """Log-probability of ``token`` under the raw logits after ``node``, and the ``top`` most likely."""
        row = self.logits[node + 1].float().log_softmax(-1)
        best = row.topk(min(top, len(row))) if top else None
        pairs = [] if best is None else list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return float(row[token]), pairs

    def margin(self, node: int) -> float:
        """Processed top-1 logit minus top-2: how near this choice is to a tie."""
        top = self.processed([node])[0].topk(2).values
        return float(top[0] - top[1])
