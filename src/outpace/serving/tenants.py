"""Tenants: who may ask, how much each may ask for, and what belongs to whom.

A file of keys is JSON, ``{"NAME": "KEY"}`` or ``{"NAME": {"key": "KEY", "requests_per_minute": 60,
"tokens_per_minute": 20000, "priority": 0}}``, or text with a line ``NAME KEY`` for each tenant (``#`` begins a
comment). In place of a key may stand ``sha256:`` and its SHA-256 digest in hexadecimal digits.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from pydantic import Field

from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.core.validation import StrictModel, validated
from outpace.serving.errors import ApiError

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_SHORTEST_KEY = 8
_LONGEST_FILE = 4 * 1024 * 1024


class Terms(StrictModel):
    """What the file says of one tenant. Limits that are None do not apply."""

    key: str
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    priority: int = Field(default=0, ge=-100, le=100)


class Allowance:
    """An amount a minute, as a bucket that holds one minute's amount and is refilled steadily."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._rate, self._most, self._clock = per_minute / 60, per_minute, clock
        self._left, self._seen = per_minute, clock()

    def wait(self, amount: float) -> float:
        """Seconds until ``amount`` is there; 0 now. What exceeds a whole minute's amount waits for a full bucket."""
        now = self._clock()
        self._left, self._seen = min(self._most, self._left + (now - self._seen) * self._rate), now
        return max(0.0, (min(amount, self._most) - self._left) / self._rate)

    def take(self, amount: float) -> None:
        """Use it. What is left may be negative: an answer's length is known at its end."""
        self._left -= amount


