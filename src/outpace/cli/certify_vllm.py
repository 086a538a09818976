"""``outpace certify --engine vllm``: starts vLLM with speculation and without, and compares the two servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli.session import Drafting, Machine
from outpace.core.errors import BadInput
from outpace.core.files import read_json
from outpace.methods.default_method import DEFAULT_METHOD

if TYPE_CHECKING:
    from outpace.integrations.vllm.command import Launch

_REQUESTS = 16
"""Decoded together, as many as one request of the certificate asks for."""
_CONTEXT = 2048
"""Tokens, of models that have as many."""
_KV_BYTES = 2**29
"""Of each server, where --engine-arg does not say otherwise."""


@contextmanager
def two_servers(
    python: str | None,
    method: str | None,
    machine: Machine,
    drafting: Drafting,
    arguments: list[str] | None,
    *,
    plugin: bool = True,
) -> Iterator[tuple[str, str, int]]:
    """Addresses of a server that drafts and of one that does not, and the draft length. They end with the context.

    ``method`` None: the one that is best for the model. Raises BadInput for what vLLM cannot draft with, EngineFailed
    where it does not start.
    """
    from outpace.cli.serve_vllm import Engine, Served, launch_for

    engine = Engine("vllm", python, max_model_len=_CONTEXT, engine_arg=arguments)
    served = Served([machine.model], "127.0.0.1", 0, _REQUESTS, _KV_BYTES)
    machine.check()
    start = launch_for(engine, served, method or DEFAULT_METHOD, drafting, machine)
    config = start.speculation.config
    if config is None:
        raise BadInput("--engine vllm: method none drafts nothing; name another METHOD, or a head")
    if not plugin and start.speculation.plugin is not None:
        raise BadInput(f"--no-plugin: the plug-in drafts for method '{start.speculation.method}'; name another METHOD")
    with _running(_adapted(start, plugin=plugin)) as endpoint:
        plain = launch_for(engine, served, "none", Drafting(), machine)
        with _running(_adapted(plain, plugin=plugin)) as baseline:
            yield endpoint, baseline, int(config["num_speculative_tokens"])


def _adapted(start: Launch, *, plugin: bool) -> Launch:
    """The same server for a model with a shorter context, and without the plug-in if so asked."""
    config = Path(start.options.model) / "config.json"
    context = read_json(config).get("max_position_embeddings") if config.is_file() else None
    if isinstance(context, int) and 0 < context < _CONTEXT:
        start.command[start.command.index("--max-model-len") + 1] = str(context)
    if not plugin:
        start.variables.pop("PYTHONPATH", None)
    return start


@contextmanager
def _running(start: Launch) -> Iterator[str]:
    from outpace.integrations.vllm.server import Server

    server = Server(start)
    try:
        server.wait_until_ready()
        yield server.url
    finally:
        server.close()
