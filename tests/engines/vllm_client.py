"""Asking a vLLM server: answers in token ids, and what its counters say of speculation."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any


class Client:
    """``url``: of the server; ``name``: what it calls its model."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name

    def answer(self, prompt: Sequence[int], length: int, **asked: Any) -> list[int]:
        """The answer's tokens; greedy, unless ``asked`` says otherwise."""
        body = {"model": self.name, "prompt": list(prompt), "max_tokens": length, "temperature": 0}
        found = self.post("/v1/completions", {**body, "return_token_ids": True, "ignore_eos": True, **asked})
        return [int(token) for token in found["choices"][0]["token_ids"]]

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def status(self, path: str, body: dict[str, Any]) -> int:
        """The status that a request gets."""
        try:
            self.post(path, body)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def accepted(self) -> float:
        """Draft tokens that were accepted since the server began."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as reply:
            text = reply.read().decode()
        found = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total(?:\{.*\})? ([0-9.e+]+)", text, re.M)
        return sum(map(float, found))


def acceptance_length(tokens: int, answers: int, accepted: float) -> float:
    """Tokens per forward of the target: of the ``tokens`` of all answers the first of each came from its prefill."""
    decoded = tokens - answers
    return decoded / (decoded - accepted)
