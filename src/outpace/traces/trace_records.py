"""From requests that were decoded to lines of a trace."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Literal

from outpace.core import machine
from outpace.core.version import __version__
from outpace.engine.request import Generation, RoundCount
from outpace.methods.bindings import split_rule
from outpace.traces.trace_format import BLOCK, Rounds, TracedRequest, TraceHeader

if TYPE_CHECKING:
    from outpace.engine.method import Method
    from outpace.model import Model

_DIGEST = 6
"""Bytes of a hash: two of a million different beginnings are mistaken for one with a probability of 0.2 %."""


class PrefixHashes:
    """Tells which prompts begin alike. The key is drawn here and not kept, so that nobody can try out prompts."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, prompt: Seq[int], owner: str = "") -> tuple[str, ...]:
        """Of the beginnings of 32, 64, ... tokens. Those of different owners never agree."""
        running = hashlib.blake2b(owner.encode(), key=self._key, digest_size=_DIGEST)
        found = []
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            running.update(b"".join(token.to_bytes(4, "little") for token in prompt[end - BLOCK : end]))
            found.append(running.copy().hexdigest())
        return tuple(found)


def rounds_of(counts: Seq[RoundCount]) -> Rounds:
    """The rounds of one request, as a trace has them; without one that is still running, after a cancellation."""
    counts = [one for one in counts if one.batch]
    return Rounds(
        tuple(one.drafted for one in counts),
        tuple(one.accepted for one in counts),
        tuple(one.committed for one in counts),
        tuple(one.batch for one in counts),
        tuple(1e3 * one.seconds for one in counts),
        tuple(1e3 * one.draft_seconds for one in counts),
        tuple(one.levels for one in counts),
    )


def traced_name(method: Method, label: str | None = None) -> str:
    """The name of a method in a trace: ``label``, or its own, with a lossy rule and all settings of it behind ``@``.

    Autoregressive decoding has no draft for a rule to judge, and its name alone is what the simulator compares with.
    """
    label = label or method.name
    own = split_rule(label)[0]
    if method.rule.exact or own == "none":
        return label
    return f"{own}@{method.rule.described.replace(', ', ',')}"  # without blanks, as in labels


def of_generation(one: Generation, hashes: PrefixHashes, **about: Any) -> TracedRequest:
    """The line of a request that has ended and kept its counts (:attr:`~outpace.engine.request.Request.counts`).

    ``about``: further fields of TracedRequest, which take the place of what is read from ``one``.
    """
    metrics, owner, rounds = one.metrics, one.request.prefix_owner, rounds_of(one.round_counts)
    fields: dict[str, Any] = {
        "method": traced_name(one.request.method),
        "prompt_tokens": len(one.request.prompt),
        "output_tokens": sum(rounds.committed),
        "rounds": rounds,
        "first_token": metrics.first_token_seconds if metrics.answered else None,
        "seconds": metrics.seconds if metrics.answered else None,
        "cached_tokens": metrics.cached_tokens,
        "temperature": float(one.request.params.temperature),
        "finish": one.finish_reason or "cancelled",
        "prefix": () if owner is None else hashes.of(one.request.prompt, owner),
    }
    return TracedRequest(**fields | about)


def model_of(model: Model) -> dict[str, Any]:
    """What tells a model from another in a header; not where it lies."""
    target, info = model.target, model.info
    known: dict[str, Any] = {
        name: info[name] for name in ("architecture", "parameters", "dtype", "device") if name in info
    }
    return {
        "name": model.name,
        **known,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "context_length": target.context_length,
        "kv_bytes_per_token": target.kv_bytes_per_token,
    }


def header_of(
    model: Model, written_by: str, *, at_once: int, closed: bool, texts: bool, **settings: Any
) -> TraceHeader:
    """The header of a trace of requests to ``model``."""
    kind: Literal["open", "closed"] = "closed" if closed else "open"
    return TraceHeader(model_of(model), kind, at_once, written_by, __version__, machine.describe(), settings, texts)
