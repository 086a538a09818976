"""``outpace serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli import options as opt
from outpace.cli.grouping import grouped
from outpace.cli.options import option
from outpace.cli.serve_checks import check_least, check_origin, check_service, check_trace, lossless_settings
from outpace.cli.serve_vllm import Engine, Served, check_launch, serve_vllm
from outpace.cli.service_options import MAX_BATCH, ServiceOptions
from outpace.cli.session import Drafting, Hardware
from outpace.core.errors import BadInput, MissingExtra
from outpace.core.future_validity import MAX_VALIDITY_NODES
from outpace.methods.default_method import DEFAULT_METHOD

if TYPE_CHECKING:
    from outpace.serving.service import Service

SERVER, LIMITS, REPLICAS = "Server", "Limits", "Replicas"


@grouped()
def serve(
    model: Annotated[
        list[str] | None,
        option(
            "--model",
            "-m",
            value="NAME",
            text="Model to serve: Hub id, folder, GGUF file, or 'smollm2' (embedded). Requests name it as here. "
            "Repeat the option to serve several models. [dim]\\[default: smollm2][/]",
        ),
    ] = None,
    host: Annotated[
        str,
        option(
            value="HOST",
            panel=SERVER,
            text="Address to listen on. 0.0.0.0 listens on all network interfaces; then also give --api-keys.",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, option(value="N", panel=SERVER, text="Port to listen on; 0 picks a free port.")] = 8000,
    api_keys: Annotated[
        Path | None,
        option(
            value="FILE",
            panel=SERVER,
            text="File of API keys: a line 'NAME KEY' for each tenant, or JSON with limits (docs/serving.md). "
            "[dim]\\[default: requests need no key][/]",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        option(
            value="ORIGIN",
            panel=SERVER,
            text="Allow web pages of this origin (https://HOST) to use the server; may be repeated. "
            "[dim]\\[default: none][/]",
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        option(value="FILE", panel=SERVER, text="Serve HTTPS with this certificate (PEM, with intermediate ones)."),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, option(value="FILE", panel=SERVER, text="Private key of --ssl-certfile (PEM, no password).")
    ] = None,
    log_requests: Annotated[
        bool, option("--log-requests", panel=SERVER, text="Write a JSON line for each request to standard error.")
    ] = False,
    log_texts: Annotated[
        bool, option("--log-texts", panel=SERVER, text="Include prompts and answers in the lines of --log-requests.")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        option(
            value="KEY:MS",
            panel=SERVER,
            text="Latency bound for the goodput metrics: ttft (time to first token), tpot (time per output token) or "
            "e2e (whole request), in milliseconds; may be repeated.",
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        option(
            value="N",
            panel=LIMITS,
            text="Maximum number of requests decoded together, for each model. [dim]\\[default: 8; other engines: "
            "their own][/]",
        ),
    ] = None,
    max_queue: Annotated[
        int,
        option(
            value="N",
            panel=LIMITS,
            text="Maximum number of waiting requests, for each model. Further requests get status 429.",
        ),
    ] = 256,
    kv_bytes: Annotated[
        int | None,
        option(
            value="N",
            panel=LIMITS,
            text="Memory for keys and values of all requests to a model, in bytes. "
            "[dim]\\[default: half of the free memory, divided among the models][/]",
        ),
    ] = None,
    prefix_cache_bytes: Annotated[
        int | None,
        option(
            value="N",
            panel=LIMITS,
            text="Part of --kv-bytes that may hold cached prompts; 0 turns the cache off. [dim]\\[default: half][/]",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        option(
            value="S",
            panel=LIMITS,
            text="Maximum time of a request in seconds, waiting included. Longer requests get status 504. "
            "[dim]\\[default: none][/]",
        ),
    ] = None,
    max_request_bytes: Annotated[
        int,
        option(value="N", panel=LIMITS, text="Maximum size of a request's body in bytes. Larger ones get status 413."),
    ] = 4 * 1024 * 1024,
    max_validity_nodes: Annotated[
        int,
        option(
            value="N",
            panel=LIMITS,
            text="Maximum max_nodes of a request's constraint_weighting: beginnings of answers that are scored for it.",
        ),
    ] = MAX_VALIDITY_NODES,
    ray: Annotated[
        bool,
        option("--ray", panel=REPLICAS, text="Serve with replicas on Ray (docs/scaling.md); needs outpace\\[ray]."),
    ] = False,
    replicas: Annotated[
        str | None,
        option(
            value="N",
            panel=REPLICAS,
            text="With --ray: number of replicas, or MIN..MAX, where the queue decides. [dim]\\[default: 1][/]",
        ),
    ] = None,
    trace: opt.TraceFile = None,
    trace_texts: opt.TraceTexts = False,
    method: opt.MethodName = DEFAULT_METHOD,
    *,
    drafting: Drafting,
    grammars: opt.GrammarBounds,
    hardware: Hardware,
    engine: Engine,
) -> None:
    """Serve models over HTTP with OpenAI's API, for many users at once.

    Prints 'ready: URL' on standard error when it accepts requests. SIGTERM or Ctrl-C lets running requests finish.
    """
    foreign: dict[str, Any] = {
        "--log-texts": log_texts,
        "--goodput": goodput,
        "--prefix-cache-bytes": prefix_cache_bytes,
        "--trace": trace,
    }
    names = model or ["smollm2"]
    served = Served(names, host, port, max_batch, kv_bytes)
    check_least(max_batch=(max_batch, 1), max_queue=(max_queue, 0), kv_bytes=(kv_bytes, 1))
    if replicas is not None and not ray:
        raise BadInput("--replicas needs --ray, which runs the replicas")
    if engine.other and not ray:
        foreign |= {
            **{"--api-keys": api_keys, "--cors-origin": cors_origin, "--ssl-certfile": ssl_certfile},
            **{"--ssl-keyfile": ssl_keyfile, "--log-requests": log_requests, "--time-limit": time_limit},
        }
        serve_vllm(engine, served, method, drafting, hardware, unsupported=foreign)
        return
    engine.check_unused()
    try:
        import prometheus_client  # noqa: F401

        from outpace.serving.app import build_app
        from outpace.serving.server import check_address, open_socket, run, url
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("outpace"):
            raise
        raise MissingExtra("outpace serve", "serve") from None
    from outpace.serving.metrics import read_bounds
    from outpace.serving.tenants import Tenants, read_keys
    from outpace.serving.tls import certificate

    check_service(names, port, time_limit)
    check_trace(trace, trace_texts, names, ray=ray)
    if log_texts and not log_requests:
        raise BadInput("--log-texts adds to the lines of --log-requests; give that too")
    check_least(
        prefix_cache_bytes=(prefix_cache_bytes, 0),
        max_request_bytes=(max_request_bytes, 1),
        max_validity_nodes=(max_validity_nodes, 1),
    )
    read_bounds(goodput or ())
    tls = certificate(ssl_certfile, ssl_keyfile)
    for origin in cors_origin or ():
        check_origin(origin)
    keys = None if api_keys is None else read_keys(api_keys)
    for name in names:
        hardware.check(name)
    settings = lossless_settings(drafting, method, files=not engine.other)  # others take a head by its kind too
    check_address(host, port)
    options = ServiceOptions(
        tuple(names),
        hardware,
        drafting,
        settings,
        tuple(goodput or ()),
        log_requests,
        log_texts,
        max_batch or MAX_BATCH,
        max_queue,
        kv_bytes,
        prefix_cache_bytes,
        time_limit,
        grammars.limits,
        max_validity_nodes,
    )
    if ray:
        from outpace.cli.serve_ray import Replication, serve_replicas

        replication = Replication.checked(engine, sys.argv[1:], options, max_batch, replicas or "1")
        replication.check_fits()
        # What every replica would refuse is refused here, and a head is exported once.
        check_launch(engine, served, method, drafting, hardware, unsupported=foreign)
        ended = serve_replicas(replication, host, port, keys, tls, cors_origin or (), max_request_bytes)
    else:
        service = options.open(Tenants(keys))
        _write_trace(service, names[0], trace, texts=trace_texts)
        app = build_app(service, most_bytes=max_request_bytes, origins=cors_origin or ())
        listening = open_socket(host, port)
        where = url(listening, host, "http" if tls is None else "https")
        ended = run(
            app, service, listening, lambda: print(f"ready: {where}", file=sys.stderr, flush=True), tls, options.callers
        )
    if not ended:
        raise typer.Exit(opt.INTERRUPTED)


def _write_trace(service: Service, name: str, path: Path | None, *, texts: bool) -> None:
    """Let the server write each request when it has ended, if that was asked for."""
    if path is None:
        return
    from outpace.traces.trace_records import header_of
    from outpace.traces.trace_writer import TraceLog

    model = service.offered[name].model
    limits = model.shared.limits
    header = header_of(model, "serve", at_once=limits.max_batch, closed=False, texts=texts, kv_bytes=limits.kv_bytes)
    service.trace = TraceLog(path, header, model.tokenizer if texts else None)
