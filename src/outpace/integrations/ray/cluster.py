"""Ray itself: whether it is installed and of a version that is known to work, and a cluster to run on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from outpace.core.errors import BadInput, MissingExtra, shortened
from outpace.core.machine import usable_cpus

LEAST, BELOW = (2, 60), (2, 64)
"""Versions of Ray that are accepted. The routers of Ray Serve are a young API, and 2.64 is announced to take from Ray
Data the arguments that bound the retries of a worker's task."""
ADDRESS_VARIABLE = "RAY_ADDRESS"
_OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""For the messages of replies, which are small; of a cluster that is started here."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",  # lines of requests that differ in their numbers alone are no copies of each other
    "RAY_COLOR_PREFIX": "0",  # the log may be a file
}
"""Read by Ray, in part when it is imported. What the user has set stays."""


def require_ray(what: str) -> None:
    """Raise BadInput, with the command that installs it, where Ray is missing or of another version."""
    _set_environment()
    try:
        from ray import __version__ as version
    except ImportError:  # also where a folder named ray is in the way
        raise MissingExtra(what, "ray") from None
    check_version(what, version)
    try:
        for part in ("ray.data", "ray.serve", "ray.serve.request_router"):
            import_module(part)
    except ModuleNotFoundError:
        raise MissingExtra(what, "ray") from None


def check_version(what: str, version: str) -> None:
    """Raise BadInput for a version of Ray that is not known to work."""
    parts = version.split(".")
    found = tuple(int(part) for part in parts[:2] if part.isdecimal())
    if not LEAST <= found < BELOW:
        raise BadInput(
            f"{what} needs Ray {LEAST[0]}.{LEAST[1]} or newer, below {BELOW[0]}.{BELOW[1]}, and Ray {version} is "
            "installed: pip install 'outpace[ray]'"
        )


def check_fits(replicas: int, threads: int) -> None:
    """Raise BadInput for more replicas than this machine has CPUs for; in a cluster, Ray decides."""
    have = usable_cpus()
    if not in_cluster() and replicas * threads > have:
        raise BadInput(
            f"{replicas} replicas of {threads} thread{'s' if threads > 1 else ''} need {replicas * threads} CPUs, and "
            f"this machine has {have}; give fewer --replicas or --threads, or the address of a Ray cluster in "
            f"{ADDRESS_VARIABLE}"
        )


def in_cluster() -> bool:
    """Whether a running cluster is used: its address is in the environment."""
    return bool(os.environ.get(ADDRESS_VARIABLE))


def _set_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def connected() -> Iterator[None]:
    """Ray, connected to the cluster of ``RAY_ADDRESS``, or to one that lives on this machine as long as the context.

    Raises BadInput where there is no cluster at that address.
    """
    _set_environment()
    import ray

    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    about = {"logging_level": logging.ERROR, "log_to_driver": True}
    try:
        if in_cluster():
            ray.init(**about)
        else:
            ray.init(
                address="local",
                num_cpus=usable_cpus(),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                **about,
            )
    except Exception as error:  # a slow machine makes Ray raise an Exception of no other type
        where = os.environ.get(ADDRESS_VARIABLE, "this machine")
        raise BadInput(
            f"Ray could not be reached or started ({ADDRESS_VARIABLE}: {where}): {shortened(str(error))}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
