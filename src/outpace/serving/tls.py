"""Certificate: what the server needs to speak HTTPS itself."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from outpace.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files: the server's certificate with those that sign it, and its private key."""

    chain: Path
    key: Path

    def check(self) -> None:
        """Raise BadInput for files that cannot be used."""
        for option, path in (("--ssl-certfile", self.chain), ("--ssl-keyfile", self.key)):
            try:
                path.open("rb").close()
            except OSError as error:
                raise BadInput(f"{option} {path}: {error.strerror}") from None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.chain, self.key, _no_password)
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or "not in PEM form"
            raise BadInput(
                f"--ssl-certfile {self.chain}, --ssl-keyfile {self.key}: they are no certificate and its key in PEM "
                f"form ({str(reason).lower().replace('_', ' ')})"
            ) from None


def certificate(chain: Path | None, key: Path | None) -> Certificate | None:
    """The certificate that two options name, checked; None without. Raises BadInput."""
    if chain is None and key is None:
        return None
    if chain is None or key is None:
        raise BadInput("--ssl-certfile and --ssl-keyfile belong together; give both")
    found = Certificate(chain, key)
    found.check()
    return found


def _no_password() -> str:
    raise BadInput("--ssl-keyfile: the key is encrypted with a password; give a key without one")
