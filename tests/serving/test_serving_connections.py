"""Connections: how many may be open, and how long and how large the head of a request may be."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest

from live_support import live
from outpace.serving import connection
from outpace.serving.connection import bounded, most_connections
from serving_support import service

HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
MOST = 2


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that waits for a head for half a second, with room for two connections."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connection, "REFUSED_SECONDS", 0.2)
    with live(service(), http=bounded(MOST)) as found:
        yield found


def opened(where: str) -> closing[socket.socket]:
    host, _, port = where.removeprefix("http://").partition(":")
    return closing(socket.create_connection((host, int(port)), timeout=20))


def answer(to: socket.socket) -> tuple[int, Any]:
    found = HTTPResponse(to)
    found.begin()
    return found.status, json.loads(found.read())


def test_a_connection_that_sends_nothing_is_closed(where: str) -> None:
    with opened(where) as one:
        assert one.recv(100) == b""


@pytest.mark.parametrize("earlier", [False, True])
def test_a_head_that_does_not_come_is_not_waited_for(where: str, earlier: bool) -> None:
    with opened(where) as one:
        if earlier:
            one.sendall(HEALTH)
            assert answer(one)[0] == 200
        one.sendall(HEALTH[:-2])
        status, body = answer(one)
        assert (status, body["error"]["type"]) == (408, "timeout_error")
        assert "head of the request did not come within" in body["error"]["message"]
        assert one.recv(100) == b""


def test_an_empty_line_after_an_answer_keeps_no_connection_open(where: str) -> None:
    with opened(where) as one:
        one.sendall(HEALTH)
        assert answer(one)[0] == 200
        one.sendall(b"\r\n")
        began = time.monotonic()
        assert one.recv(100) == b""
        assert time.monotonic() - began < 4  # uvicorn's own limit for idle connections is five seconds


def test_a_head_that_is_too_long_is_refused(where: str) -> None:
    with opened(where) as one:
        one.sendall(HEALTH[:-2] + b"X: " + b"x" * connection.HEAD_BYTES)
        assert answer(one)[0] == 431


def test_bodies_and_answers_may_take_longer(where: str) -> None:
    body = json.dumps({"model": "toy", "prompt": "ab", "max_tokens": 4}).encode()
    with opened(where) as one:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n")
        one.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body[:9])
        time.sleep(0.8)
        one.sendall(body[9:])
        status, found = answer(one)
        assert (status, found["object"]) == (200, "text_completion")


def test_an_answer_that_takes_longer_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    served = service()
    [offered] = served.offered.values()
    score = offered.model.target.score

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(0.1)
        return score(*given, **named)

    monkeypatch.setattr(offered.model.target, "score", slow)
    asked = {"model": "toy", "prompt": "ab", "max_tokens": 6, "stream": True, "ignore_eos": True}
    with live(served, http=bounded(MOST)) as where:
        found = httpx.post(f"{where}/v1/completions", json=asked | {"speculation": {"off": True}}, timeout=60)
    assert found.text.endswith("data: [DONE]\n\n")


def test_more_connections_are_refused_until_one_is_closed(where: str) -> None:
    with opened(where) as first, opened(where) as second:
        for one in (first, second):
            one.sendall(HEALTH)
            assert answer(one)[0] == 200
        found = httpx.get(f"{where}/health")
        assert found.status_code == 503
        assert found.json()["error"]["code"] == "too_many_connections"
        assert found.headers["retry-after"] == "1"
        first.sendall(HEALTH)  # those that are open go on
        assert answer(first)[0] == 200
    until = time.monotonic() + 20
    while httpx.get(f"{where}/health").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_flood_is_closed_without_a_word(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TOLD", 0)
    with opened(where), opened(where), opened(where) as third:
        assert third.recv(100) == b""


@pytest.mark.parametrize(
    ("callers", "files", "expected"), [(260, 1 << 20, 1000), (5000, 1 << 20, 10_000), (260, 256, 128), (0, 10, 1)]
)
def test_there_is_room_for_all_callers_and_files_for_all_connections(
    callers: int, files: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_open_files", lambda: files)
    assert most_connections(callers) == expected
