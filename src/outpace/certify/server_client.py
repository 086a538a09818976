"""A client of servers with OpenAI's API: short answers, with token ids and log-probabilities where a server has them.

It asks ``/v1/completions``, which takes a prompt as it is. What a server does wrong is raised as BadInput, in one line:
nothing answers, the answer is late or cut, the key or the model is refused.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from outpace.core.errors import BadInput, shortened
from outpace.core.loopback import urlopen

Token = int | str
"""A token's id, or its text where the server returns no ids."""
Prompt = str | Sequence[int]
Json = dict[str, Any]

_BUSY = (429, 503)
_PATIENCE = 3  # times that a busy server is asked again
_READ = 1 << 16
_AS_ID = "token_id:"


class Refused(BadInput):
    """The server answered with an error. ``status``: its code; ``message``: the server's own."""

    def __init__(self, where: str, status: int, message: str) -> None:
        super().__init__(f"{where} answered with status {status}: {message}")
        self.status, self.message = status, message


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. ``tokens``: ids, or texts; () where the server returns neither.

    ``top``: for every token the most likely ones there with their log-probabilities, and the token itself;
    ``prompt``: the prompt's ids, where the server returns them.
    """

    text: str
    finish_reason: str | None
    tokens: tuple[Token, ...] = ()
    top: tuple[Mapping[Token, float], ...] | None = None
    prompt: tuple[int, ...] | None = None

    @property
    def ended(self) -> bool:
        """Whether the model ended the answer before its length did."""
        return self.finish_reason == "stop"


@dataclass(slots=True)
class Server:
    """One model of one server. ``name``: what messages call it; ``extra``: fields that every request has.

    ``time_limit``: seconds that one request may take.
    """

    url: str
    model: str
    key: str | None = None
    time_limit: float = 60.0
    name: str = "the endpoint"
    extra: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise BadInput(
                f"{self.name} must be the address of a server, such as http://localhost:8000, not '{self.url}'"
            )
        self.url = self.url.rstrip("/").removesuffix("/v1")

    @property
    def where(self) -> str:
        """Its name and address, for messages."""
        return f"{self.name} ({self.url})"

    def models(self) -> list[str]:
        """Ids of the models that it serves."""
        found = self._json("/v1/models", None)
        try:
            return [str(one["id"]) for one in found["data"]]
        except (KeyError, TypeError):
            raise BadInput(
                f"{self.where} has no list of models at /v1/models; is it an OpenAI-compatible server?"
            ) from None

    def complete(self, prompt: Prompt, length: int, count: int = 1, **fields: Any) -> list[Answer]:
        """``count`` answers of up to ``length`` tokens. Fewer where the server ignores ``n``."""
        body = self._body(prompt, length, **fields) | ({"n": count} if count > 1 else {})
        found = self._json("/v1/completions", body)
        try:
            return [_answer(one) for one in sorted(found["choices"], key=lambda one: int(one.get("index", 0)))]
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"{self.where} sent an answer that is no completion: {type(error).__name__} {error}"
            ) from error

    def stream(self, prompt: Prompt, length: int, **fields: Any) -> str:
        """The text of a streamed answer. Raises BadInput for a stream that does not end with ``[DONE]``."""
        text, events = "", 0
        for line in self._read("/v1/completions", self._body(prompt, length, stream=True, **fields)).splitlines():
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                return text
            event = self._parsed(data)
            if "error" in event:
                raise BadInput(f"{self.where} ended a stream with an error: {_message(event)}")
            events += 1
            text += "".join(one.get("text") or "" for one in event.get("choices", ()))
        raise BadInput(f"{self.where} cut a stream after {events} events: it did not end with data: [DONE]")

    def raw(self, prompt: Prompt, length: int, **fields: Any) -> Json:
        """A whole answer as the server wrote it."""
        return self._json("/v1/completions", self._body(prompt, length, **fields))

    def counters(self) -> str:
        """The text of ``/metrics``; "" where there is none."""
        with suppress(BadInput):
            return self._read("/metrics", None).decode("utf-8", "replace")
        return ""

    def _body(self, prompt: Prompt, length: int, **fields: Any) -> Json:
        shown = prompt if isinstance(prompt, str) else list(prompt)
        return {"model": self.model, "prompt": shown, "max_tokens": length, **self.extra, **fields}

    def _json(self, path: str, body: Json | None) -> Json:
        return self._parsed(self._read(path, body))

    def _parsed(self, data: bytes) -> Json:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            start = shortened(data[:80].decode("utf-8", "replace"))
            raise BadInput(
                f"{self.where} sent something else than JSON ('{start}'); is it an OpenAI-compatible server?"
            )
        return found

    def _read(self, path: str, body: Json | None) -> bytes:
        """An answer's body. A busy server is asked again."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        until = time.monotonic() + self.time_limit
        attempts = 0
        while True:
            request = urllib.request.Request(self.url + path, data, headers)
            try:
                with urlopen(request, timeout=self.time_limit) as answer:
                    return b"".join(self._parts(answer, until))
            except urllib.error.HTTPError as error:
                wait, attempts = _retry_after(error), attempts + 1
                if error.code not in _BUSY or attempts > _PATIENCE or time.monotonic() + wait > until:
                    raise self._refused(path, error) from None
                time.sleep(wait)
            except TimeoutError:
                raise self._late() from None
            except http.client.IncompleteRead:
                raise BadInput(f"{self.where} cut its answer short: it announced more than it sent") from None
            except (http.client.HTTPException, ConnectionError) as error:
                raise BadInput(f"{self.where} closed the connection within an answer: {_why(error)}") from None
            except OSError as error:  # urllib's URLError, and what sockets raise
                reason = getattr(error, "reason", error)
                if isinstance(reason, (TimeoutError, socket.timeout)):
                    raise self._late() from None
                if isinstance(reason, (http.client.HTTPException, ConnectionResetError)):
                    raise BadInput(f"{self.where} closed the connection within an answer: {_why(reason)}") from None
                raise BadInput(f"nothing answers at {self.url} ({self.name}): {_why(reason)}") from None

    def _parts(self, answer: Any, until: float) -> Iterator[bytes]:
        while part := answer.read1(_READ):
            yield part
            if time.monotonic() > until:
                raise TimeoutError
        if answer.length:  # read1 does not raise for a body that is shorter than its header says
            raise http.client.IncompleteRead(b"", answer.length)

    def _late(self) -> BadInput:
        return BadInput(
            f"{self.where} did not answer within {self.time_limit:g} s; raise --time-limit, or lower --samples"
        )

    def _refused(self, path: str, error: urllib.error.HTTPError) -> BadInput:
        try:
            message = _message(json.loads(error.read()))
        except (ValueError, OSError, http.client.HTTPException):
            message = str(error.reason)
        if error.code in (401, 403):
            key = "the key of --api-key-file" if self.key else "a request without a key; give --api-key-file"
            return BadInput(f"{self.where} refused {key} (status {error.code}: {message})")
        if error.code == 404 and path == "/v1/models":
            return BadInput(f"{self.where} has no /v1/models; is it an OpenAI-compatible server?")
        return Refused(self.where, error.code, message)


