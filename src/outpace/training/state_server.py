"""Answers and hidden states from a running vLLM server, for targets that only an engine which shards them can run.

The server runs the target with ``extract_hidden_states`` and its connector to files: every completion leaves one with
``token_ids`` (T,) and ``hidden_states`` (T, layers, hidden) in a folder that this machine sees too, and names it in its
answer (``kv_transfer_params``). A file is read when a batch needs it, and deleted. The layers are those of
:mod:`outpace.training.given_states`: the head's, ascending, and last the target's output before its final norm.
"""

from __future__ import annotations

import http.client
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from fcntl import LOCK_NB, LOCK_SH, flock
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from outpace.core.errors import BadInput, shortened
from outpace.models.quiet import one_line
from outpace.targets.base import Target
from outpace.training.answers import PromptTokens
from outpace.training.given_states import check_alike
from outpace.training.shards import Conversation

TOGETHER = 16
"""Conversations whose states are asked for at once."""
_PATIENCE = 600.0
"""Seconds that an answer of the server may take."""
_PAUSES = (0.1, 0.5, 2.0, None)
"""Seconds after which a request that got no answer is made again; None: it is not."""
_FILE = 30.0
"""Seconds after an answer in which its file must be there and whole: the server writes it meanwhile."""
_PROBE = 64
"""Tokens of the text by which the server's states are compared with the model's own."""


def is_address(states: str | Path | None) -> bool:
    """Whether states are asked of a server, and not read from a folder."""
    return str(states).startswith(("http://", "https://"))


def opened_server(url: str, aux_hidden_state_layers: Sequence[int], target: Target) -> StateServer:
    """The server at ``url`` for a head of ``target`` that reads these layers, checked as ``StateServer.check`` does."""
    found = StateServer(url, sorted({*aux_hidden_state_layers, target.num_layers}), target.hidden_size)
    found.check(target)
    return found


