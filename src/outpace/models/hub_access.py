"""The model hub: whether it can be reached, and what to say of a name that it does not have."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from outpace.models.source import EMBEDDED, did_you_mean

_PATIENCE = 3.0  # seconds to find out that there is no network


def hub_answers() -> bool:
    """Whether the hub can be reached; its client would retry for half a minute without a network."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    address = urlsplit(constants.ENDPOINT)
    if address.scheme in getproxies():
        return True  # only the proxy knows
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), _PATIENCE).close()
    except OSError:
        return False
    return True


def not_on_hub(name: str, offline: bool) -> str:
    """What to say of a model that the hub does not have, or that cannot be asked for ``offline``."""
    known = f"give a folder, a .gguf file or {' or '.join(EMBEDDED)}{did_you_mean(name)}"
    if offline:
        return f"unknown model '{name}': not found on this machine, and the model hub cannot be reached; {known}"
    return f"unknown model '{name}': the model hub has no model of this name that you may read; {known}"
