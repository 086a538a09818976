"""A small server with OpenAI's API whose defects are planted: biased, slow, cut off, without log-probabilities."""

from __future__ import annotations

import json
import math
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from outpace.targets.table import random_table

LETTERS = "abcdefghijkl"
Json = dict[str, Any]


@dataclass
class Planted:
    """``bias``: how often a token after the first is the most likely one, unasked. ``wrong``: at which position greedy
    answers go wrong. ``forgets``: log-probabilities after the first token are of a prefix without the prompt.
    ``delay``: seconds before an answer; ``drips``: before each twenty bytes of it. ``metrics``: those of vLLM, none, or
    this text."""

    weights: int = 3
    bias: float = 0.0
    wrong: int | None = None
    wrong_rank: int = 3
    forgets: bool = False
    logprobs: int = 20
    processed: bool = False
    ids: bool = True
    choices: bool = True
    extensions: bool = True
    delay: float = 0.0
    drips: float = 0.0
    cut_streams: bool = False
    cut_bodies: bool = False
    key: str | None = None
    formats: str = "refused"
    fixed_seed: bool = False
    drafted: bool = True
    metrics: bool | str = True
    asked: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = random_table(len(LETTERS), self.weights, order=2, sharpness=1.0)
        self.random = random.Random(0)
        self.drafts = 0

    def logs(self, prefix: list[int], temperature: float) -> list[float]:
        """Log-probabilities after a prefix."""
        logits = [value / temperature for value in self.table(tuple(prefix)).tolist()]
        total = math.log(sum(math.exp(value) for value in logits))
        return [value - total for value in logits]

    def choice(self, prompt: list[int], body: Json, rng: random.Random) -> Json:
        """One answer."""
        temperature, length = body.get("temperature", 1.0), body["max_tokens"]
        tokens: list[int] = []
        logprobs: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        as_ids = bool(body.get("return_tokens_as_token_ids"))
        for at in range(length):
            prefix = [*prompt, *tokens]
            shown = tokens if self.forgets and at > 0 else prefix
            logs = self.logs(shown or prefix, temperature if self.processed and temperature else 1.0)
            ranked = sorted(range(len(logs)), key=lambda one: -logs[one])
            if temperature == 0:
                token = ranked[self.wrong_rank if at == self.wrong else 0]
            else:
                drawn = self.logs(prefix, temperature)
                token = rng.choices(range(len(drawn)), [math.exp(one) for one in drawn])[0]
                if at and rng.random() < self.bias:
                    token = max(range(len(drawn)), key=drawn.__getitem__)
            tokens.append(token)
            self.drafts += self.drafted and at > 0

            def name(one: int) -> str:
                return f"token_id:{one}" if as_ids else LETTERS[one]

            logprobs["tokens"].append(name(token))
            logprobs["token_logprobs"].append(logs[token])
            listed = ranked[: body.get("logprobs") or 0]
            logprobs["top_logprobs"].append({name(one): logs[one] for one in listed})
        found: Json = {"text": "".join(LETTERS[one] for one in tokens), "finish_reason": "length"}
        if body.get("logprobs"):
            found["logprobs"] = logprobs
        if body.get("return_token_ids"):
            found |= {"token_ids": tokens, "prompt_token_ids": prompt}
        return found

    def refusal(self, body: Json) -> str:
        """Why a request is refused; "" where it is not."""
        if body["model"] != "toy":
            return "no such model"
        if not self.ids and "return_token_ids" in body:
            return "there is no field return_token_ids"
        if not self.extensions and {"top_k", "ignore_eos"} & set(body):
            return "there is no such field"
        if (body.get("logprobs") or 0) > self.logprobs:
            return f"logprobs may be {self.logprobs} at most"
        if "response_format" in body and self.formats == "refused":
            return "formats are not supported"
        return ""

    def complete(self, body: Json) -> Json:
        prompt = body["prompt"]
        ids = [LETTERS.index(one) if one in LETTERS else 0 for one in prompt] if isinstance(prompt, str) else prompt
        choices = []
        for number in range(body.get("n", 1) if self.choices else 1):
            rng = self.random if body.get("seed") is None else random.Random(f"{body['seed'] + number} {ids}")
            rng = random.Random(f"{number} {ids}") if self.fixed_seed else rng
            found = self.choice(ids, body, rng)
            if "response_format" in body:
                valid = '{"color": "red", "count": 3}'
                found = {"text": valid if self.formats == "valid" or number else "{", "finish_reason": "stop"}
            choices.append({"index": number, **found})
        return {"choices": choices, "usage": {"prompt_tokens": len(ids)}}


class Listening(ThreadingHTTPServer):
    """Says nothing of clients that have left."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def planted(**about: Any) -> Iterator[str]:
    """The address of a server with these defects."""
    with running(Planted(**about)) as address:
        yield address


@contextmanager
def running(server: Planted) -> Iterator[str]:
    """The address of ``server``."""

    class Handler(BaseHTTPRequestHandler):
        wbufsize = -1  # header and body in one packet

        def do_GET(self) -> None:
            if self.path == "/metrics" and server.metrics is not True:
                self.send(200 if server.metrics else 404, (server.metrics or "").encode())
            elif self.path == "/metrics":
                lines = f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {server.drafts}.0\n'
                lines += f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {server.drafts // 2}.0\n'
                self.send(200, lines.encode())
            elif self.path == "/v1/models":
                self.send(200, json.dumps({"data": [{"id": "toy"}]}).encode())
            else:
                self.send(404, b"{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(body)
            if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
                self.send(401, b'{"error": {"message": "wrong key"}}')
            elif reason := server.refusal(body):
                self.send(400, json.dumps({"error": {"message": reason}}).encode())
            else:
                time.sleep(server.delay)
                found = server.complete(body)
                if body.get("stream"):
                    text = f"data: {json.dumps(found)}\n\n" + ("" if server.cut_streams else "data: [DONE]\n\n")
                    self.send(200, text.encode())
                else:
                    self.send(200, json.dumps(found).encode())

        def send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) + 50 * server.cut_bodies))
            self.end_headers()
            dripping = server.drips and self.command == "POST"
            for at in range(0, len(data), step := 20 if dripping else len(data)):
                self.wfile.write(data[at : at + step])
                if dripping:
                    self.wfile.flush()
                    time.sleep(server.drips)

        def log_message(self, *about: Any) -> None:
            pass

    listening = Listening(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()
