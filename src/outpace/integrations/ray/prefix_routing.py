"""Which replica a request should go to: the one that has seen its prompt's beginning, unless it has too much to do.

A request's key is a digest of what a replica may still hold for it: the namespace whose drafters have learned, or the
beginning of the prompt whose keys and values are cached. Replicas are ranked for each key by rendezvous hashing, so
that a replica that comes or goes moves only the keys that it gets or had.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from outpace.core.files import parse_json

BEGINNING_CHARACTERS = 256
"""Of a text that is continued: prompts that agree so far have the same key."""
BEGINNING_TOKENS = 64
"""The same for a prompt of token ids."""
_NAMESPACE_IN = ("speculation", "vllm_xargs")
"""Where a request names its namespace: to outpace's own engine, and to the plug-in in vLLM."""


def affinity_key(tenant: str, body: bytes) -> str:
    """The key of a request; "" where nothing in the body says what it shares with others.

    A conversation's key covers the messages up to the first of the user: it stays the same from turn to turn.
    """
    try:
        asked = parse_json(body)
    except ValueError:
        return ""
    if not isinstance(asked, dict):
        return ""
    for holder in _NAMESPACE_IN:
        inside = asked.get(holder)
        namespace = inside.get("namespace") if isinstance(inside, dict) else None
        if isinstance(namespace, str):
            return _digest("namespace", tenant, namespace)
    beginning = _beginning(asked)
    if not beginning:
        return ""
    shared = asked.get("shared_prefix")
    owner = ("shared", shared) if isinstance(shared, str) else ("tenant", tenant)
    return _digest(*owner, str(asked.get("model")), beginning)


def ranked(key: str, loads: Mapping[str, int], slack: int) -> list[str]:
    """Replicas, the best first. ``loads``: requests that each has now; ``slack``: how many more than the least loaded
    one the preferred replica may have. Without a key the least loaded is the best."""
    if not loads:
        return []
    by_load = sorted(loads, key=lambda one: (loads[one], _weight(key, one)))
    if not key:
        return by_load
    least = loads[by_load[0]]
    preferred = sorted(loads, key=lambda one: _weight(key, one))
    best = next(one for one in preferred if loads[one] <= least + slack)
    return [best, *(one for one in by_load if one != best)]


def _beginning(asked: Mapping[str, Any]) -> str:
    messages = asked.get("messages")
    if isinstance(messages, list):
        parts = []
        for one in messages:
            if not isinstance(one, dict):
                return ""
            parts.append(f"{one.get('role')}:{one.get('content')}")
            if one.get("role") == "user":
                break
        return "\n".join(parts)
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:BEGINNING_CHARACTERS]
    return str(prompt[:BEGINNING_TOKENS]) if isinstance(prompt, list) else ""


def _digest(*parts: str) -> str:
    whole = "\0".join(parts).encode("utf-8", "surrogatepass")
    return blake2b(whole, digest_size=16).hexdigest()


def _weight(key: str, replica: str) -> bytes:
    return blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()
