"""SamplingParams, and the Sampler that applies their penalties and processors to the history of one sequence.

Order of processing, as in transformers' ``generate``: logit bias, repetition penalty, presence and frequency
penalties, the user's processors, what the grammar does not allow and its weights (:mod:`outpace.core.future_validity`),
then (temperature > 0) temperature, top-k, top-p, min-p.

Repetition penalty (Keskar et al. 2019, arXiv 1909.05858) over prompt and output as in transformers; presence and
frequency penalties over the output alone as OpenAI and vLLM define them; top-k keeps ties of the k-th logit; top-p
(Holtzman et al. 2020, arXiv 1904.09751) keeps the smallest set whose mass reaches p; min-p (Nguyen et al. 2024, arXiv
2407.01082) keeps tokens with at least min_p times the largest probability. Logprobs are those of the raw logits, before
any processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from outpace.core.constraint import Bits, Constraint, GrammarState, Masks
from outpace.core.errors import BadInput, shown
from outpace.core.future_validity import Beginning, ConstraintWeighting, TokenWeights, WeightedConstraint, WeightedState
from outpace.core.penalties import Bias, History, LogitChanges
from outpace.core.processors import LogitsProcessor, ProcessorFailure, Processors, States
from outpace.core.token_distribution import OpenRows, dense_distributions

if TYPE_CHECKING:
    from torch import Tensor


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadInput(f"{name} must be a number, not {shown(value)}")
    number = float(value)
    inside = not math.isnan(number) and (low < number if open_low else low <= number) and number <= high
    if not inside:
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise BadInput(f"{name} must be in {interval}, not {value}")


def _whole(name: str, value: Any, low: int, high: int) -> None:
    _number(name, value, low, high)
    if value != int(value):
        raise BadInput(f"{name} must be a whole number, not {value}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Raises BadInput for values of a wrong type or out of range.

    temperature: 0 takes the most likely token (greedy); 1 samples from the model's own distribution.
    top_k: keep the k most likely tokens; 0 is off.
    top_p: keep the smallest set of tokens whose probabilities add up to this; 1 is off.
    min_p: keep tokens of at least this share of the top probability; 0 is off.
    repetition_penalty: above 1 makes tokens of the prompt and the answer less likely; 1 is off.
    presence_penalty: taken off the logit of every token that the answer holds; 0 is off.
    frequency_penalty: taken off a token's logit for each time that the answer holds it; 0 is off.
    logit_bias: token id -> what is added to its logit; -inf bans the token.
    processors: objects with ``begin``, ``advance`` and ``process`` (:class:`outpace.core.processors.LogitsProcessor`).
    constraint: a grammar over the vocabulary, such as :func:`outpace.constraints.compiled` makes; None: no grammar.
    constraint_weighting: "masked", "fvo" and others of :class:`outpace.core.future_validity.ConstraintWeighting`.
    seed: a whole number repeats a sampled answer. None: ``generate`` and ``chat`` draw a random one and report it;
        ``bench``, ``certify`` and ``train`` take 0.
    logprobs: record log-probabilities of the answer's tokens. A whole number asks for that many alternatives too.
    top_logprobs: the alternatives recorded for each token; above 0 it turns ``logprobs`` on.

    >>> SamplingParams(temperature=0.8, top_p=0.95, seed=7).greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: tuple[LogitsProcessor, ...] = ()
    constraint: Constraint | None = None
    constraint_weighting: ConstraintWeighting | str = ConstraintWeighting()  # noqa: RUF009 - a frozen value
    seed: int | None = None
    logprobs: bool | int = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        finite = 1e6
        _number("temperature", self.temperature, 0.0, finite)
        _whole("top_k", self.top_k, 0, 2**31)
        object.__setattr__(self, "top_k", int(self.top_k))  # 50.0 and NumPy's are whole too, and the kernels take int
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, finite, open_low=True)
        _number("presence_penalty", self.presence_penalty, -finite, finite)
        _number("frequency_penalty", self.frequency_penalty, -finite, finite)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise BadInput(f"seed must be a whole number, or None for a random one, not {shown(self.seed)}")
        self._read_logprobs()
        if not isinstance(self.logit_bias, Mapping):
            raise BadInput(f"logit_bias must be a dict from token ids to numbers, not {shown(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise BadInput(f"logit_bias must have token ids as keys, not {shown(token)}")
            if isinstance(bias, bool) or not isinstance(bias, Real) or not bias < math.inf:
                raise BadInput(
                    f"logit_bias of token {token} must be a number or -inf (never this token), not {shown(bias)}"
                )
        object.__setattr__(self, "constraint_weighting", ConstraintWeighting.read(self.constraint_weighting))
        if not isinstance(self.processors, tuple):
            raise BadInput(f"processors must be a tuple of logits processors, not {shown(self.processors)}")

    def _read_logprobs(self) -> None:
        """``logprobs=2`` is short for ``logprobs=True, top_logprobs=2``."""
        _whole("top_logprobs", self.top_logprobs, 0, 1000)
        if isinstance(self.logprobs, bool):
            on, top = self.logprobs or self.top_logprobs > 0, self.top_logprobs
        else:
            _whole("logprobs", self.logprobs, 0, 1000)
            on, top = True, int(self.logprobs)
            if self.top_logprobs not in (0, top):
                raise BadInput(f"logprobs={top} and top_logprobs={self.top_logprobs} contradict each other; give one")
        object.__setattr__(self, "logprobs", on)
        object.__setattr__(self, "top_logprobs", top)

    @property
    def fixed_seed(self) -> int:
        """The seed; 0 where none was given, for runs that must repeat: benchmarks, certificates, training."""
        return 0 if self.seed is None else self.seed

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature == 0.0

    @property
    def described(self) -> str:
        """What the distribution depends on, in words: temperature, and what is not at its default."""
        default = SamplingParams()
        names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        changed = [name for name in names if getattr(self, name) != getattr(default, name)]
        return ", ".join(
            [
                f"temperature {self.temperature:g}",
                *(f"{name.replace('_', '-')} {getattr(self, name):g}" for name in changed),
                *(f"logit-bias {token}={bias:g}" for token, bias in self.logit_bias.items()),
                *(["the user's processors"] if self.processors else []),
                *(["a grammar"] if self.constraint is not None else []),
                *([f"weighting {self.weighting}"] if self.weighting.weighs else []),
            ]
        )

    @property
    def weighting(self) -> ConstraintWeighting:
        """How the tokens that its grammar allows are weighted; not at all where it has none."""
        given = ConstraintWeighting.read(self.constraint_weighting)
        return ConstraintWeighting() if self.constraint is None else given

    @property
    def penalised(self) -> bool:
        """Whether tokens of the prompt or the answer are penalised."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)

    @property
    def path_dependent(self) -> bool:
        """Whether the distribution at a node depends on more than its logits."""
        return self.penalised or bool(self.processors) or self.constraint is not None


