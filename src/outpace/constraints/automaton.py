"""Future validity by dynamic programming: a finite automaton times a small model, such as an n-gram table.

Where the model reads the last tokens only and the grammar has finitely many states, h is a function of the two. It
solves one linear equation for each state that can be reached: one pass from the ends backwards where no state comes
twice in a word, and elsewhere iterated to the least solution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outpace.core.constraint import AnswerComplete, Constraint, GrammarState, Masks, tokens_of
from outpace.core.errors import BadInput
from outpace.core.future_validity import TokenWeights, WeightedConstraint

if TYPE_CHECKING:
    from torch import Tensor

Context = tuple[int, ...]
"""The last tokens, as many as the model reads."""
SmallModel = Callable[[Context], "Tensor"]
"""Log-probabilities (V,) of the next token after a context."""
_MOST_STATES = 200_000
_ITERATIONS, _CONVERGED = 10_000, 1e-15


@dataclass(eq=False, slots=True)
class _State:
    """``steps``: the log-probability of each token that leads to another state; ``ends``: the probability of ending."""

    steps: dict[int, tuple[float, _State]] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    whole: bool = False
    validity: float = 0.0

    def value(self) -> float:
        if self.whole:
            return 1.0
        return math.fsum([*self.ends.values(), *(math.exp(log) * to.validity for log, to in self.steps.values())])


class AutomatonValidity:
    """h of every state of ``constraint`` under ``model``, which reads the last ``order`` tokens.

    The constraint's states must be values that compare by what they allow, such as frozen dataclasses; ``prompt``: the
    tokens before the answer; ``stop_ids``: what ends an answer. Raises BadInput for more states than ``most``.
    """

    def __init__(
        self,
        constraint: Constraint,
        model: SmallModel,
        vocab_size: int,
        prompt: Context,
        order: int,
        stop_ids: frozenset[int] = frozenset(),
        most: int = _MOST_STATES,
    ) -> None:
        self.constraint, self.model, self.vocab_size, self.order, self.most = constraint, model, vocab_size, order, most
        self.masks = Masks(constraint, stop_ids, vocab_size)
        self.states: dict[tuple[GrammarState, Context], _State] = {}
        self._reached: list[_State] = []
        self.start = self._build(self.masks.begin(), self._last(prompt))
        self.rounds = self._solve()

    @property
    def validity(self) -> float:
        """The probability that the model's own answer is valid."""
        return self.start.validity

    def constrained(self) -> WeightedConstraint:
        """The constraint, its tokens weighted by their future validity: the conditional distribution."""
        return WeightedConstraint(self.constraint, AutomatonBeginning(self.start))

    def _last(self, tokens: Context) -> Context:
        return tokens[-self.order :] if self.order else ()

    def _build(self, begin: GrammarState, context: Context) -> _State:
        start, todo = _State(), list[tuple[GrammarState, Context, _State]]()
        todo.append((begin, context, start))
        self.states[begin, context] = start
        while todo:
            place, context, state = todo.pop()
            self._reached.append(state)
            for token, log, after, then in self._steps(place, context, state):
                to = self.states.get((after, then))
                if to is None:
                    if len(self.states) >= self.most:
                        raise BadInput(
                            f"the grammar has more than {self.most:,} states under this model; bound its length, or "
                            "take the one-step estimate"
                        )
                    to = self.states[after, then] = _State()
                    todo.append((after, then, to))
                state.steps[token] = log, to
        return start

    def _steps(
        self, place: GrammarState, context: Context, state: _State
    ) -> Iterator[tuple[int, float, GrammarState, Context]]:
        allowed = self.masks.allowed(place)
        state.whole = isinstance(allowed, AnswerComplete)
        if allowed is None or isinstance(allowed, BadInput):
            return
        logs = self.model(context)
        for token in tokens_of(allowed, self.vocab_size).tolist():
            if token in self.masks.stop_ids:
                state.ends[token] = math.exp(float(logs[token]))
            elif float(logs[token]) > -math.inf:
                yield token, float(logs[token]), self.masks.advance(place, token), self._last((*context, token))

    def _solve(self) -> int:
        """Iterate to the least solution, from the states reached last; how many passes that took."""
        for passes in range(1, _ITERATIONS + 1):
            change = 0.0
            for state in reversed(self._reached):
                found = state.value()
                change, state.validity = max(change, abs(found - state.validity)), found
            if change <= _CONVERGED:
                return passes
        return _ITERATIONS


class AutomatonBeginning:
    """A :class:`~outpace.core.future_validity.Beginning` at a state of an automaton."""

    __slots__ = ("_state", "_weights")

    def __init__(self, state: _State) -> None:
        self._state = state
        self._weights: TokenWeights | None = None

    @property
    def weights(self) -> TokenWeights | None:
        state = self._state
        if self._weights is None and (state.steps or state.ends):
            logs = dict.fromkeys(state.ends, 0.0)
            for token, (_, to) in state.steps.items():
                logs[token] = math.log(to.validity) if to.validity > 0.0 else -math.inf
            self._weights = TokenWeights.of(logs, -math.inf)
        return self._weights

    def child(self, token: int) -> AutomatonBeginning | None:
        found = self._state.steps.get(token)
        return None if found is None else AutomatonBeginning(found[1])
