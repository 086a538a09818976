"""Answers of the target itself, decoded once, from which candidates are then judged without running it again.

An answer keeps its K/V open, with the hidden states that candidates read, so that whatever decodes from its prompt
later reads no prompt again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """What the target answered to ``prompt``.

    ``tokens``: all that were committed, a stop token included; ``probs``: how likely each was under the target's
    processed distribution (1 at temperature 0). ``sequence``: of prompt and answer, with its K/V and its hidden states
    for all tokens but the last. ``repeats``: as :class:`~outpace.engine.request.Request` has it.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    probs: tuple[float, ...]
    sequence: Sequence
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    repeats: bool = True

    def request(self, method: Method, *, prefilled: bool = True) -> Request:
        """The same request for ``method``. ``prefilled``: with the K/V of the prompt."""
        return Request(
            self.prompt,
            method,
            self.params,
            self.max_new_tokens,
            self.stop_ids,
            kept=self.sequence if prefilled else None,
            repeats=self.repeats,
        )

    def hidden_states(self, layers: Seq[int]) -> dict[int, Tensor]:
        """(tokens, hidden) by layer, of prompt and answer but for the last token."""
        states = self.sequence.states
        if not layers:
            return {}
        if states is None or not set(layers) <= set(states.layers):
            raise ValueError(f"the answer was decoded without the hidden states of layers {list(layers)}")
        return {layer: rows for layer, rows in states.whole().items() if layer in layers}


@dataclass(slots=True)
class _Seen(DraftState):
    """``probs`` of the tokens so far."""

    probs: list[float]


class _Watcher(Drafter[_Seen]):
    """Drafts nothing, and notes how likely each token was. ``layers``: whose hidden states are kept."""

    def __init__(self, layers: Seq[int]) -> None:
        self.aux_hidden_state_layers = tuple(layers)

    def begin(self, sequence: Sequence) -> _Seen:
        return _Seen(sequence, [])

    def propose(self, state: _Seen, budget: Budget) -> TokenTree:
        return TokenTree()

    def observe(self, state: _Seen, verdict: Verdict) -> None:
        greedy = state.sequence.params.greedy
        state.probs += [1.0 if greedy else verdict.target_row(0)[token] for token in verdict.committed]


def known_answers(target: Target, requests: Seq[Request], layers: Iterable[int] = ()) -> list[KnownAnswer]:
    """The target's answers to ``requests``, decoded autoregressively, all together; their methods do not count.

    ``layers``: aux hidden state layers that candidates read. Close the answers (:func:`close_answers`). Raises the
    error of a request that fails.
    """
    watcher = _Watcher(sorted(set(layers)))
    method = Method("none", watcher, RecursiveRejection(), Fixed(0))
    decoder = Decoder(target)
    running = []
    for one in requests:
        given = one.prompt, method, one.params, one.max_new_tokens, one.stop_ids
        running.append(decoder.submit(Request(*given, keep=True, repeats=one.repeats)))
    decoder.run()
    for generation in running:
        generation.raise_error()
    return [
        KnownAnswer(
            one.request.prompt,
            tuple(one.sequence.tokens[len(one.request.prompt) :]),
            tuple(one.draft_state.probs),
            one.sequence,
            one.request.params,
            one.request.max_new_tokens,
            one.request.stop_ids,
            one.request.repeats,
        )
        for one in running
    ]


def close_answers(target: Target, answers: Iterable[KnownAnswer]) -> None:
    """Release their K/V."""
    for one in answers:
        target.close(one.sequence.kv)
        one.sequence.kv = None
