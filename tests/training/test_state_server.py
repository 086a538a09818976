"""Answers and hidden states of a server: a head is trained on them, and what is not the target's is refused."""

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from fcntl import LOCK_EX, flock
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import outpace
from cli_support import EOS, toy
from outpace.core.errors import BadInput
from outpace.heads.head_config import WEIGHTS
from outpace.training.answers import PromptTokens, answered, states_of
from outpace.training.shards import Conversation, Shards
from outpace.training.state_server import StateServer, is_address, opened_server

TOY = toy()
LAYERS = (1, 2, 4)


class Pretend:
    """A server that answers as vLLM does, with the toy model's tokens and states."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layers: tuple[int, ...] = LAYERS
        self.asked: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.change: Callable[[dict[str, Any]], Any] = lambda reply: reply
        self.status = 200
        self.room: int | None = None

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:  # the toy model runs in one thread
            number = len(self.asked)
            self.asked.append(body)
            most, stops = body["max_tokens"], frozenset(body.get("stop_token_ids", ()))
            prompt = PromptTokens("", tuple(body["prompt"]), body["temperature"], body.get("seed", 0))
            [answer] = [one.answer for one in answered(TOY.target, [prompt], (), most=most, stop_ids=stops)]
            # The toy's last token is not forwarded, and the server's prompt is, to its end.
            states = states_of(TOY.target, [Conversation("", [*body["prompt"], EOS], [])], self.layers)[0]
        rows = torch.stack([states[layer][:-1] for layer in self.layers], 1)
        path = self.folder / f"{number}.safetensors"
        # As vLLM's connector: the lock is there before the answer, and held until the file is whole.
        lock = path.with_name(f"{path.name}.lock").open("w")
        flock(lock, LOCK_EX)

        def write() -> None:
            time.sleep(0.02)
            with lock:
                save_file({"token_ids": torch.tensor(body["prompt"]), "hidden_states": rows}, path)

        threading.Thread(target=write).start()
        named = {"hidden_states_path": str(path)}
        return {"choices": [{"token_ids": answer, "text": ""}], "kv_transfer_params": named}


@pytest.fixture
def pretend(tmp_path: Path) -> Iterator[Pretend]:
    (tmp_path / "shm").mkdir()
    yield Pretend(tmp_path / "shm")


@pytest.fixture
def url(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def _send(self, found: object) -> None:
            data = json.dumps(found).encode()
            self.send_response(pretend.status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send({"data": [{"id": "toy"} | ({"max_model_len": pretend.room} if pretend.room else {})]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (body["model"], self.path) == ("toy", "/v1/completions")
            if pretend.room and len(body["prompt"]) + body["max_tokens"] > pretend.room:  # as vLLM refuses it
                pretend.status = 400
            self._send(pretend.change(pretend.reply(body)))

    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 128)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_states_and_answers_are_those_of_the_target(pretend: Pretend, url: str) -> None:
    server = opened_server(url, LAYERS[:-1], TOY.target)
    asked = [PromptTokens(str(at), (at + 1, 4, 9), 0.0, at) for at in range(20)]
    found = {one.key: one for one in server.answered(asked, most=12, stop_ids=TOY.eos_ids, together=3)}
    own = {one.key: one for one in answered(TOY.target, asked, LAYERS, most=12, stop_ids=TOY.eos_ids)}
    assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in own.items()}
    together = list(found.values())
    for one, states in zip(together, server.states_of(together, LAYERS[1:]), strict=True):
        assert states.keys() == set(LAYERS[1:])
        for layer, rows in states.items():  # the server runs the last token too
            torch.testing.assert_close(rows[:-1], own[one.key].states[layer][:-1])
            assert len(rows) == len(one.tokens)
    assert list(pretend.folder.iterdir()) == []  # nothing is left on the disk


def test_nothing_more_is_asked_when_time_is_over(pretend: Pretend, url: str) -> None:
    server = StateServer(url, LAYERS, TOY.target.hidden_size)
    asked = [PromptTokens(str(at), (at + 1, 4), 0.0, at) for at in range(20)]
    found = list(server.answered(asked, most=3, stop_ids=TOY.eos_ids, together=2, over=lambda: len(pretend.asked) > 4))
    assert 0 < len(found) <= 6


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_head_is_trained_on_what_a_server_gives(
    pretend: Pretend, url: str, tmp_path: Path, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    names = ["cat", "dog", "owl", "fox", "bee", "ant"]
    rows = [{"turns": [f"what did the {one} say to the {other}"]} for one in names for other in names if one != other]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    settings: dict[str, Any] = {"prompts": [prompts], "tokens": 400, "size": "tiny", "options": {"steps": 2}}
    settings |= {"passages": 0.0, "turns": 1, "self_written": 0.0, "answer_tokens": 24}
    made = outpace.train(TOY, "eagle3", tmp_path / "head", states=url, prefetch=prefetch, **settings)
    assert (tmp_path / "head" / WEIGHTS).exists()
    assert made.provenance["steps"] > 0
    assert f"--states {url}" in made.provenance["command"]
    assert list(pretend.folder.iterdir()) == []
    shards = Shards(tmp_path / "head" / "data", {})
    assert all(not one.states for path in shards.paths for one in shards.read(path, LAYERS))  # text alone
    own = outpace.train(TOY, "eagle3", tmp_path / "own", **settings)
    assert made.provenance["held_out"] == pytest.approx(own.provenance["held_out"], rel=0.02)
    monkeypatch.setattr(Pretend, "reply", lambda *_: {"choices": []})
    with pytest.raises(BadInput, match="sent no completion"):
        outpace.train(TOY, "eagle3", tmp_path / "other", states=url, **settings)
    assert not (tmp_path / "other" / WEIGHTS).exists()


def test_conversations_are_no_longer_than_the_server_takes(pretend: Pretend, url: str, tmp_path: Path) -> None:
    pretend.room = 120
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"turns": [f"what did the {one} say " + "and then " * more]} for one in ("cat", "dog") for more in range(9)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    given: dict[str, Any] = {"tokens": 300, "size": "tiny", "passages": 0.0, "self_written": 0.0, "turns": 2}
    made = outpace.train(TOY, "eagle3", tmp_path / "head", prompts=[prompts], states=url, **given)
    assert pretend.status == 200 and made.provenance["steps"] > 0
    longest = max(len(body["prompt"]) for body in pretend.asked)
    assert 60 < longest < pretend.room


def renamed(reply: dict[str, Any], name: str) -> dict[str, Any]:
    return reply | {"kv_transfer_params": {"hidden_states_path": name}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda reply: reply | {"kv_transfer_params": None}, "gives no hidden states; start vLLM with"),
        (lambda reply: renamed(reply, "/nowhere/1.safetensors"), "must be shared with this machine"),
        (lambda reply: [reply], "does not answer as vLLM does"),
    ],
)
def test_a_server_that_does_not_answer_so_is_refused(
    pretend: Pretend, url: str, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    pretend.change = change
    server = StateServer(url, LAYERS, TOY.target.hidden_size, patience=1.0)
    with pytest.raises(BadInput, match=said) as refused:
        server.states_of([Conversation("", [1, 2, 3], [])], LAYERS)
    assert "\n" not in str(refused.value)


def test_states_of_other_layers_and_texts_are_refused(pretend: Pretend, url: str) -> None:
    pretend.layers = (1, 4)
    with pytest.raises(BadInput, match="the head reads 3 layers"):
        opened_server(url, LAYERS[:-1], TOY.target)
    pretend.layers = (4, 2, 1)
    with pytest.raises(BadInput, match="other states than this model's layer 1"):
        opened_server(url, LAYERS[:-1], TOY.target)
    pretend.layers = LAYERS
    server = StateServer(url, LAYERS, TOY.target.hidden_size, patience=0.1)
    other = pretend.folder / "other.safetensors"
    save_file({"token_ids": torch.tensor([9]), "hidden_states": torch.zeros(1, 3, 4)}, other)
    pretend.change = lambda reply: renamed(reply, str(other))
    with pytest.raises(BadInput, match="states of another text"):
        server.states_of([Conversation("", [1, 2, 3], [])], LAYERS)
    assert other.exists()  # what is not ours is not deleted


def test_refusals_and_silence_are_one_line(pretend: Pretend, url: str) -> None:
    pretend.status = 400
    server = StateServer(url, LAYERS, TOY.target.hidden_size)
    with pytest.raises(BadInput, match=r"refused a request \(status 400\)") as refused:
        server.states_of([Conversation("", [1], [])], LAYERS)
    assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match=r"does not answer \(.*refused"):
        StateServer("http://127.0.0.1:9", LAYERS, 8).states_of([Conversation("", [1], [])], LAYERS)


def test_a_request_that_gets_no_answer_is_made_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = urllib.request.urlopen, [ConnectionResetError(104, "reset"), ConnectionResetError(104, "reset")]

    def opened(*given: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*given, **more)

    monkeypatch.setattr(urllib.request, "urlopen", opened)
    [states] = StateServer(url, LAYERS, TOY.target.hidden_size).states_of([Conversation("", [1, 2], [])], LAYERS)
    assert states.keys() == set(LAYERS) and not failures


def test_addresses_are_told_from_folders() -> None:
    assert is_address("http://host:8000/v1") and is_address("https://host")
    assert not is_address("states/") and not is_address(Path("http")) and not is_address(None)
