"""Requests to this machine do not go through a proxy, and requests to others do."""

from __future__ import annotations

import http.server
import os
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from outpace.certify.server_client import Server as Client
from outpace.core.loopback import is_loopback, urlopen
from outpace.integrations.vllm.server import Server
from planted_server import planted
from test_vllm_server import start


class Proxy(http.server.BaseHTTPRequestHandler):
    """Answers as itself."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"proxy")

    def log_message(self, *about: object) -> None:
        pass


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy for everything, as in many offices."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with http.server.HTTPServer(("127.0.0.1", 0), Proxy) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(urllib.request, "_opener", None)  # which keeps the proxies of its first request
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listening.server_port}")
        try:
            yield
        finally:
            listening.shutdown()
            thread.join()


def test_other_machines_are_asked_through_it() -> None:
    with urlopen("http://gpu1.invalid:8000/health", timeout=10) as answer:
        assert answer.read() == b"proxy"


def test_a_server_to_certify_on_this_machine_is_not() -> None:
    with planted() as address:
        assert Client(address, "toy").models() == ["toy"]
        assert Client(address.replace("127.0.0.1", "localhost"), "toy").models() == ["toy"]


def test_a_started_server_is_not() -> None:
    """The proxy would say that it is ready at once."""
    begun = start("never")
    server = Server(begun)
    try:
        assert not server._answers()
    finally:
        server.kill()


def test_addresses_of_this_machine() -> None:
    for here in ("localhost:1", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", "0.0.0.0:8000", "user@localhost"):
        assert is_loopback(f"http://{here}/v1"), here
    for elsewhere in ("gpu1:8000", "10.0.0.1", "localhost.example.com", "[2001:db8::1]", ""):
        assert not is_loopback(f"http://{elsewhere}/v1"), elsewhere
