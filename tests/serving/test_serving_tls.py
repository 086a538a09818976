"""HTTPS by the server itself, with a certificate that is made here."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from live_support import live
from outpace.core.errors import BadInput
from outpace.serving.tls import certificate
from serving_support import service

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def make(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    words += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(chain), "-keyout", str(key)]
    subprocess.run([*words, *(more or ("-nodes",))], check=True, capture_output=True)
    return chain, key


def test_the_server_speaks_https(tmp_path: Path) -> None:
    chain, key = make(tmp_path, "one")
    found = certificate(chain, key)
    assert found is not None
    with live(service(), ssl_certfile=found.chain, ssl_keyfile=found.key) as where:
        answer = httpx.get(
            f"{where.replace('http:', 'https:')}/ready", verify=ssl.create_default_context(cafile=str(chain))
        )
        assert answer.status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{where}/ready")


def test_pairs_that_do_not_fit(tmp_path: Path) -> None:
    (chain, key), (_, other) = make(tmp_path, "one"), make(tmp_path, "other")
    _, locked = make(tmp_path, "locked", "-passout", "pass:sesame")
    for given, said in (((chain, other), "mismatch"), ((key, chain), "no certificate"), ((chain, locked), "password")):
        with pytest.raises(BadInput, match=said):
            certificate(*given)
    assert certificate(None, None) is None
