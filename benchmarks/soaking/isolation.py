"""Isolation: whether one tenant can learn from another's requests, by cached prompts, response times or drafts."""

from __future__ import annotations

import json
from random import Random
from statistics import mean
from typing import Any

from soaking.caller import Answer, ask
from soaking.traffic import COMPLETE, KEYS, prompt

_PAIRS = 30
_SHUFFLES = 2000
_LEAST_P = 0.001
"""A difference of response times that chance gives more rarely than this is one."""


async def cached_prompts(port: int, model: str, seed: int, pairs: int = _PAIRS) -> dict[str, Any]:
    """Whether a prompt that one tenant has sent is answered faster, or reported as cached, for another.

    Pairs of prompts of the same length: the first tenant sends one of each, then the second sends both, in random
    order. The difference of its response times is tested by permutation.
    """
    random = Random(seed)
    shared, fresh = list[float](), list[float]()
    hits = own = 0
    for at in range(pairs):
        texts = [f"{at:03d}{side} " + prompt(random, 20)[:200].ljust(200, ".") * 2 for side in "kn"]
        await _complete(port, model, "ann", texts[0])
        order = [0, 1] if random.random() < 0.5 else [1, 0]
        for which in order:
            answer = await _complete(port, model, "bob", texts[which])
            hits += _cached(answer)
            (fresh if which else shared).append(answer.seconds)
        own += _cached(await _complete(port, model, "ann", texts[0])) > 0
    differences = [left - right for left, right in zip(shared, fresh, strict=True)]
    extreme = 0
    for _ in range(_SHUFFLES):
        flipped = mean(one if random.random() < 0.5 else -one for one in differences)
        extreme += abs(flipped) >= abs(mean(differences))
    p = (extreme + 1) / (_SHUFFLES + 1)
    problems = []
    if hits:
        problems.append(f"{hits} cached tokens of one tenant's prompts were found by another")
    if own < pairs:
        problems.append(f"a tenant's own repeated prompt was cached in {own} of {pairs} cases only")
    if p < _LEAST_P:
        problems.append(f"response times tell what another tenant has asked: p = {p:.4f}")
    return {
        "pairs": pairs,
        "cached_tokens": hits,
        "ms_known_to_another": 1e3 * mean(shared),
        "ms_new": 1e3 * mean(fresh),
        "p": p,
        "problems": problems,
    }


async def drafts(port: int, fresh_port: int, model: str, seed: int, count: int = 8) -> dict[str, Any]:
    """Whether text of one tenant is drafted for another, or what a seeded request has learned for the next.

    On the used server a tenant asks first, in a namespace, then another does the same; drafted and accepted tokens must
    be those of a fresh server, on which only the other asks. Both servers take costs for fixed: drafts of
    greedy requests have lengths that depend on measured ones otherwise.
    """
    random = Random(seed)
    problems: list[str] = []
    learned = 0
    wishes: list[dict[str, Any]] = [
        {"method": "cacheback", "namespace": "isolation"},
        {"method": "sam", "params": {"num_draft_tokens": 4}, "namespace": "isolation"},
        {"method": "cacheback"},
        {"method": "recycling", "namespace": "isolation"},
    ]
    for at in range(count):
        speculation = wishes[at % len(wishes)]
        body: dict[str, Any] = {"max_tokens": 60, "speculation": speculation, "ignore_eos": True}
        body |= {"temperature": 0.7, "seed": at} if at % 2 else {"temperature": 0}
        text = f"{at} " + prompt(random, 10)
        before = _counts(await _complete(port, model, "ann", text, **body))
        if "namespace" in speculation:
            learned += _counts(await _complete(port, model, "ann", text, **body))["accepted"] > before["accepted"]
        elif _counts(await _complete(port, model, "ann", text, **body)) != before:
            problems.append(f"a request without a namespace learned from an earlier one: {speculation}")
        used = _counts(await _complete(port, model, "bob", text, **body))
        clean = _counts(await _complete(fresh_port, model, "bob", text, **body))
        if used != clean:
            problems.append(f"{speculation}, temperature {body['temperature']}: {used}, on a fresh server {clean}")
    if not learned:
        problems.append("a namespace made no difference to its own tenant, so the test shows nothing")
    return {"requests": count, "learned_by_its_own_tenant": learned, "problems": problems}


async def _complete(port: int, model: str, tenant: str, text: str, **more: Any) -> Answer:
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0} | more
    answer = await ask(port, COMPLETE, json.dumps(body).encode(), key=KEYS[tenant])
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {answer.body[:300]!r} {answer.failure}")
    return answer


def _cached(answer: Answer) -> int:
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def _counts(answer: Answer) -> dict[str, int]:
    spoken = answer.json()["usage"]["speculation"]
    return {name: spoken[name] for name in ("rounds", "drafted", "accepted")}
