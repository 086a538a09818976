"""benchmarks/engine_lookup.py: what it asks, in which order, and what it makes of the answers; no engine runs."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import engine_lookup
from engine_lookup import Answer, Server, measure


class Scripted(Server):
    """Answers with ``tokens`` after the first chunk in ``seconds``, of which ``accepted_each`` were drafted, and only
    when ``batch`` requests run."""

    def __init__(self, seconds: float, accepted_each: float = 0.0, batch: int = 1, odd: str = "") -> None:
        super().__init__("http://nowhere")
        self.seconds, self.accepted_each, self.odd = seconds, accepted_each, odd
        self.asked: list[tuple[str, str]] = []
        self.counted = 0.0
        self.together = threading.Barrier(batch)
        self.lock = threading.Lock()

    def ask(self, text: str, tokens: int, namespace: str) -> Answer:
        with self.lock:
            self.asked.append((text, namespace))
            self.counted += self.accepted_each
        self.together.wait(60)
        return Answer(f"answer to {text}{self.odd if 'def mean' in text else ''}", tokens, 1.0, 1.0 + self.seconds)

    def accepted(self) -> float:
        return self.counted


@pytest.mark.parametrize("batch", engine_lookup.BATCHES)
def test_every_server_answers_every_prompt_in_batches(batch: int) -> None:
    plain, quick = Scripted(8.0, batch=batch), Scripted(2.0, 16.0, batch, odd="!")
    found = measure({"plain": plain, "quick": quick}, "code", 32, 1, batch)
    assert len(plain.asked) == len(quick.asked) == 4
    assert found["plain"]["speedup"] == 1.0 and found["plain"]["identical"] == 4
    assert found["quick"]["speedup"] == 4.0 and found["quick"]["timed"] == 4 // batch
    assert found["quick"]["tokens_per_forward"] == 2.0
    assert (found["quick"]["identical"], found["quick"]["prompts"]) == (3, 4)


def test_the_second_of_two_requests_of_a_namespace_is_measured() -> None:
    server = Scripted(1.0, 8.0, batch=2)
    found = measure({"plain": server}, "again", 32, 2, 2)
    pairs = engine_lookup.QUESTIONS[:2]
    assert len(server.asked) == 16 and found["plain"]["prompts"] == 4
    firsts, seconds = dict(server.asked[:2]), dict(server.asked[2:4])
    assert set(firsts) == {first for first, _ in pairs}
    for first, second in pairs:
        assert firsts[first] == seconds[second]
    assert len({name for _, name in server.asked}) == 8  # of each pass another one
    assert found["plain"]["tokens_per_forward"] == pytest.approx(32 / 24, abs=0.001)


def test_answers_that_are_too_short_are_counted_and_not_timed() -> None:
    found = measure({"plain": Scripted(1.0)}, "copy", engine_lookup.TIMED - 1, 1, 1)
    assert (found["plain"]["speedup"], found["plain"]["timed"], found["plain"]["prompts"]) == (None, 0, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--only", "sam,no"), "no 'no'"), (("--loads", "sing"), "no 'sing'"), (("--batch", "3"), "--batch")],
)
def test_bad_options_start_nothing(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["engine_lookup.py", *arguments])
    monkeypatch.setattr(engine_lookup, "running_server", lambda *_, **__: pytest.fail("a server was started"))
    with pytest.raises(SystemExit, match="2"):
        engine_lookup.main()
    assert said in capsys.readouterr().err


class Streaming(BaseHTTPRequestHandler):
    """As vLLM streams a chat: a chunk of the role without tokens, one of a token, one of two, and the usage alone."""

    chunks = ((("", 0), ("one", 1), (" two three", 3)), 3)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["vllm_xargs"] == {"namespace": "team"} and asked["max_tokens"] == 8
        self.send_response(200)
        self.end_headers()
        parts, total = self.chunks
        lines = [
            {"choices": [{"delta": {"content": text}}], "usage": {"completion_tokens": count}} for text, count in parts
        ]
        for line in (*lines, {"choices": [], "usage": {"completion_tokens": total}}):
            self.wfile.write(f"data: {json.dumps(line)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 5.0\n# HELP nothing\n')

    def log_message(self, *about: object) -> None:
        pass


def test_an_answer_is_timed_from_its_first_chunk_with_tokens() -> None:
    with HTTPServer(("127.0.0.1", 0), Streaming) as listening:
        threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        server = Server(f"http://127.0.0.1:{listening.server_port}")
        [found] = server.ask_together(["hello"], 8, ["team"])
        assert (found.text, found.tokens) == ("one two three", 2)
        assert found.last >= found.first > 0.0
        assert server.accepted() == 5.0
        listening.shutdown()
