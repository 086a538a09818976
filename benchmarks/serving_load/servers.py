"""The servers: each a process of its own on this machine, all of them running while they take turns."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from itertools import product
from types import TracebackType
from typing import IO, Any, Self

from outpace.bench.peers.worker import environment
from outpace.cli.options.option_values import key_values
from outpace.core.errors import BadInput
from outpace.core.progress import stage

_ENDING = 20  # seconds that a server has to end by itself
_OURS, _VLLM, _LLAMA = "outpace", "vllm", "llama-cpp"
SERVERS = (_OURS, _VLLM, _LLAMA)


class NotStarted(Exception):
    """A server that did not begin to answer: why, in one line."""


@dataclass(slots=True)
class Server:
    """One server. ``model``: its id there. ``salt``: the field that keeps a request's cached prompts apart.

    The same question comes again in other blocks; without a salt of its own it would be answered from the cache.
    """

    name: str
    command: list[str]
    around: dict[str, str]
    model: str
    salt: str | None
    url: str = ""
    note: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None

    def start(self, patience: float) -> None:
        """Start it and wait until it answers. Raises NotStarted."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        try:
            self._process = subprocess.Popen(
                self.command, stdout=self._log, stderr=self._log, env=self.around, start_new_session=True
            )
        except OSError as error:
            raise NotStarted(f"cannot start {self.command[0]}: {error.strerror}") from error
        until = time.monotonic() + patience
        with stage(f"starting {self.name}"):
            while not _answers(self.url):
                if self._process.poll() is not None:
                    raise NotStarted(f"ended with exit code {self._process.returncode}: {self._last_line()}")
                if time.monotonic() > until:
                    raise NotStarted(f"did not answer within {patience:g} s: {self._last_line()}")
                time.sleep(0.25)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def pause(self, *, paused: bool) -> None:
        """Stop it while others have their turn, or let it go on: vLLM's processes spin between requests."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def stop(self) -> None:
        """End it and what it started."""
        if self._process is None:
            return
        self.pause(paused=False)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_line(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()
        # Of a traceback the line of the error; of vLLM's the first, as others follow from it.
        errors = [line for line in lines if "Error" in line]
        return ((errors or lines or ["it printed nothing"])[-1]).strip()[-200:]


@dataclass(frozen=True, slots=True)
class Variant:
    """One row: a server of its own, and what its requests say of speculation. ``kind``: of ours, the number format."""

    name: str
    server: Server
    fields: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""

    def body(self, messages: Seq[Mapping[str, str]], salt: str, common: Mapping[str, Any]) -> dict[str, Any]:
        """A request. ``salt``: a name for this run of the conversation, unlike that of any other run."""
        name = f"{self.name} {salt}".replace("/", ":")  # vLLM takes no slash
        own = {} if self.server.salt is None else {self.server.salt: name}
        return {"model": self.server.model, "messages": list(messages), **common, **self.fields, **own}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the servers are to be. ``gguf``: the file for llama.cpp; ``folder``: the weights for vLLM, in bfloat16."""

    model: str
    threads: int
    users: int
    context: int
    methods: Seq[str]
    dtypes: Seq[str]
    folder: str
    gguf: str | None
    gguf_kind: str
    vllm: str | None
    vllm_kv_gib: int
    serve: Seq[str]
    """More options of ``outpace serve``."""


def ours(wanted: Wanted) -> list[Variant]:
    """A server for each dtype and method, so that they can take turns within an answer; requests name the method."""
    found = []
    for dtype, method in product(wanted.dtypes, wanted.methods):
        url, port = _free_url()
        command = [sys.executable, "-m", "outpace", "serve", "--model", wanted.model, "--port", port]
        command += ["--dtype", dtype, "--threads", str(wanted.threads), "--max-batch", str(wanted.users)]
        command += ["--max-queue", "4096", *wanted.serve]
        around = environment(wanted.threads, foreign=False, offline=False)
        name = f"outpace {dtype} {method}"
        server = Server(name, command, around, wanted.model, "shared_prefix", url)
        found.append(Variant(name, server, {"speculation": speculation(method)}, dtype))
    return found


def speculation(method: str) -> dict[str, Any]:
    """What a request says for ``METHOD`` or ``METHOD:KEY=VALUE:...``. A length or a number of nodes that is given is
    drafted in every round, whatever it costs."""
    name, *given = method.split(":")
    if name == "none":
        return {"off": True}
    params = {key: _json(text) for key, text in key_values(f"--methods METHOD:KEY=VALUE ('{method}')", given).items()}
    return {"method": name, "params": params} if params else {"method": name}


def _json(text: str) -> Any:
    """A number, true, false or null as such; a word as a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def vllm(wanted: Wanted) -> Variant:
    """vLLM's own server for the CPU, from the environment of ``make peers``."""
    assert wanted.vllm is not None
    url, port = _free_url()
    command = [wanted.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", wanted.folder, "--port", port]
    command += ["--host", "127.0.0.1", "--served-model-name", wanted.model, "--dtype", "bfloat16"]
    command += ["--max-num-seqs", str(wanted.users), "--max-model-len", str(wanted.context)]
    around = environment(wanted.threads, foreign=True, offline=True) | {
        "VLLM_CPU_KVCACHE_SPACE": str(wanted.vllm_kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as in bench-peers: bound threads wait for each other on a busy core
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return Variant("vllm bfloat16", Server("vllm", command, around, wanted.model, "cache_salt", url))


def llama_cpp(wanted: Wanted) -> Variant:
    """llama-cpp-python's server, with the file's own format. It decodes one request at a time."""
    assert wanted.gguf is not None
    url, port = _free_url()
    command = [sys.executable, "-m", "llama_cpp.server", "--model", wanted.gguf, "--model_alias", wanted.model]
    command += ["--host", "127.0.0.1", "--port", port, "--n_ctx", str(wanted.context), "--logits_all", "false"]
    command += ["--n_threads", str(wanted.threads), "--n_threads_batch", str(wanted.threads)]
    # Otherwise a second request ends the first.
    command += ["--interrupt_requests", "false", "--verbose", "false"]
    around = environment(wanted.threads, foreign=False, offline=True)
    server = Server("llama-cpp", command, around, wanted.model, None, url, note="one request at a time")
    return Variant(f"llama-cpp {wanted.gguf_kind}", server)


class Running:
    """Starts the servers of some rows and ends them all. A server that does not start is left out, with its reason."""

    def __init__(self, variants: Seq[Variant], patience: float) -> None:
        self._wanted, self._patience = variants, patience
        self.variants: list[Variant] = []
        self.skipped: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            for server in (one.server for one in self._wanted):
                try:
                    server.start(self._patience)
                except NotStarted as error:
                    self.skipped[server.name] = str(error)
                    server.stop()
            self.variants = [one for one in self._wanted if one.server.name not in self.skipped]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for one in self._wanted:
            one.server.stop()

    def give_turn(self, server: Server) -> None:
        """Let one server go on, and stop the others."""
        for one in self.variants:
            one.server.pause(paused=one.server is not server)

    def go_on(self) -> None:
        """Let all servers go on."""
        for one in self.variants:
            one.server.pause(paused=False)


def _free_url() -> tuple[str, str]:
    """An address that is free now, and its port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return f"http://127.0.0.1:{port}", str(port)


def _answers(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def check_free(variants: Seq[Variant]) -> None:
    """Raise BadInput where there is nothing to measure."""
    if not variants:
        raise BadInput("no server is left to measure; name others with --servers, or run make peers")
