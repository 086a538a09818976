"""The server as an application that a configuration file of Ray Serve names: ``outpace.cli.ray_app:app``.

``args`` of the file: ``options``, those of ``outpace serve``, and ``replicas``, N or MIN..MAX. Ray Serve's proxy takes
the requests; the ingress is a deployment of its own in front of the replicas (deploy/rayservice.yaml).
"""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

import typer

from outpace.cli.options import GrammarBounds
from outpace.cli.serve_checks import lossless_settings
from outpace.cli.serve_vllm import Engine
from outpace.cli.service_options import MAX_BATCH, ServiceOptions
from outpace.cli.session import Drafting, Hardware
from outpace.core.errors import BadInput

_OF_THE_PROXY = ("host", "port", "ssl_certfile", "ssl_keyfile", "ray", "replicas")
"""Options of ``outpace serve`` that Ray Serve's configuration decides."""


def app(args: dict[str, Any]) -> Any:
    """The application. Raises BadInput for arguments and options that do not exist.

    Whether the replicas fit is the cluster's to decide: the machine that builds the application is one of many.
    """
    from outpace.cli.serve_ray import Replication
    from outpace.integrations.ray.ingress_deployment import ingress_application

    unknown = sorted(set(args) - {"options", "replicas"})
    if unknown:
        raise BadInput(f"args has no '{unknown[0]}'; it may have: options, replicas")
    given, replicas = str(args.get("options", "")), str(args.get("replicas", "1"))
    params = parsed(given)
    arguments = ["serve", *shlex.split(given)]
    options = service_options(params)
    replication = Replication.checked(Engine(params["engine"]), arguments, options, params["max_batch"], replicas)
    return ingress_application(
        replication.open_engine,
        replication.how,
        api_keys=params["api_keys"],
        log_requests=params["log_requests"],
        time_limit=params["time_limit"],
        most_bytes=params["max_request_bytes"],
        origins=tuple(params["cors_origin"] or ()),
    )


def parsed(options: str) -> dict[str, Any]:
    """Options of ``outpace serve``, by name. Raises BadInput for those that are wrong, or not for a replica."""
    from outpace.cli import app as commands

    command: Any = typer.main.get_command(commands)
    context = command.commands["serve"].make_context("serve", shlex.split(options))
    for name in _OF_THE_PROXY:
        if context.get_parameter_source(name).name != "DEFAULT":
            raise BadInput(f"--{name.replace('_', '-')}: the configuration of Ray Serve decides that; leave it out")
    found: dict[str, Any] = context.params
    return found


def service_options(params: dict[str, Any]) -> ServiceOptions:
    """What the replicas load."""
    hardware = Hardware(**{one.name: params[one.name] for one in fields(Hardware)})
    drafting = Drafting(**{one.name: params[one.name] for one in fields(Drafting)})
    names = (
        "log_requests",
        "log_texts",
        "max_queue",
        "kv_bytes",
        "prefix_cache_bytes",
        "time_limit",
        "max_validity_nodes",
    )
    return ServiceOptions(
        tuple(params["model"] or ["smollm2"]),
        hardware,
        drafting,
        lossless_settings(drafting, params["method"]),
        tuple(params["goodput"] or ()),
        max_batch=params["max_batch"] or MAX_BATCH,
        grammar_limits=GrammarBounds(**{one.name: params[one.name] for one in fields(GrammarBounds)}).limits,
        **{name: params[name] for name in names},
    )
