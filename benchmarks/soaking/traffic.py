"""Traffic: a random mix of what callers ask, each request with how its caller behaves and which statuses may come."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from soaking.caller import Manners

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
KEYS = {"ann": "key-of-ann", "bob": "key-of-bob", "cid": "key-of-cid", "few": "key-of-few"}
"""Tenants and their keys; ``few`` may ask little."""
TERMS: dict[str, Any] = {name: {"key": key, "priority": 2 if name == "ann" else 0} for name, key in KEYS.items()}
TERMS["few"] |= {"requests_per_minute": 30, "tokens_per_minute": 4000}
BUSY = (200, 429)
"""Of a valid request: answered, or turned away for now."""

_WORDS = ("the quick brown fox jumps over a lazy dog while small birds sing in old trees near water").split()  # noqa: SIM905
_STARTS = (
    "You are a careful assistant. Answer in one sentence and name your sources. ",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n\n\n",
    "The following is a conversation about birds, trees and water in the north. ",
)
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
_FIXED: tuple[dict[str, Any], ...] = (
    {"off": True},
    {"method": "pld", "params": {"num_draft_tokens": 4}},
    {"method": "sam", "params": {"num_draft_tokens": 3}},
)
"""Draft lengths that do not depend on measured times: sampled answers repeat."""
_METHODS: tuple[dict[str, Any], ...] = (
    *_FIXED,
    {"method": "auto"},
    {"method": "pld"},
    {"method": "sam", "namespace": "notes"},
    {"method": "cacheback", "namespace": "notes"},
    {"method": "cacheback"},
    {"method": "recycling"},
    {"method": "jacobi"},
    {"method": "lookahead"},
    {"method": "mcsjd"},
    {"method": "swift"},
    {"method": "early-exit"},
    {"method": "draft-verify"},
    {"method": "triforce"},
    {"method": "cascade"},
    {"method": "merge"},
    {"method": "metasd"},
    {"method": "pld", "params": {"num_draft_tokens": 200}},
)
_ABSURD: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"temperature": 1e300},
    {"temperature": "hot"},
    {"max_tokens": 0},
    {"max_tokens": -5},
    {"max_tokens": 10**12},
    {"max_tokens": 1.5},
    {"n": 0},
    {"n": 10**6},
    {"n": 100, "temperature": 1},
    {"top_p": 0},
    {"top_k": -7},
    {"seed": 10**30},
    {"seed": "x"},
    {"stop": ["a"] * 40},
    {"stop": [""]},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"999999999": 1}},
    {"logit_bias": {"-3": 1}},
    {"stop_token_ids": [-1]},
    {"speculation": {"method": "no-such-method"}},
    {"speculation": {"method": "pld", "params": {"num_draft_tokens": 10**9}}},
    {"speculation": {"method": "pld", "params": {"num_draft_tokens": -1}}},
    {"speculation": {"method": "pld", "params": {"no_such": 1}}},
    {"speculation": {"method": "eagle3"}},
    {"speculation": {"method": "draft-model"}},
    {"speculation": {"off": True, "method": "pld"}},
    {"speculation": 5},
    {"speculation": {"rule": "no-such-rule"}},
    {"model": "no-such-model"},
    {"model": 7},
    {"messages": [], "prompt": []},
    {"messages": "hello", "prompt": 5},
    {"messages": None, "prompt": None},
    {"messages": [{"role": "king", "content": "x"}], "prompt": [-1]},
    {"messages": [{"role": "user", "content": None}], "prompt": [10**9]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "prompt": [[]]},
    {"messages": [{"role": "user", "content": ""}], "prompt": ""},
    {"response_format": {"type": "json_object"}},
    {"no_such_field": 1},
    {"priority": 100},
    {"top_logprobs": 99},
    {"echo": True, "logprobs": 1},
    {"stream_options": {"include_usage": True}},
    {"shared_prefix": ""},
    {"user": "\ud800"},
    {"stop": "\ud800"},
    {"messages": [{"role": "user", "content": "\ud800 alone"}], "prompt": "\ud800 alone"},
    {"\ud800": 1},
    {"tools": [_TOOL, _TOOL]},
    {"tool_choice": "required"},
    {"metadata": {str(at): "x" for at in range(50)}},
    {"logprobs": -2},
)
_BROKEN: tuple[bytes, ...] = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"{'model': 'x'}",
    b'{"model": "x", "messages": [}',
    b"\xff\xfe\x00",
    b"[" * 50_000,
    b'{"a":' * 10_000,
    b'{"model": NaN}',
    b'{"temperature": NaN, "model": "MODEL", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}',
    b'{"temperature": 1e999, "model": "MODEL", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}',
    b'{"n": ' + b"9" * 6000 + b"}",
    b'{"model": "MODEL", "model": "MODEL", "prompt": "x", "max_tokens": 1} trailing',
)


@dataclass(slots=True)
class Wish:
    """One request. ``repeat``: which of the repeated bodies it is, whose answer is known; ``many``: sent at once."""

    kind: str
    path: str
    body: bytes | None
    key: str | None
    allowed: tuple[int, ...] = BUSY
    manners: Manners = field(default_factory=Manners)
    asked: dict[str, Any] | None = None
    """The body as it was written; None where it is no JSON object."""
    repeat: int | None = None
    content_type: str = "application/json"

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool((self.asked or {}).get("stream"))


def prompt(random: Random, most: int = 40) -> str:
    """Words, often after one of a few common beginnings."""
    words = " ".join(random.choice(_WORDS) for _ in range(random.randint(1, most)))
    return (random.choice(_STARTS) * random.randint(1, 2) if random.random() < 0.5 else "") + words


def base(random: Random, model: str, path: str) -> dict[str, Any]:
    """A valid body."""
    about: dict[str, Any] = {"model": model, "max_tokens": random.randint(1, 48), "temperature": 0}
    if path == CHAT:
        return about | {"messages": [{"role": "user", "content": prompt(random)}]}
    return about | {"prompt": prompt(random)}


class Traffic:
    """Draws requests. ``repeated``: bodies whose answers do not depend on what runs beside them."""

    def __init__(self, model: str, seed: int, tools: bool, context_length: int, most_bytes: int) -> None:
        self.random = Random(seed)
        self._model, self._tools = model, tools
        self._context_length, self._most_bytes = context_length, most_bytes
        self.repeated = [self._repeated(at) for at in range(24)]
        kinds: list[tuple[int, Callable[[], Wish]]] = [
            (30, self._known),
            (20, self._usual),
            (10, self._sampled),
            (12, self._leaving),
            (4, self._slow),
            (4, self._half),
            (4, self._broken),
            (6, self._absurd),
            (2, self._oversize_prompt),
            (1, self._oversize_body),
            (3, self._stranger),
            (2, self._limited),
            (2, self._about),
        ]
        self._weights, self._kinds = [weight for weight, _ in kinds], [kind for _, kind in kinds]

    def draw(self) -> Wish:
        """The next request."""
        [kind] = self.random.choices(self._kinds, self._weights)
        return kind()

    def wish(self, kind: str, path: str, body: dict[str, Any], tenant: str = "", **about: Any) -> Wish:
        """A request of a body, by a tenant (any, where none is named)."""
        key = KEYS[tenant or self.random.choice(("ann", "bob", "cid"))]
        return Wish(kind, path, json.dumps(body).encode(), key, asked=body, **about)

    # ------------------------------------------------------------------------------------------------ kinds

    def _repeated(self, at: int) -> Wish:
        """Greedy ones with any method, and seeded ones with a fixed draft length."""
        random, path = self.random, (CHAT, COMPLETE)[at % 2]
        body = base(random, self._model, path)
        if at % 3:
            body["speculation"] = random.choice([one for one in _METHODS if "namespace" not in one])
        else:
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": at, "speculation": random.choice(_FIXED)}
        if at % 4 == 1:
            body["stop"] = [random.choice("aeiou")]
        if at % 5 == 2:
            body |= {"logprobs": 2} if path == COMPLETE else {"logprobs": True, "top_logprobs": 2}
        if at % 6 == 3:
            body["n"] = 2
        if at % 8 == 7:
            body |= {"presence_penalty": 0.5, "frequency_penalty": 0.5}
        return self.wish("repeated", path, body, repeat=at)

    def _known(self) -> Wish:
        known = self.random.choice(self.repeated)
        assert known.asked is not None
        more: dict[str, Any] = {}
        if self.random.random() < 0.5:
            more = {"stream": True, "stream_options": {"include_usage": True}}
        chunked = Manners(chunked=self.random.random() < 0.1)
        return self.wish("repeated", known.path, known.asked | more, repeat=known.repeat, manners=chunked)

    def _usual(self, kind: str = "usual", **about: Any) -> Wish:
        random, path = self.random, self.random.choice((CHAT, COMPLETE))
        body = base(random, self._model, path)
        if random.random() < 0.6:
            body["speculation"] = random.choice(_METHODS)
        if random.random() < 0.4:
            body["stream"] = True
        if random.random() < 0.2:
            body["stop"] = random.sample(["e", " t", "ou", "\n", "xyz"], 2)
        if random.random() < 0.15:
            body |= {"logprobs": 3} if path == COMPLETE else {"logprobs": True, "top_logprobs": 3}
        if random.random() < 0.1:
            body["max_tokens"] = random.randint(100, 300)
        if random.random() < 0.1:
            body["shared_prefix"] = "common"
        if self._tools and path == CHAT and random.random() < 0.15:
            body |= {"tools": [_TOOL], "tool_choice": random.choice(("auto", "none"))}
        if path == COMPLETE and random.random() < 0.1:
            body["echo"] = True
            body.pop("logprobs", None)
        return self.wish(kind, path, body, **about)

    def _sampled(self) -> Wish:
        found = self._usual("sampled")
        assert found.asked is not None
        body = found.asked | {"temperature": self.random.choice((0.3, 1.0, 1.5)), "n": self.random.randint(1, 4)}
        if self.random.random() < 0.4:
            body["seed"] = self.random.choice((0, -1, 2**63 - 1, 7))
        if self.random.random() < 0.2 and found.path == COMPLETE and not body.get("stream"):
            body["best_of"] = body["n"] + 1
        return self.wish("sampled", found.path, body)

    def _leaving(self) -> Wish:
        late = self.random.random() < 0.5
        about = (
            Manners(leave_after=self.random.uniform(0, 0.15))
            if late
            else Manners(leave_at=1 + self.random.randrange(600))
        )
        found = self._usual("leaving", manners=about)
        assert found.asked is not None
        more = {"n": 2} if self.random.random() < 0.3 else {}
        return self.wish("leaving", found.path, found.asked | more | {"max_tokens": 200}, manners=about)

    def _slow(self) -> Wish:
        found = self._known()
        found.kind, found.manners = "slow", Manners(pause=self.random.uniform(0.001, 0.01))
        return found

    def _half(self) -> Wish:
        found = self._usual("half")
        found.manners = Manners(send=self.random.randrange(len(found.body or b"")))
        return found

    def _broken(self) -> Wish:
        body = self.random.choice(_BROKEN).replace(b"MODEL", self._model.encode())
        kind = "text/plain" if self.random.random() < 0.1 else "application/json"
        path = self.random.choice((CHAT, COMPLETE))
        return Wish("broken", path, body, KEYS["bob"], (400,), content_type=kind)

    def _absurd(self) -> Wish:
        path = self.random.choice((CHAT, COMPLETE))
        body = base(self.random, self._model, path)
        other = "messages" if path == COMPLETE else "prompt"
        body |= {name: value for name, value in self.random.choice(_ABSURD).items() if name != other}
        if self.random.random() < 0.3:
            body["stream"] = True
        # Some mean nothing to the other path, or are honoured.
        return self.wish("absurd", path, body, "bob", allowed=(200, 400, 404, 429))

    def _oversize_prompt(self) -> Wish:
        path = self.random.choice((CHAT, COMPLETE))
        body = base(self.random, self._model, path)
        text = "word " * self._context_length
        body |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        return self.wish("oversize prompt", path, body, allowed=(400, 429))

    def _oversize_body(self) -> Wish:
        body = base(self.random, self._model, COMPLETE) | {"prompt": "x" * (self._most_bytes + 1)}
        chunked = Manners(chunked=self.random.random() < 0.1)
        return self.wish("oversize body", COMPLETE, body, allowed=(413,), manners=chunked)

    def _stranger(self) -> Wish:
        found = self._usual("stranger")
        found.key, found.allowed = self.random.choice((None, "", "key-of-nobody", "\xfc")), (401,)
        return found

    def _limited(self) -> Wish:
        return self.wish("limited", COMPLETE, base(self.random, self._model, COMPLETE), "few")

    def _about(self) -> Wish:
        path, status = self.random.choice(
            (("/v1/models", 200), ("/metrics", 200), ("/health", 200), ("/ready", 200), ("/v1/nothing", 404),
             ("/v1/requests/none/timeline", 404), ("/v1/models/none", 404))
        )  # fmt: skip
        return Wish("about", path, None, KEYS["cid"], (status,))