def _why(error: object) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _message(found: Any) -> str:
    """The message of an error's body, in any of the forms that servers use."""
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return shortened(found if isinstance(found, str) else json.dumps(found))


def _retry_after(error: urllib.error.HTTPError) -> float:
    try:
        return min(30.0, max(0.1, float(error.headers.get("Retry-After") or 1.0)))
    except ValueError:
        return 1.0


def _answer(choice: Mapping[str, Any]) -> Answer:
    """A choice of /v1/completions."""
    found = choice.get("logprobs") or {}
    texts: list[Token] = [_token(one) for one in found.get("tokens") or ()]
    own = found.get("token_logprobs") or [None] * len(texts)
    top = None
    if found.get("top_logprobs"):
        listed = [{_token(key): float(value) for key, value in (one or {}).items()} for one in found["top_logprobs"]]
        top = tuple(
            one | ({token: float(value)} if value is not None and token not in one else {})
            for one, token, value in zip(listed, texts, own, strict=True)
        )
    ids = choice.get("token_ids")
    tokens: Sequence[Token] = texts if ids is None else [int(one) for one in ids]
    if top is not None and tokens and isinstance(tokens[0], int) and not all(isinstance(one, int) for one in texts):
        top = None  # ids cannot be matched with texts
    prompt = choice.get("prompt_token_ids")
    return Answer(
        str(choice.get("text") or ""),
        choice.get("finish_reason"),
        tuple(tokens),
        top,
        None if prompt is None else tuple(int(one) for one in prompt),
    )


def _token(text: str) -> Token:
    number = text.removeprefix(_AS_ID)
    return int(number) if number != text and number.isdigit() else text
