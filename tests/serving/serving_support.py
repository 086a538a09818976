"""What the tests of the server share: the application over the toy model, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from cli_support import Letters, toy
from outpace.engine.scheduler import Limits
from outpace.engine.shared_decoder import SharedDecoder
from outpace.model import Model
from outpace.serving.app import build_app
from outpace.serving.logs import Log
from outpace.serving.metrics import LatencyBounds
from outpace.serving.offered import Defaults
from outpace.serving.service import Service
from outpace.serving.tenants import Tenants, Terms

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "tell me a tale"}]
PLD = Defaults(method="pld")
KEYS = {"ann": "key-of-ann", "bob": "key-of-bob"}


def service(
    model: Model | None = None,
    keys: dict[str, Terms] | None = None,
    log: Log | None = None,
    defaults: Defaults = PLD,
    bounds: LatencyBounds | None = None,
    **limits: Any,
) -> Service:
    """A service of the toy model (or another), with few bounds, that drafts with pld, or as ``defaults`` say."""
    model = model or toy()
    model.shared = SharedDecoder(model.target, model.tokenizer, Limits(**limits))
    return Service([model], Tenants(keys), defaults, log, bounds)


@contextmanager
def client(served: Service | None = None, **about: Any) -> Iterator[TestClient]:
    """A client of the application; defects raise in the test."""
    served = served or service()
    with TestClient(build_app(served, **about)) as found:
        yield found
    served.stop()


def chat(to: TestClient, **body: Any) -> Any:
    """POST a chat; the answer must be one."""
    answer = to.post(CHAT, json={"model": "toy", "messages": USER, "temperature": 0, "max_tokens": 12, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(to: TestClient, **body: Any) -> Any:
    """POST a completion; the answer must be one."""
    answer = to.post(COMPLETE, json={"model": "toy", "prompt": "ab", "temperature": 0, "max_tokens": 12, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(to: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as one."""
    answer = to.post(path, json={"model": "toy", "temperature": 0, "max_tokens": 12, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def refused(to: TestClient, status: int, *said: str, path: str = CHAT, **body: Any) -> dict[str, Any]:
    """POST what must be refused, in OpenAI's form; returns the error."""
    base: dict[str, Any] = {"model": "toy"} | ({"messages": USER} if path == CHAT else {"prompt": "ab"})
    answer = to.post(path, json=base | body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for words in said:
        assert words in error["message"], error
    return error


OTHER_BLANKS = "\u00a0\u3000\x0b\x0c"
"""White space to Python, not to JSON."""


class Scripted(Letters):
    """A tokenizer of single characters with a chat template, for answers that are written beforehand."""

    def __init__(self, template: str, marker: str = "") -> None:
        self.template = template
        self.characters: list[str] = [*map(chr, range(32, 127)), "\n", *OTHER_BLANKS, marker]
        self.fingerprint = repr(self.characters)

    def encode(self, text: str) -> list[int]:
        return [self.characters.index(one) for one in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in ids if token < len(self.characters) - 1)

    def token_text(self, token: int) -> str:
        return self.characters[token]

    def token_bytes(self, token: int) -> bytes | None:
        return self.characters[token].encode() if token < len(self.characters) - 1 else None

    def __len__(self) -> int:
        return len(self.characters)

    def chat(self, messages: Sequence[Any], tools: Sequence[Any] | None = None, answer: str = "") -> list[int]:
        shown = {"messages": list(messages), "tools": list(tools or ())}
        return self.encode(json.dumps(shown) + answer)
