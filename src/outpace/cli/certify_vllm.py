"""``outpace certify --engine vllm``: starts vLLM with speculation and without, and compares the two servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outpace.cli.session import Drafting, Machine
from outpace.core.errors import BadInput
from outpace.methods.default_method import DEFAULT_METHOD

if TYPE_CHECKING:
    from outpace.integrations.vllm.command import Launch

_REQUESTS = 16
"""Decoded together, as many as one request of the certificate asks for."""
_KV_BYTES = 2**29
"""Of each server, where --engine-arg does not say otherwise."""


@contextmanager
def two_servers(
    python: str | None, method: str | None, machine: Machine, drafting: Drafting, arguments: list[str] | None
) -> Iterator[tuple[str, str, int]]:
    """Addresses of a server that drafts and of one that does not, and the draft length. They end with the context.

    ``method`` None: the one that is best for the model. Raises BadInput for what vLLM cannot draft with, EngineFailed
    where it does not start.
    """
    from outpace.cli.serve_vllm import Engine, Served, launch_for

    engine = Engine("vllm", python, max_model_len=2048, engine_arg=arguments)
    served = Served([machine.model], "127.0.0.1", 0, _REQUESTS, _KV_BYTES)
    machine.check()
    start = launch_for(engine, served, method or DEFAULT_METHOD, drafting, machine)
    config = start.speculation.config
    if config is None:
        raise BadInput("--engine vllm: method none drafts nothing; name another METHOD, or a head")
    with _running(start) as endpoint:
        plain = launch_for(engine, served, "none", Drafting(), machine)
        with _running(plain) as baseline:
            yield endpoint, baseline, int(config["num_speculative_tokens"])


@contextmanager
def _running(start: Launch) -> Iterator[str]:
    from outpace.integrations.vllm.server import Server

    server = Server(start)
    try:
        server.wait_until_ready()
        yield server.url
    finally:
        server.close()
