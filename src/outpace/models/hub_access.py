"""The model hub: whether it can be reached, and what to say of a name that it does not have."""

from __future__ import annotations

import socket
from collections.abc import Iterator
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


def not_on_hub(name: str, offline: bool, error: BaseException | None = None) -> str:
    """What to say of a model that the hub does not give, or that cannot be asked for ``offline``.

    ``error``: what the hub's client or transformers raised; its causes tell what is wrong with the model.
    """
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError

    known = f"give a folder, a .gguf file or {' or '.join(EMBEDDED)}{did_you_mean(name)}"
    if offline:
        return f"unknown model '{name}': not found on this machine, and the model hub cannot be reached; {known}"
    causes = list(_causes(error))
    if any(isinstance(one, GatedRepoError) for one in causes):
        return (
            f"the model hub gives '{name}' only to those who have accepted its terms: accept them on the model's page, "
            "and log in with 'hf auth login'"
        )
    if any(isinstance(one, EntryNotFoundError) and not isinstance(one, LocalEntryNotFoundError) for one in causes):
        return (
            f"'{name}' on the model hub has no config.json, so it is no model that transformers reads; "
            "if it has .gguf files, download one and give its path"
        )
    return f"unknown model '{name}': the model hub has no model of this name that you may read; {known}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
