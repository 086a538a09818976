"""What an answer says of its tokens: counts, log-probabilities, and what speculation did."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from outpace.core.metrics import ratio
from outpace.engine.request import Logprob
from outpace.models.base import ChatTokenizer
from outpace.serving.jobs import Job

_LEAST = -9999.0
"""What OpenAI's API writes for a probability of 0."""


def usage(job: Job) -> dict[str, Any]:
    """Counts of one call. Prompts count once, however many choices they have. ``seed``: of the first choice; each
    further choice has the next number."""
    first = job.requests[0]
    counted = job.counted
    cached = {id(one.request.prompt): one.metrics.cached_tokens for one in job.generations}
    return {
        **counts(job.prompt_tokens, job.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "speculation": {
            "seed": None if first.params.greedy else first.params.fixed_seed,
            "method": first.method.name,
            "lossy": first.method.lossy,
            **(job.generations[0].constraint_figures if job.generations and first.params.constraint else {}),
            "rounds": counted.rounds,
            "drafted": counted.drafted,
            "accepted": counted.accepted,
            "mean_acceptance_length": ratio(counted.committed, counted.rounds),
        },
    }


def counts(prompt: int, answer: int) -> dict[str, int]:
    """The three counts of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def chat_logprobs(tokenizer: ChatTokenizer, found: Iterable[Logprob]) -> dict[str, Any]:
    """``logprobs`` of a chat's choice, or of a part of it."""
    return {
        "content": [
            _token(tokenizer, one.token, one.logprob)
            | {"top_logprobs": [_token(tokenizer, token, value) for token, value in one.top]}
            for one in found
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: ChatTokenizer, found: Iterable[Logprob], offset: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """``logprobs`` of a completion's choice, or of a part of it that begins at character ``offset``.

    ``as_ids``: tokens are named ``token_id:N``, because several tokens may have one text.
    """

    def name(token: int) -> str:
        return f"token_id:{token}" if as_ids else tokenizer.token_text(token)

    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in found:
        shown["tokens"].append(name(one.token))
        shown["token_logprobs"].append(_finite(one.logprob))
        shown["top_logprobs"].append({name(token): _finite(value) for token, value in one.top})
        shown["text_offset"].append(offset)
        offset += len(tokenizer.token_text(one.token))
    return shown


def _token(tokenizer: ChatTokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {
        "token": tokenizer.token_text(token),
        "logprob": _finite(logprob),
        "bytes": None if raw is None else list(raw),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