class StateServer:
    """The server at ``url``, which gives states of ``layers``, ``hidden_size`` wide.

    Requests raise BadInput where it does not answer as it must. May be used from several threads.
    """

    def __init__(self, url: str, layers: Sequence[int], hidden_size: int, patience: float = _FILE) -> None:
        self.url, self.layers, self._patience = url.rstrip("/").removesuffix("/v1"), tuple(layers), patience
        self._hidden_size = hidden_size

    def answered(
        self,
        prompts: Iterable[PromptTokens],
        layers: Sequence[int] = (),
        *,
        most: int,
        stop_ids: frozenset[int],
        together: int = TOGETHER,
        over: Callable[[], bool] = lambda: False,
    ) -> Iterator[Conversation]:
        """As :func:`outpace.training.answers.answered`, without states; once ``over``, nothing more is asked."""

        def answer(prompt: PromptTokens) -> Conversation:
            asked = {"max_tokens": most, "temperature": prompt.temperature, "seed": prompt.seed}
            reply = self._completion(prompt.tokens, asked | {"stop_token_ids": sorted(stop_ids)})
            found = reply["choices"][0].get("token_ids")
            if not isinstance(found, list) or not all(isinstance(one, int) for one in found):
                raise BadInput(f"{self.url} gives no token_ids with its answers (return_token_ids); use a newer vLLM")
            if path := _path(reply):  # of the prompt alone: those of the whole conversation are asked for when needed
                self._taken(path, prompt.tokens)
            return Conversation(prompt.key, list(prompt.tokens), found)

        pending = iter(prompts)
        with ThreadPoolExecutor(max(1, together)) as pool:
            running: set[Future[Conversation]] = set()
            try:
                while True:
                    room = 0 if over() else together - len(running)
                    running |= {pool.submit(answer, one) for one in itertools.islice(pending, room)}
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (one for one in (each.result() for each in done) if one.answer)
            finally:
                pool.shutdown(cancel_futures=True)

    def states_of(self, conversations: Sequence[Conversation], layers: Sequence[int]) -> list[dict[int, Tensor]]:
        """The hidden states (tokens, hidden) of ``layers`` at every token of each conversation."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            try:
                return list(pool.map(lambda one: self._states(one.tokens, layers), conversations))
            finally:
                pool.shutdown(cancel_futures=True)

    def check(self, target: Target) -> None:
        """Raise BadInput where the server's states are not what ``target`` has: other layers, or another model."""
        room = min(target.context_length, self.context_length or target.context_length)
        count = min(_PROBE, room - 1)
        tokens = [(7919 * at + 13) % target.vocab_size for at in range(count)]
        check_alike(self.url, self._states(tokens, self.layers), tokens, self.layers, target)

    def _states(self, tokens: Sequence[int], layers: Sequence[int]) -> dict[int, Tensor]:
        path = _path(self._completion(tokens, {"max_tokens": 1, "temperature": 0.0}))
        if path is None:
            raise BadInput(
                f"{self.url} gives no hidden states; start vLLM with --speculative-config (extract_hidden_states) and "
                "--kv-transfer-config (ExampleHiddenStatesConnector)"
            )
        rows = self._taken(path, tokens)
        if rows.dim() != 3 or rows.shape[1] != len(self.layers) or rows.shape[2] != self._hidden_size:
            raise BadInput(
                f"{self.url} gives states of shape {tuple(rows.shape[1:])}, and the head reads {len(self.layers)} "
                f"layers ({', '.join(map(str, self.layers))}) of {self._hidden_size} numbers; start it with these"
            )
        return {layer: rows[:, at].contiguous() for at, layer in enumerate(self.layers) if layer in layers}

    def _taken(self, path: Path, tokens: Sequence[int]) -> Tensor:
        """The states in a file that the server has named, (T, layers, hidden); the file and its lock are deleted."""
        lock = path.with_name(f"{path.name}.lock")
        until = time.monotonic() + self._patience
        rows: Tensor
        while True:
            try:
                if lock.exists():  # held until the file is whole
                    _check_free(lock)
                found = load(path.read_bytes())
                ids, rows = found["token_ids"].flatten().tolist(), found["hidden_states"]
                break
            except (OSError, SafetensorError, KeyError) as error:
                if time.monotonic() > until:
                    raise BadInput(
                        f"{path}, which {self.url} has named, cannot be read here ({one_line(error)}); its folder "
                        "must be shared with this machine"
                    ) from None
                time.sleep(0.02)
        if ids[: len(tokens)] != list(tokens) or len(rows) < len(tokens):
            raise BadInput(f"{path} has the states of another text than was asked for")
        try:
            for one in (path, lock):
                one.unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(f"{path} cannot be deleted ({error.strerror or error}); the disk would fill") from None
        return rows[: len(tokens)].to(torch.bfloat16)

    @property
    def context_length(self) -> int | None:
        """Tokens of a conversation that it takes, which may be fewer than its model's; None where it does not say."""
        found = self._about.get("max_model_len")
        return found if isinstance(found, int) and found > 0 else None

    @cached_property
    def _about(self) -> dict[str, Any]:
        """Its model, as it describes it."""
        try:
            found = self._json("/v1/models", None)["data"][0]
            return {**found, "id": str(found["id"])}
        except (KeyError, IndexError, TypeError):
            raise BadInput(f"{self.url} names no model; is it a vLLM server?") from None

    def _completion(self, tokens: Sequence[int], asked: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self._about["id"], "prompt": list(tokens), "return_token_ids": True, **asked}
        reply = self._json("/v1/completions", body)
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise BadInput(f"{self.url} sent no completion; is it a vLLM server?")
        return reply

    def _json(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        for pause in _PAUSES:
            try:
                with urllib.request.urlopen(request, timeout=_PATIENCE) as reply:
                    found = json.loads(reply.read())
                break
            except urllib.error.HTTPError as error:
                said = shortened(error.read(2000).decode("utf-8", "replace"))
                raise BadInput(f"{self.url} refused a request (status {error.code}): {said}") from None
            except (OSError, http.client.HTTPException) as error:  # it may be busy
                if pause is None:
                    raise BadInput(f"{self.url} does not answer ({one_line(error)})") from None
                time.sleep(pause)
            except ValueError as error:
                raise BadInput(f"{self.url} does not answer as vLLM does ({one_line(error)})") from None
        if not isinstance(found, dict):
            raise BadInput(f"{self.url} does not answer as vLLM does")
        return found


def _check_free(lock: Path) -> None:
    """Raise BlockingIOError while another program holds the lock. Where files cannot be locked nothing is to be seen of
    that, and whether a file is whole shows when it is read."""
    try:
        with lock.open("rb") as held:
            flock(held, LOCK_SH | LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def _path(reply: dict[str, Any]) -> Path | None:
    """The file of states that an answer names."""
    given = reply.get("kv_transfer_params")
    named = given.get("hidden_states_path") if isinstance(given, dict) else None
    return Path(named) if isinstance(named, str) and named.endswith(".safetensors") else None
