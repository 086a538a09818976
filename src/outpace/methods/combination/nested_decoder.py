"""Nested: a whole decoder over a smaller model is the drafter.

Exactness. Inner rounds are lossless, so the tokens that they commit follow the inner model's distribution, one after
the other, and q of each is the inner model's processed distribution at its position. ``handover: fixed`` hands up a
number of tokens that is known before any is drawn. What the last inner round committed beyond it is the surplus: no
rule has seen it, so it is kept while the committed tokens continue with it, and dropped with the first that differs.

``handover: variable`` hands up what whole inner rounds gave, C tokens. C depends on what they are, but no token depends
on whether there is one: a rule is lossless for answers of every length, and for lengths i and i + 1 that says, with
S_i(x) = P(C >= i and the first i tokens are x)::

    sum_c<i  P(C = c, x_1..c) p(x_c+1..i)   + S_i(x_1..i)     = p(x_1..i)
    sum_c<=i P(C = c, x_1..c) p(x_c+1..i+1) + S_i+1(x_1..i+1) = p(x_1..i+1)

The second less p(x_i+1) times the first is S_i+1(x_1..i+1) = P(C > i, x_1..i) p(x_i+1): given the tokens before it and
that there is one more, the next is a draw from the inner model, under every lossless rule. So whether there is a draw
is settled before it is made. To hold back a round's tokens for having been few would be a bias.

Where a user's processor allows no token at all after some draft tokens, the inner round that met it counts as none.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.metrics import CacheUse
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.shared_noise import SHARED_NOISE
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.combination import Combined, CombinedState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.targets.base import Scores, Sequence, Target

Handover = Literal["fixed", "variable"]


@dataclass(slots=True)
class _RecordedState(CombinedState):
    """``rows``: the q rows of the inner tokens that are not committed above yet; None for greedy ones."""

    rows: list[QRow | None] = field(default_factory=list)


class _Recorded(Combined[_RecordedState]):
    """The inner drafter, and beside it the distributions that the inner tokens were drawn from."""

    def __init__(self, drafter: Drafter[Any], name: str) -> None:
        super().__init__([drafter], [name], drafter.proposal)

    def opened(self, sequence: Sequence, parts: list[Any]) -> _RecordedState:
        return _RecordedState(sequence, parts)

    def propose_batch(self, states: Seq[_RecordedState], budgets: Seq[Budget]) -> list[TokenTree]:
        return self.parts[0].propose_batch([state.parts[0] for state in states], budgets)

    def reusable_forward(self, states: Seq[_RecordedState]) -> Scores | None:
        return self.parts[0].reusable_forward([state.parts[0] for state in states])

    def observe_batch(self, states: Seq[_RecordedState], verdicts: Seq[Verdict]) -> None:
        for state, verdict in zip(states, verdicts, strict=True):
            for node in (ROOT, *verdict.path)[: len(verdict.committed)]:
                greedy = state.sequence.params.greedy
                state.rows.append(None if greedy else QRow(verdict.scores.distribution.at(node)))
        super().observe_batch(states, verdicts)


class _InnerChance:
    """Streams of the inner rounds: each belongs to one outer round, for the same inner position comes again.

    Noise that the outer rule shares belongs to the position alone: inner tokens are drawn with the very numbers.
    """

    def __init__(self, sequence: Sequence, owner: Drafter[Any]) -> None:
        self._sequence, self._owner = sequence, owner

    def at(self, position: int, purpose: str) -> Chance:
        outer = self._sequence
        if outer.noise is not None and purpose == SHARED_NOISE:
            return outer.chance.at(position, purpose)
        return outer.chance.at(len(outer.tokens), f"{self._owner.purpose}/{position}/{purpose}")


@dataclass(slots=True)
class InnerRun:
    """The inner decoder's side of one request. Its tokens from ``base`` on are not committed above; those before
    ``seen`` have been handed up."""

    inner: Generation
    base: int
    seen: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer of the inner request."""
        return self.inner.sequence.tokens

    @property
    def rows(self) -> list[QRow | None]:
        """The q rows of its tokens from ``base`` on; empty before it has joined."""
        return [] if self.inner.draft_state is None else self.inner.draft_state.rows


@dataclass(slots=True)
class NestedState(DraftState):
    """``run``: the inner request, once there is something to draft."""

    run: InnerRun | None = None


