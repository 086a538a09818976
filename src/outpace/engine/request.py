"""Request, Generation, and what a round leaves of them: what goes in, what comes out, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outpace.acceptance.base import AcceptanceRule
from outpace.controllers.payoff import Payoff
from outpace.core import machine
from outpace.core.constraint import Constraint, ShowsText
from outpace.core.errors import BadInput, OutpaceError
from outpace.core.future_validity import MASKED, Weighed
from outpace.core.metrics import RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.core.text import TextStream
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.copying import INDEX_BYTES_PER_TOKEN
from outpace.engine.method import Method
from outpace.engine.populations.base import Hypothesis, Population
from outpace.engine.populations.beam_options import BeamOptions
from outpace.engine.populations.group import Group
from outpace.targets.base import Sequence

TARGET = "target"
"""The source of a token that nobody drafted: the target itself chose it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to make. ``stop_ids`` end the answer and are not part of it; stop strings are cut from the text.

    ``keep`` leaves the K/V open when the answer ends, unless in an error; ``kept`` continues the K/V of such a
    generation where the prompts agree (a chat's earlier turns).

    For the scheduler: ``tenant``, who shares the machine fairly with other tenants; ``priority``, higher first;
    ``time_limit`` in seconds from its arrival. ``prefix_owner``: whose cached beginnings of prompts it may use and
    add to; None: none.

    ``reference_texts``: what ``references`` are the tokens of, as it was given: a tokenizer may change a text.

    ``repeats``: a sampled answer has to be the same again for its seed, so nothing of it may depend on a clock.

    ``trace`` keeps every round, with its trees; ``sources`` only notes who drafted each token, ``counts`` only what
    each round drafted, committed and took.

    ``beams``: the answer is the best of beam search. ``siblings``: requests that have the same one have the same
    prompt, and those that run at the same time compute its K/V once and copy it.
    """

    prompt: tuple[int, ...]
    method: Method
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    references: tuple[tuple[int, ...], ...] = ()
    reference_texts: tuple[str, ...] = ()
    namespace: str = ""
    keep: bool = False
    kept: Sequence | None = None
    trace: bool = False
    sources: bool = False
    tenant: str = ""
    priority: int = 0
    time_limit: float | None = None
    prefix_owner: str | None = None
    repeats: bool = True
    counts: bool = False
    beams: BeamOptions | None = None
    siblings: object | None = None

    @property
    def population(self) -> Population | None:
        """How its group of sequences is decoded; None: it has one sequence, as most have."""
        if self.method.population is not None:
            return self.method.population(self)
        if self.beams is None:
            return None
        from outpace.engine.populations.beams import beam_search

        return beam_search(self.beams)

    def prepared(self) -> Request:
        """What is decoded: its method may add to it. Raises BadInput where the method does not take it."""
        return self if self.method.prepare is None else self.method.prepare(self)


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of one request, for those who want to watch: the tree, and the tokens that came of it."""

    tree: TokenTree
    path: tuple[int, ...]
    committed: tuple[int, ...]


@dataclass(slots=True)
class RoundCount:
    """One round of one request, without its tokens. ``batch``: requests in it. ``seconds`` of the whole round, and
    ``draft_seconds`` of the drafter that drafted for this request, for all its requests in the round. ``levels`` of the
    draft's tree: a chain has as many as tokens."""

    drafted: int
    accepted: int
    committed: int
    batch: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    levels: int = 0


class TokenSource(NamedTuple):
    """Where an output token came from: ``name`` of the method that drafted it, or :data:`TARGET`.

    Of several parts that drafted the same token, the first is named. ``round``: from 1.
    """

    name: str
    round: int


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of an output token under the target's raw logits, and the most likely tokens there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def check_references(references: Seq[Seq[int]], memory: int | None = None) -> None:
    """Raise BadInput for references of which an index would not fit into ``memory`` bytes (what is free now)."""
    tokens = sum(map(len, references))
    if not tokens:
        return
    if memory is None:
        memory = machine.free_memory()
    if tokens * INDEX_BYTES_PER_TOKEN > memory:
        raise BadInput(
            f"the references have {tokens:,} tokens, and memory holds an index of {memory // INDEX_BYTES_PER_TOKEN:,}; "
            "give fewer, or build a datastore of them (outpace datastore build)"
        )


@dataclass(eq=False, slots=True)
class Generation:
    """A request under way or finished.

    ``finish_reason``: None while running, else "stop", "length", "cancelled" or "error" (then ``error`` is set).
    """

    request: Request
    sequence: Sequence
    rule: AcceptanceRule
    rule_state: Any
    stream: TextStream | None
    started: float
    draft_state: Any = None
    """What the drafter keeps of the request: made when it joins, handed back in every round."""
    drafting: bool = False
    """Whether its drafter keeps something of it."""
    left: bool = False
    """Whether its K/V was released, or is kept for another request."""
    prompt_read: bool = False
    """Whether its whole prompt has been read once, by the target and by the drafter."""
    resumed: bool = False
    """Whether K/V is computed anew of what its drafter knows."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    rounds: list[RoundTrace] = field(default_factory=list)
    round_counts: list[RoundCount] = field(default_factory=list)
    """One for each round, if the request asks for them."""
    sources: list[TokenSource] = field(default_factory=list)
    """One for each of ``tokens``, if the request asks for them."""
    weighed: Weighed | None = None
    """What the weights of the tokens that its grammar allows are; None where they are not weighted."""
    finish_reason: str | None = None
    error: OutpaceError | None = None
    payoffs: dict[int, Payoff | None] | None = None
    """What rounds have shown of drafts since its batch began, by the number of requests; None where no answer of the
    batch must repeat. See :mod:`outpace.engine.worth_drafting`."""
    group: Group | None = None
    """Its sequences, where it has several; ``sequence`` is then the prompt alone until the answer is known."""
    _pieces: list[str] = field(default_factory=list)
    drafter: Drafter[Any] = field(init=False)
    """The drafter of its method."""

    def __post_init__(self) -> None:
        self.drafter = self.request.method.drafter

    @property
    def keeps(self) -> bool:
        """Whether its K/V stays open when it leaves."""
        return self.request.keep and self.error is None and self.sequence.kv is not None

    @property
    def constraint_figures(self) -> dict[str, Any]:
        """Which distribution over the tokens that its grammar allows it was sampled from: ``constraint_weighting`` and
        ``future_validity``, both None without a grammar. ``grammar_complete``: :attr:`grammar_complete`."""
        kind = None if self.request.params.constraint is None else MASKED if self.weighed is None else self.weighed.kind
        return {
            "constraint_weighting": kind,
            "future_validity": None if self.weighed is None else self.weighed.public(),
            "grammar_complete": self.grammar_complete,
        }

    @property
    def grammar_complete(self) -> bool | None:
        """Whether the answer is a whole one under its grammar, and no mere beginning; None without a grammar, and for
        the programs of a method, of which the user knows nothing."""
        sampler = self.sequence.sampler
        if self._grammar is None or sampler.grammar is None:
            return None
        return self.finish_reason == "stop" or sampler.grammar.complete(sampler.place)

    @property
    def _grammar(self) -> Constraint | None:
        """What the user's answers are held to: its constraint, unless that is of its method's own making."""
        constraint = self.request.params.constraint
        return None if isinstance(constraint, ShowsText) else constraint

    @property
    def text(self) -> str:
        """The text released so far."""
        return self.stream.text if self.stream else ""

    def take_text(self) -> str:
        """The text released since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def cancel(self) -> None:
        """Leave at the next round. Text that was held back is released."""
        self.finish("cancelled")

    def fail(self, error: OutpaceError) -> None:
        """End with an error, unless it has ended already; the requests beside this one go on."""
        if self.finish_reason is None:
            self.error = error
            self.finish("error")

    def raise_error(self) -> None:
        """Raise the error that ended it, if one did: what it has put out is not its answer."""
        if self.error is not None:
            raise self.error

    def finish(self, reason: str) -> None:
        """End, unless it has ended already."""
        if self.finish_reason is None:
            self.finish_reason = reason
            if self.stream is not None:
                self._pieces.append(self.stream.finish())
                if self.stream.failure is not None and self.error is None:
                    self.finish_reason, self.error = "error", self.stream.failure

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """What all sequences of its group became, the answer first; none without a group, and before the end."""
        return () if self.group is None else self.group.hypotheses

    def release(self, token: int) -> None:
        """Release the text of a token that has been put out."""
        if self.stream is not None:
            self._pieces.append(self.stream.push(token))

    def take(self, tokens: list[int], context_length: int) -> list[int]:
        """Put out tokens up to a stop token, a stop string or the length limit; returns those that stay."""
        for count, token in enumerate(tokens, 1):
            if token in self.request.stop_ids:
                self.finish("stop")
                return tokens[:count]
            self.tokens.append(token)
            if self.stream is not None:
                self._pieces.append(self.stream.push(token))
                if self.stream.failure is not None:
                    self.fail(self.stream.failure)
                    return tokens[:count]
                if self.stream.stopped is not None:
                    self._check_grammar()
                    self.finish("stop")
                    return tokens[:count]
            full = len(self.sequence.tokens) + count >= context_length
            if full or len(self.tokens) >= self.request.max_new_tokens:
                self.finish("length")
                return tokens[:count]
        return tokens

    def _check_grammar(self) -> None:
        """Fail where a stop string has cut an answer short of what its grammar demands."""
        constraint, stream = self._grammar, self.stream
        if constraint is None or stream is None:
            return
        try:
            whole = constraint.accepts(stream.text)
        except BadInput as limit:  # the grammar's engine has reached one; the requests beside this one go on
            self.fail(limit)
            return
        if not whole:
            self.fail(
                BadInput(
                    f"the stop string {stream.stopped!r} cut the answer before it was complete under its grammar; "
                    "leave the stop string out, or change the grammar"
                )
            )

    def credit(self, drafted: Seq[int], count: int) -> None:
        """Note where the last ``count`` tokens came from, after :meth:`take` in a round that accepted ``drafted``."""
        own, number = self.request.method.name, self.metrics.rounds + 1
        names = [part or own for part in self.drafter.drafted_by(self.draft_state, drafted)] if drafted else []
        self.sources += [TokenSource(name, number) for name in (*names, TARGET)[:count]]