class Tenant:
    """One who asks. ``priority``: the highest that its requests may have, and have by themselves."""

    def __init__(self, name: str, terms: Terms | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.name = name
        self.priority = terms.priority if terms else 0
        self._requests = Allowance(terms.requests_per_minute, clock) if terms and terms.requests_per_minute else None
        self._tokens = Allowance(terms.tokens_per_minute, clock) if terms and terms.tokens_per_minute else None
        self._changing = Lock()
        self.grammars = asyncio.Lock()
        """Held while a grammar of the tenant's is compiled: others wait, so that those of other tenants need not."""

    def admit(self, prompt_tokens: int) -> None:
        """Count a request. Raises ApiError 429, and counts nothing, where the tenant's limits do not allow it now."""
        with self._changing:
            self._check(max(1, prompt_tokens))
            if self._requests is not None:
                self._requests.take(1)
            if self._tokens is not None:
                self._tokens.take(max(1, prompt_tokens))

    def check(self) -> None:
        """Raise ApiError 429 where the tenant's limits allow no request now, however short."""
        with self._changing:
            self._check(1)

    def _check(self, tokens: int) -> None:
        for allowance, amount, what in ((self._requests, 1, "requests"), (self._tokens, tokens, "tokens")):
            wait = 0.0 if allowance is None else allowance.wait(amount)
            if wait > 0:
                raise ApiError(
                    f"the limit of {what} per minute is reached; try again in {max(1, math.ceil(wait))} s",
                    429,
                    code="rate_limit_exceeded",
                    retry_after=wait,
                )

    def give_back(self, prompt_tokens: int) -> None:
        """A request that was counted could not be taken: it counts no longer."""
        with self._changing:
            if self._requests is not None:
                self._requests.take(-1)
            if self._tokens is not None:
                self._tokens.take(-max(1, prompt_tokens))

    def charge(self, tokens: int) -> None:
        """Count an answer's tokens."""
        with self._changing:
            if self._tokens is not None:
                self._tokens.take(tokens)

    def namespace(self, name: str | None) -> str:
        """The engine's name for one of the tenant's namespaces; "" for a request that names none."""
        return "" if name is None else f"{self.name}/{name}"

    def prefix_owner(self, shared: str | None) -> str:
        """Whose cached beginnings of prompts its requests use: its own, or those of all who give the same name."""
        return f"tenant/{self.name}" if shared is None else f"shared/{shared}"


class Tenants:
    """All tenants. Without keys there is one, and everybody is it."""

    def __init__(self, terms: Mapping[str, Terms] | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._open = Tenant("", None, clock) if terms is None else None
        self._known = [(_digest(one.key), Tenant(name, one, clock)) for name, one in (terms or {}).items()]

    def find(self, authorization: str | None) -> Tenant:
        """The tenant of an Authorization header. Raises ApiError 401 for a missing or unknown key.

        Every key is compared, each in constant time, so that the time tells nothing of how near a guess is.
        """
        if self._open is not None:
            return self._open
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                "no API key was sent; send the header 'Authorization: Bearer KEY'", 401, code="missing_api_key"
            )
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [tenant for digest, tenant in self._known if hmac.compare_digest(digest, given)]
        if not found:
            raise ApiError("the API key is not known to this server", 401, code="invalid_api_key")
        return found[0]


def read_keys(path: Path) -> dict[str, Terms]:
    """The tenants of a file of keys, by name. Raises BadInput, which never repeats a key, for a file that is none."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LONGEST_FILE + 1)
    except UnicodeDecodeError:
        raise BadInput(f"--api-keys {path}: the file is not UTF-8 text") from None
    except OSError as error:
        raise BadInput(f"--api-keys {path}: {error.strerror}") from None
    if len(text) > _LONGEST_FILE:
        raise BadInput(f"--api-keys {path}: the file is longer than {_LONGEST_FILE:,} characters; is it another one?")
    entries = _json_entries(path, text) if text.lstrip().startswith("{") else _line_entries(path, text)
    if not entries:
        raise BadInput(f"--api-keys {path}: the file has no keys; write a line 'NAME KEY' for each tenant")
    found: dict[str, Terms] = {}
    for name, entry in entries:
        if not _NAME.fullmatch(name):
            raise BadInput(f"--api-keys {path}: a name has 1 to 64 letters, digits and . _ @ -; entry {len(found) + 1}")
        if name in found:
            raise BadInput(f"--api-keys {path}: the name '{name}' occurs twice")
        found[name] = _terms(path, name, entry)
    digests = [_digest(one.key) for one in found.values()]
    if len(set(digests)) < len(digests):
        raise BadInput(f"--api-keys {path}: two names have the same key")
    return found


def _json_entries(path: Path, text: str) -> list[tuple[str, Any]]:
    try:
        read = parse_json(text)
    except ValueError as error:
        raise BadInput(f"--api-keys {path}: not valid JSON: {error}") from None
    return list(read.items())


def _line_entries(path: Path, text: str) -> list[tuple[str, Any]]:
    entries: list[tuple[str, Any]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise BadInput(f"--api-keys {path}, line {number}: write 'NAME KEY', two words")
        entries.append((words[0], words[1]))
    return entries


def _terms(path: Path, name: str, entry: Any) -> Terms:
    given = {"key": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict):
        raise BadInput(f"--api-keys {path}: '{name}' must be a key, or an object with 'key'")
    terms = validated(Terms, given, lambda key, reason: BadInput(f"--api-keys {path}: '{name}', {key}: {reason}"))
    if terms.key.startswith("sha256:") and not _DIGEST.fullmatch(terms.key):
        raise BadInput(f"--api-keys {path}: '{name}': after sha256: there must be 64 hexadecimal digits")
    if len(terms.key) < _SHORTEST_KEY or not terms.key.isascii() or len(terms.key.split()) != 1:
        raise BadInput(f"--api-keys {path}: '{name}': a key has at least {_SHORTEST_KEY} ASCII characters, no spaces")
    return terms


def _digest(key: str) -> bytes:
    digest = _DIGEST.fullmatch(key)
    return bytes.fromhex(digest[1]) if digest else hashlib.sha256(key.encode()).digest()