class Nested(Drafter[NestedState]):
    """Drafts chains with ``method`` decoding over ``model``. Raises BadInput for a method that cannot be exact.

    ``least``: how many tokens inner rounds are to give, where the handover is variable; all of them go up, as far as
    the budget's depth allows. With a fixed one as many as the budget says go up.
    """

    def __init__(self, model: Target, method: Method, handover: Handover = "fixed", least: int = 1) -> None:
        if not method.lossless:
            raise BadInput(
                f"the inner rule '{method.rule.name}' changes the inner model's distribution, so its tokens have no "
                "true q; choose a lossless one"
            )
        if method.rule.greedy_only:
            raise BadInput(f"the inner rule '{method.rule.name}' is for temperature 0; choose one that samples")
        if method.drafter.needs_target_internals and not model.whole:
            raise BadInput(
                f"'{method.name}' reads inside the model that it drafts for, and a draft model of another vocabulary "
                "shows only its logits; choose another inner method"
            )
        self.model = model
        self.proposal = Proposal(sampled=True, shares_noise=method.rule.shares_noise)
        self.handover, self.least = handover, least
        self.decoder = Decoder(model)
        self.method = replace(method, drafter=_Recorded(method.drafter, method.name))

    @property
    def remembers(self) -> bool:
        return self.method.drafter.remembers

    def begin(self, sequence: Sequence) -> NestedState:
        return NestedState(sequence)

    def propose_batch(self, states: Seq[NestedState], budgets: Seq[Budget]) -> list[TokenTree]:
        runs = [self._run(state, budget) for state, budget in zip(states, budgets, strict=True)]
        self.decoder.admit()
        self._follow([(run, state.sequence) for run, state in zip(runs, states, strict=True) if run is not None])
        wanted = [min(self.least, budget.depth) if self.handover == "variable" else budget.depth for budget in budgets]
        while True:
            short = [
                run.inner
                for run, count in zip(runs, wanted, strict=True)
                if run is not None and len(run.rows) < count and run.inner.finish_reason is None
            ]
            if not short:
                break
            self.decoder.round(short)
        return [
            TokenTree() if run is None else self._handed(run, budget) for run, budget in zip(runs, budgets, strict=True)
        ]

    def _run(self, state: NestedState, budget: Budget) -> InnerRun | None:
        """The inner run of a request, a new one if it has none; None where there is nothing to draft."""
        sequence = state.sequence
        if state.run is not None and state.run.inner.finish_reason is not None:
            self.end(state)  # the context was full, or a grammar a dead end
        room = self.model.context_length - len(sequence.tokens)
        # A processor or a grammar may allow nothing after some tokens: the inner round that meets them fails for what
        # they are.
        params = sequence.params
        held = bool(params.processors) or params.constraint is not None
        if budget.depth <= 0 or budget.max_nodes <= 0 or room <= budget.depth or held:
            return None
        if state.run is None:
            state.run = InnerRun(self._submit(sequence), len(sequence.tokens))
        return state.run

    def _submit(self, sequence: Sequence) -> Generation:
        params: SamplingParams = replace(sequence.params, logprobs=False, top_logprobs=0)
        inner = self.decoder.submit(
            Request(
                tuple(sequence.tokens[: sequence.prompt_length]),
                self.method,
                params,
                max_new_tokens=self.model.context_length,
                references=sequence.references,
                namespace=sequence.namespace,
            )
        )
        inner.sequence.chance = _InnerChance(sequence, self)
        return inner

    def _follow(self, pairs: Seq[tuple[InnerRun, Sequence]]) -> None:
        """Bring the inner sequences to what was committed above, with the surplus where it still holds."""
        moved = []
        for run, sequence in pairs:
            tokens = sequence.tokens
            if len(tokens) >= run.seen + 1 and run.tokens[: len(tokens)] == tokens:
                del run.rows[: len(tokens) - run.base]
            else:  # what a rule has seen is never drafted again
                run.rows.clear()
                moved.append((run.inner, tokens))
            run.base = len(tokens)
        self.decoder.rewind(moved)

    def _handed(self, run: InnerRun, budget: Budget) -> TokenTree:
        count = min(len(run.rows), budget.depth, budget.max_nodes)
        run.seen = run.base + count
        return TokenTree.chain(run.tokens[run.base : run.seen], run.rows[:count])

    def rewind(self, state: NestedState, sequence: Sequence, kept: int) -> NestedState:
        """The next proposal follows the tokens, whatever has become of them."""
        return state

    def caches(self, state: NestedState) -> tuple[CacheUse, ...]:
        run = state.run
        if run is None or run.inner not in self.decoder.active:
            return ()
        return run.inner.drafter.caches(run.inner.draft_state)

    def end(self, state: NestedState) -> None:
        if state.run is not None:
            state.run.inner.cancel()
            state.run = None
            self.decoder.admit()