def check_logit_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raise BadInput when a logit bias names a token outside the vocabulary."""
    outside = next((token for token in params.logit_bias if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise BadInput(f"logit_bias names token {outside}; the vocabulary has {vocab_size}")


class Sampler:
    """SamplingParams bound to the history of one sequence.

    ``prompt``: token ids. ``stop_ids``: tokens that end an answer; processors' states do not advance past them.
    ``open_rows``: makes distributions of processed logits. Raises BadInput when a logit bias names a token outside the
    vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        stop_ids: frozenset[int] = frozenset(),
        open_rows: OpenRows = dense_distributions,
    ) -> None:
        self.params = params
        self.stop_ids = stop_ids
        self.vocab_size = vocab_size
        self.open_rows = open_rows
        check_logit_bias(params, vocab_size)
        self._bias = Bias(params.logit_bias.items()) if params.logit_bias else None
        self.changes_logits: bool = params.path_dependent or self._bias is not None
        """Whether processed logits are others than the raw ones."""
        self.takes_largest: bool = params.greedy and not self.changes_logits
        """Whether the next token is that of the largest raw logit."""
        self._history = History()
        """What penalties read: nothing where there are none."""
        if params.repetition_penalty != 1.0:
            self._history = self._history.with_(prompt, 0)
        self.processors = Processors(tuple(params.processors))
        self.states: States = self.processors.begin(prompt)
        """The processors' states after the history; a failure ends the request when the next token is chosen."""
        self.grammar = None if params.constraint is None else Masks(params.constraint, stop_ids, vocab_size)
        self.place: GrammarState = None if self.grammar is None else self.grammar.begin()
        """The grammar's state after the answer so far; a failure ends the request like one of a processor."""
        self.validity: Beginning | None = None
        """Of the empty answer, where tokens are weighted by it."""

    def weigh(self, root: Beginning) -> None:
        """Weight the tokens of the answer, which must not have begun, by their future validity."""
        assert self.params.constraint is not None
        self.validity = root
        self.grammar = Masks(WeightedConstraint(self.params.constraint, root), self.stop_ids, self.vocab_size)
        self.place = self.grammar.begin()

    def without_grammar(self) -> Sampler:
        """A copy that samples from the model itself."""
        free = self.fork()
        free.grammar, free.place = None, None
        free.changes_logits = free.params.penalised or bool(free.params.processors) or free._bias is not None
        return free

    @staticmethod
    def weights(place: GrammarState) -> TokenWeights | None:
        """Weights of the tokens that may follow; None: all the same."""
        return place.weights if isinstance(place, WeightedState) else None

    def fork(self) -> Sampler:
        """An independent copy."""
        return copy(self)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add committed tokens to the history."""
        if not self.params.path_dependent:
            return
        tokens = list(tokens)
        if self.params.penalised:
            self._history = self._history.with_(tokens)
        if self.params.processors or self.grammar is not None:
            for token in tokens:
                self.states = self.advanced(self.states, token)
                self.place = self.moved(self.place, token)

    def advanced(self, states: States, token: int) -> States:
        """The processors' states after one more token; None behind a stop token."""
        return None if token in self.stop_ids else self.processors.advance(states, token)

    def moved(self, place: GrammarState, token: int) -> GrammarState:
        """The grammar's state after one more token; None behind a stop token."""
        return None if self.grammar is None or token in self.stop_ids else self.grammar.advance(place, token)

    def allowed(self, place: GrammarState) -> Bits | BadInput | None:
        """The tokens that the grammar lets follow; None: all; or why there is none."""
        return None if self.grammar is None else self.grammar.allowed(place)

    def forced(self, place: GrammarState) -> Sequence[int]:
        """Tokens that spell what every answer goes on with under the grammar; empty where that is not known."""
        return () if self.grammar is None else self.grammar.forced(place)

    def changes(self, path: Sequence[int], allowed: Bits | None = None) -> LogitChanges | None:
        """What bias, penalties and the tokens ``allowed`` (None: all) change of the logits after the history and the
        draft tokens ``path``; None: nothing.

        The user's processors come between penalties and grammar: :meth:`process`."""
        params = self.params
        if not params.penalised and self._bias is None and allowed is None:
            return None
        counted = self._history.after(path if params.penalised else ())
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        return LogitChanges(self._bias, self._history, counted, *penalties, allowed)

    def process(self, row: Tensor, states: States) -> Tensor | ProcessorFailure:
        """The user's processors on float32 logits (V,) that bias and penalties have changed; ``states``: the
        processors' states there. Or what a processor did wrong."""
        return self.processors.process(states, row)
