"""Replay: a method decodes answers that are known already, so that the target's forwards need not run.

    answers = known_answers(target, requests, layers)
    rounds = replay(target, answers, method)            # of each round: drafted, accepted, seconds of drafting

The method is the real one, in the real engine (:mod:`outpace.engine.round`): its drafter drafts, its controller decides
how much, its rule walks the tree. Only the target is replaced, by :class:`ReplayTarget`, which answers every forward
from the answer: the next token is the known one, with probability 1, and hidden states are those that were kept.

At temperature 0 the accepted lengths are exactly those of decoding. Above it the answer was drawn from the target's
distribution, and a lossless rule accepts a *deterministic* draft token exactly where the output continues with it: so
the lengths have the distribution that they have in decoding, with the target's own draw in place of another one. That
does not hold for *sampled* draft tokens, which are accepted more often than they equal an independent draw:
:func:`replayable` says so. Chains of a draft model are judged by :mod:`outpace.engine.teacher_forcing`; all else has to
be decoded (:func:`played`, which chooses).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import Certain, OpenRows, TokenDistribution
from outpace.core.tree import ROOT, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.engine.known_answers import KnownAnswer
from outpace.engine.method import Method
from outpace.engine.round_records import RoundRecord, record_rounds
from outpace.engine.worth_drafting import forget
from outpace.targets.base import HiddenStateChunk, Scores, Sequence, Target, Trees, TreeScores
from outpace.targets.costs import Costs, Scorer
from outpace.targets.sub_graph import FULL, SubGraph

if TYPE_CHECKING:
    from torch import Tensor

Verifying = Callable[[Seq[int], Seq[int]], float]
"""What a round takes without its draft: seconds, from its rows and contexts, an entry for each request."""


def replayable(method: Method, params: SamplingParams) -> bool:
    """Whether :func:`replay` gives the accepted lengths of decoding with ``method``.

    Not where draws are sampled, where the drafter learns from the scores of rejected draft tokens, or runs parts of the
    target.
    """
    drafter = method.drafter
    if drafter.proposal.sampled and not params.greedy:
        return False
    inside = drafter.needs_target_internals and not drafter.aux_hidden_state_layers
    return not (drafter.learns_from_rejected or inside)


def replay(
    target: Target, answers: Seq[KnownAnswer], method: Method, at_once: int = 1, verifying: Verifying | None = None
) -> list[RoundRecord]:
    """The rounds in which ``method`` would decode the known answers, ``at_once`` of them together.

    Requests are numbered as ``answers`` are. ``draft_seconds`` are real: the drafter has run. ``verify_seconds`` are
    not: the target has not. What measures whether rounds with drafts pay reads ``verifying`` in place of a clock
    (None: the target's costs). Raises ValueError for a method that is not :func:`replayable`.
    """
    if any(not replayable(method, one.params) for one in answers):
        raise ValueError(f"the accepted lengths of method '{method.name}' do not follow from known answers")
    requests = [one.request(method, prefilled=False) for one in answers]
    forget(method.drafter)
    return record_rounds(ReplayTarget(target, answers, verifying), requests, at_once)


def played(
    target: Target, answers: Seq[KnownAnswer], method: Method, at_once: int = 1, verifying: Verifying | None = None
) -> list[RoundRecord]:
    """As :func:`replay`, where that gives the accepted lengths; otherwise the prompts are decoded with the method."""
    if all(replayable(method, one.params) for one in answers):
        return replay(target, answers, method, at_once, verifying)
    forget(method.drafter)
    return record_rounds(target, [one.request(method) for one in answers], at_once)


@dataclass(slots=True)
class _Place:
    """K/V of nothing: how many ``rows`` are committed, and the answer that the sequence follows."""

    rows: int = 0
    answer: KnownAnswer | None = None


class ReplayTarget(Target):
    """``target``, as far as its answers to some prompts are known. It takes whole forwards over trees alone.

    ``verifying``: see :func:`replay`.
    """

    def __init__(self, target: Target, answers: Iterable[KnownAnswer], verifying: Verifying | None = None) -> None:
        self.real = target
        self._verifying = verifying or partial(_by_costs, target.costs)
        self._last: tuple[list[int], list[int]] = [1], [0]
        """Rows and contexts of the last forward."""
        for name in ("vocab_size", "num_layers", "hidden_size", "dtype", "kv_dtype", "context_length", "context_note"):
            setattr(self, name, getattr(target, name))
        self.__dict__["device"] = target.device
        self.__dict__["costs"] = _Unmoved(target.costs)
        self._answers = {one.prompt: one for one in answers}
        self._states: dict[tuple[int, ...], dict[int, Tensor]] = {}

    @property
    def open_rows(self) -> OpenRows:
        return self.real.open_rows

    def round(self) -> AbstractContextManager[None]:
        return self.real.round()

    def lasted(self, seconds: float, drafting: float) -> float:
        return drafting + self._verifying(*self._last)

    def sequence(self, *given: Any, **named: Any) -> Sequence:
        found = super().sequence(*given, **named)
        found.replayed = True
        return found

    def open(self) -> _Place:
        return _Place()

    def length(self, kv: _Place) -> int:
        return kv.rows

    def fork(self, kv: _Place, length: int | None = None) -> _Place:
        return _Place(kv.rows if length is None else length, kv.answer)

    def _answer(self, sequence: Sequence) -> KnownAnswer:
        if sequence.kv.answer is None:
            prompt = tuple(sequence.tokens[: sequence.prompt_length])
            if prompt not in self._answers:
                raise BadInput("the answer to this prompt is not known")
            sequence.kv.answer = self._answers[prompt]
        found: KnownAnswer = sequence.kv.answer
        return found

    def _hidden(self, answer: KnownAnswer, layers: Seq[int]) -> dict[int, Tensor]:
        known = self._states.setdefault(answer.prompt, {})
        known.update(answer.hidden_states([layer for layer in layers if layer not in known]))
        return {layer: known[layer] for layer in layers}

    def prefill(
        self,
        sequences: Seq[Sequence],
        aux_hidden_state_layers: Seq[int] = (),
        on_chunk: HiddenStateChunk | None = None,
        most: int | None = None,
    ) -> None:
        for sequence in sequences:
            begin, end = sequence.kv.rows, len(sequence.tokens) - 1
            states = self._hidden(self._answer(sequence), aux_hidden_state_layers)
            if on_chunk is not None and end > begin:
                on_chunk(sequence, begin, {layer: rows[begin:end] for layer, rows in states.items()})
            sequence.kv.rows = end

    def score(
        self, batch: Trees, aux_hidden_state_layers: Seq[int] = (), graph: SubGraph = FULL, resume: Scores | None = None
    ) -> Scores:
        if graph != FULL or resume is not None or any(tree.auxiliary_tokens for _, tree in batch):
            raise BadInput("only whole forwards over draft tokens can be replayed")
        self._last = [1 + len(tree) for _, tree in batch], [len(one.tokens) - 1 for one, _ in batch]
        return Scores([self._score(one, tree, aux_hidden_state_layers) for one, tree in batch], None)

    def _score(self, sequence: Sequence, tree: TokenTree, layers: Seq[int]) -> TreeScores:
        answer = self._answer(sequence)
        coming = answer.tokens[len(sequence.tokens) - sequence.prompt_length :]
        path = tree.follow(coming)
        root, hidden = len(sequence.tokens) - 1, {}
        for layer, known in self._hidden(answer, layers).items():
            rows = known.new_zeros(1 + len(tree), known.shape[1])
            right = [0, *(1 + node for node in path)][: len(known) - root]
            rows[right] = known[root : root + len(right)]
            hidden[layer] = rows
        return _KnownScores(sequence, tree, path, coming, hidden, self.vocab_size)

    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        for one, path in zip(scores.parts, paths, strict=True):
            if path is not None:
                one.sequence.kv.rows += 1 + len(path)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.real.embed(tokens)

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.real.lm_head(hidden)


def _by_costs(costs: Costs, rows: Seq[int], contexts: Seq[int]) -> float:
    return costs.forward(rows, contexts) + costs.overhead


class _KnownScores(TreeScores):
    """A tree whose nodes on ``path`` continue with the ``coming`` tokens; what follows the others does not matter."""

    def __init__(
        self,
        sequence: Sequence,
        tree: TokenTree,
        path: Seq[int],
        coming: Seq[int],
        hidden_states: Mapping[int, Tensor],
        vocab_size: int,
    ) -> None:
        import torch

        super().__init__(sequence, tree, torch.empty(1 + len(tree), 0), hidden_states)
        self._next = dict(zip((ROOT, *path), coming, strict=False))
        self._known: TreeDistribution | None = None
        self._vocab_size = vocab_size

    @property
    def distribution(self) -> TreeDistribution:
        if self._known is None:
            self._known = _Certain(self._next, self._vocab_size)
        return self._known

    def argmax(self, node: int) -> int:
        return self._next.get(node, 0)

    def failure(self, node: int) -> None:
        return None


class _Certain(TreeDistribution):
    """The next token of every node, with probability 1."""

    def __init__(self, coming: Mapping[int, int], vocab_size: int) -> None:
        self._next, self._size = coming, vocab_size

    def ensure(self, nodes: Iterable[int]) -> None:
        pass

    def at(self, node: int) -> TokenDistribution:
        return Certain(self._next.get(node, 0), self._size)

    def argmax(self, node: int) -> int:
        return self._next.get(node, 0)

    def failure(self, node: int) -> None:
        return None


class _Unmoved(Costs):
    """The costs of a target whose rounds do not run: read, and not corrected by them."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.fixed, self.overhead = costs.fixed, costs.overhead

    def seconds(self, rows: int, context: int = 0) -> float:
        return self._costs.seconds(rows, context)

    def once(self, name: str, measure: Callable[[], float]) -> float:
        return self._costs.once(name, measure)

    def beside(self, model: Scorer, name: str) -> Costs:
        return self._costs.beside(model, name)

    def forward(self, rows: Seq[int], contexts: Seq[int]) -> float:
        return self._costs.forward(rows, contexts)

    def even(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return self._costs.even(rows, batch, context)

    def reading(self, rows: int, context: int = 0) -> float:
        return self._costs.reading(rows, context)

    def round_seconds(
        self, rows: int, context: int = 0, *, batch: int = 1, live: bool = False, sampled: bool = False
    ) -> float:
        return self._costs.round_seconds(rows, context, batch=batch, live=live, sampled=sampled)

    @property
    def version(self) -> int:
        return self._costs.version
