"""Beginnings: K/V of prompts that is not computed again, because a sequence or the prefix cache has it."""

from __future__ import annotations

from outpace.core.errors import out_of_memory
from outpace.engine.prefix_cache import PrefixCache
from outpace.engine.request import Generation
from outpace.targets.base import Sequence, Target
from outpace.targets.states import States


class Beginnings:
    """What a decoder's requests begin with. ``prefixes``: K/V of earlier prompts, if any is kept."""

    def __init__(self, target: Target, prefixes: PrefixCache | None) -> None:
        self._target = target
        self._prefixes = prefixes

    def share(self, sequence: Sequence, kept: Sequence, prefill_layers: tuple[int, ...]) -> None:
        """Begin with the K/V of the longest common beginning with a kept sequence; its last token is always scored.

        A drafter that reads hidden states is shown those of the beginning: K/V without them are of no use to it.
        """
        limit = min(self._target.length(kept.kv), len(sequence.tokens) - 1)
        if prefill_layers:
            limit = min(limit, 0 if kept.states is None else kept.states.length(prefill_layers))
        same = next((i for i in range(limit) if kept.tokens[i] != sequence.tokens[i]), limit)
        self._target.close(sequence.kv)
        sequence.kv = self._target.fork(kept.kv, same)
        if prefill_layers and kept.states is not None:
            sequence.states = kept.states.first(same, prefill_layers)

    def borrow(self, one: Generation, layers: tuple[int, ...]) -> None:
        """Begin with what is known of its K/V, with hidden states of ``layers``, where no kept sequence lends any."""
        owner, sequence = one.request.prefix_owner, one.sequence
        if self._prefixes is None or owner is None or self._target.length(sequence.kv):
            return
        states = self._prefixes.lend(owner, sequence, layers)
        if not one.resumed:
            sequence.states = states
            one.metrics.cached_tokens = self._target.length(sequence.kv)

    def keep(self, one: Generation) -> None:
        """Leave a copy of its K/V to the prefix cache, where the request has an owner in it and memory suffices."""
        owner = one.request.prefix_owner
        if self._prefixes is not None and owner is not None and one.error is None:
            try:
                self._prefixes.keep(owner, one.sequence)
            except Exception as error:
                if not out_of_memory(error):
                    raise

    def recall(self, one: Generation) -> None:
        """Show the drafter the states of the K/V that another sequence lent; keep those to come if that is asked."""
        drafter, sequence = one.drafter, one.sequence
        if sequence.states is not None:
            for position, states in sequence.states.chunks():
                drafter.on_prefill(one.draft_state, position, states)
        kept = one.request.keep or one.request.siblings is not None
        kept = kept or (self._prefixes is not None and one.request.prefix_owner is not None)
        if not kept or not drafter.prefill_layers:
            sequence.states = None
        elif sequence.states is None:
            sequence.states = States(drafter.prefill_layers)
