"""``outpace serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli import options as opt
from outpace.cli.grouping import grouped
from outpace.cli.options import option
from outpace.cli.session import Drafting, Hardware
from outpace.core.errors import BadInput, MissingExtra
from outpace.core.machine import free_memory

if TYPE_CHECKING:
    from outpace.model import Model

SERVER, BOUNDS = "Server", "Bounds"
_KV_SHARE = 0.5
"""Of the memory that is free when the models have been loaded: for K/V, where no bound is given."""
_PREFIX_SHARE = 0.5
"""Of the bound on K/V: for cached beginnings of prompts, where no bound is given for them."""


@grouped()
def serve(
    model: Annotated[
        list[str] | None,
        option(
            "--model",
            "-m",
            value="NAME",
            text="Hub id, folder, GGUF file, or 'smollm2' (embedded); its id in the API is this name. May be repeated. "
            "[dim]\\[default: smollm2][/]",
        ),
    ] = None,
    host: Annotated[
        str, option(value="HOST", panel=SERVER, text="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, option(value="N", panel=SERVER, text="Port to listen on; 0 takes a free one.")] = 8000,
    api_keys: Annotated[
        Path | None,
        option(
            value="FILE",
            panel=SERVER,
            text="API keys: a line 'NAME KEY' for each tenant, or JSON with limits (docs/serving.md). "
            "[dim]\\[default: no key is needed][/]",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        option(
            value="ORIGIN",
            panel=SERVER,
            text="Let web pages of this origin use the server; may be repeated. [dim]\\[default: none][/]",
        ),
    ] = None,
    log_requests: Annotated[
        bool, option("--log-requests", panel=SERVER, text="Write a JSON line for each request to standard error.")
    ] = False,
    log_texts: Annotated[
        bool, option("--log-texts", panel=SERVER, text="With --log-requests: with prompts and answers.")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        option(
            value="KEY:MS",
            panel=SERVER,
            text="Latency bound of an answer that counts for goodput: ttft, tpot or e2e, in milliseconds; may be "
            "repeated.",
        ),
    ] = None,
    max_batch: Annotated[
        int, option(value="N", panel=BOUNDS, text="Requests of a model that are decoded together.")
    ] = 8,
    max_queue: Annotated[
        int, option(value="N", panel=BOUNDS, text="Requests of a model that may wait; others get status 429.")
    ] = 256,
    kv_bytes: Annotated[
        int | None,
        option(
            value="N",
            panel=BOUNDS,
            text="Bytes for keys and values of a model's requests. [dim]\\[default: half of the free memory][/]",
        ),
    ] = None,
    prefix_cache_bytes: Annotated[
        int | None,
        option(
            value="N",
            panel=BOUNDS,
            text="Of these, bytes for cached beginnings of prompts; 0 is off. [dim]\\[default: half][/]",
        ),
    ] = None,
    time_limit: Annotated[
        float | None, option(value="S", panel=BOUNDS, text="Seconds after which a request ends with status 504.")
    ] = None,
    max_request_bytes: Annotated[
        int, option(value="N", panel=BOUNDS, text="Most bytes of a request's body; larger ones get status 413.")
    ] = 4 * 1024 * 1024,
    method: opt.MethodName = "auto",
    *,
    drafting: Drafting,
    hardware: Hardware,
) -> None:
    """Serve models over HTTP with OpenAI's API, for many users at once. SIGTERM finishes what is under way."""
    try:
        import prometheus_client  # noqa: F401

        from outpace.serving.app import build_app
        from outpace.serving.server import check_address, open_socket, run, url
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("outpace"):
            raise
        raise MissingExtra("outpace serve", "serve") from None
    from outpace.core.sampling import SamplingParams
    from outpace.serving.logs import Log
    from outpace.serving.metrics import read_bounds
    from outpace.serving.service import Defaults, Service
    from outpace.serving.tenants import Tenants, read_keys

    names = model or ["smollm2"]
    _check(names, port, time_limit)
    if log_texts and not log_requests:
        raise BadInput("--log-texts adds to the lines of --log-requests; give that too")
    _check_least(max_batch=(max_batch, 1), max_queue=(max_queue, 0), kv_bytes=(kv_bytes, 1))
    _check_least(prefix_cache_bytes=(prefix_cache_bytes, 0), max_request_bytes=(max_request_bytes, 1))
    bounds = read_bounds(goodput or ())
    keys = None if api_keys is None else read_keys(api_keys)
    for name in names:
        hardware.check(name)
    drafting.check()
    settings = drafting.settings([method], SamplingParams())
    check_address(host, port)
    models = [hardware.load(name) for name in names]
    _limit(models, max_batch, max_queue, kv_bytes, prefix_cache_bytes)
    [(own, chosen)] = settings.items()
    defaults = Defaults(own, chosen, drafting.rule, drafting.load(hardware), time_limit)
    service = Service(models, Tenants(keys), defaults, Log(log_requests, log_texts), bounds)
    app = build_app(service, most_bytes=max_request_bytes, origins=cors_origin or ())
    listening = open_socket(host, port)
    where = url(listening, host)
    if not run(app, service, listening, lambda: print(f"ready: {where}", file=sys.stderr, flush=True)):
        raise typer.Exit(opt.INTERRUPTED)


def _check_least(**given: tuple[int | None, int]) -> None:
    for name, (value, least) in given.items():
        if value is not None and value < least:
            raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, not {value}")


def _check(names: list[str], port: int, time_limit: float | None) -> None:
    if len(set(names)) < len(names):
        raise BadInput("--model names the same model twice; a model's id in the API is its name")
    if not 0 <= port <= 65535:
        raise BadInput(f"--port must be between 0 and 65535, not {port}")
    if time_limit is not None and not (0 < time_limit < math.inf):
        raise BadInput(f"--time-limit must be a number of seconds above 0, not {time_limit:g}")


def _limit(models: list[Model], max_batch: int, max_queue: int, kv_bytes: int | None, prefix_bytes: int | None) -> None:
    """Give every model its bounds. Raises BadInput where memory does not hold them."""
    from outpace.engine.prefix_cache import PrefixCache
    from outpace.engine.scheduler import ROUND_ROWS, Limits
    from outpace.engine.shared_decoder import SharedDecoder

    free = free_memory()
    each = int(free * _KV_SHARE) // len(models) if kv_bytes is None else kv_bytes
    if each * len(models) > free:
        raise BadInput(
            f"--kv-bytes {each:,}: {free:,} bytes of memory are free for the K/V of {len(models)} "
            f"model{'s' if len(models) > 1 else ''}; give fewer"
        )
    for one in models:
        least = one.target.kv_bytes(None, 2 * ROUND_ROWS)
        if each < least:
            raise BadInput(
                f"--kv-bytes: {each:,} bytes hold no request to '{one.name}'; the least that is useful are {least:,}"
            )
        cached = int(each * _PREFIX_SHARE) if prefix_bytes is None else min(prefix_bytes, each)
        prefixes = PrefixCache(one.target, cached) if cached and one.target.kv_blocks else None
        one.shared = SharedDecoder(one.target, one.tokenizer, Limits(max_batch, max_queue, each), prefixes)
