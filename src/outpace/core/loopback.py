"""HTTP requests to this machine and to others: a proxy of the environment (``http_proxy``) is for others alone."""

from __future__ import annotations

import ipaddress
import urllib.request
from typing import Any
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Whether an address is of this machine, as far as its host says so. 0.0.0.0, which servers listen on, is."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def urlopen(request: urllib.request.Request | str, timeout: float, *, ours: bool = False) -> Any:
    """``urllib.request.urlopen``, without a proxy for this machine. ``ours``: the address, whatever it is, is of a
    process that we started."""
    url = request if isinstance(request, str) else request.full_url
    if ours or is_loopback(url):
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout)
    return urllib.request.urlopen(request, timeout=timeout)
