"""``outpace serve``: what is refused before it serves, in one line and with exit code 2."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_support import Run, refused, runner


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_port_in_use(run: Run, taken: int) -> None:
    refused(run("serve", "--port", str(taken)), f"port {taken}", "in use", "--port")


def test_unknown_models_and_names(run: Run) -> None:
    refused(run("serve", "--model", "./nowhere"), "nowhere")
    refused(run("serve", "--model", "smollm2", "--model", "smollm2"), "twice")
    refused(run("serve", "--model", ""), "name is empty")
    refused(run("serve", "--draft-model", "./nowhere"), "unknown model './nowhere'")
    refused(run("serve", "--head", "./nowhere"), "no head at 'nowhere'")
    refused(run("serve", "--datastore", "./nowhere"), "datastore 'nowhere'")
    refused(run("serve", "--rule", "none such"), "unknown acceptance rule 'none such'")
    refused(run("serve", "--method", "plx"), "unknown method 'plx'", "'pld'")
    refused(run("serve", "--host", "no.such.host.invalid"), "--host")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--port", "70000", "between 0 and 65535"),
        ("--max-batch", "0", "at least 1"),
        ("--max-queue", "-1", "at least 0"),
        ("--kv-bytes", "0", "at least 1"),
        ("--prefix-cache-bytes", "-1", "at least 0"),
        ("--max-request-bytes", "0", "at least 1"),
        ("--max-validity-nodes", "0", "at least 1"),
        ("--time-limit", "0", "above 0"),
        ("--time-limit", "nan", "above 0"),
        ("--goodput", "ttfb:5", "ttft:MS"),
        ("--goodput", "ttft:-5", "ttft:MS"),
        ("--api-keys", "nowhere", "No such file"),
        ("--threads", "100000", "--threads"),
        ("--host", "", "--host is empty"),
        ("--host", "203.0.113.7", "--host must be an address of this machine"),
        ("--cors-origin", "chat.example.com", "https://chat.example.com"),
        ("--cors-origin", "https://chat.example.com/", "scheme and host"),
        ("--ssl-certfile", "nowhere", "give both"),
        ("--param", "x=1", "x"),
    ],
)
def test_absurd_values(run: Run, option: str, value: str, said: str) -> None:
    refused(run("serve", option, value), option, said)


def test_no_memory_for_keys_and_values(run: Run) -> None:
    refused(run("serve", "--port", "0", "--kv-bytes", str(10**18)), "--kv-bytes", "are free")


def test_a_bound_that_holds_no_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.targets.table import TableTarget

    monkeypatch.setattr(TableTarget, "kv_bytes_per_token", 100)
    refused(run("serve", "--port", "0", "--kv-bytes", "5000"), "5,000 bytes hold no request", "12,800")


def test_a_cache_of_prompts_is_a_part_of_the_memory_for_keys_and_values(run: Run) -> None:
    ran = run("serve", "--port", "0", "--kv-bytes", "1000000", "--prefix-cache-bytes", "1000001")
    refused(ran, "--prefix-cache-bytes 1,000,001", "1,000,000")


def test_a_port_that_needs_privileges(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", bind)
    refused(run("serve", "--port", "80"), "port 80", "Permission denied", "below 1024")


def test_keys_that_cannot_be_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(run("serve", "--api-keys", str(tmp_path)), "--api-keys", "Is a directory")
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann")
    keys.chmod(0)
    if not os.access(keys, os.R_OK):  # everything is readable for the superuser
        refused(run("serve", "--api-keys", str(keys)), "--api-keys", "Permission denied")
    monkeypatch.setattr("outpace.serving.tenants._LONGEST_FILE", 10)
    keys.chmod(0o600)
    refused(run("serve", "--api-keys", str(keys)), "--api-keys", "longer than 10 characters")


def test_certificates_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no certificate")
    refused(run("serve", "--ssl-certfile", "nowhere", "--ssl-keyfile", str(text)), "--ssl-certfile", "No such file")
    refused(run("serve", "--ssl-certfile", str(text), "--ssl-keyfile", str(text)), "no certificate and its key")


def test_texts_in_the_log_need_the_log(run: Run) -> None:
    refused(run("serve", "--log-texts"), "--log-requests")


def test_bad_keys_are_not_repeated(run: Run, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann sesame\nbob")
    ran = run("serve", "--api-keys", str(tmp_path / "keys"))
    refused(ran, "line 2")
    assert "sesame" not in ran.err


def test_without_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.startswith("outpace.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    refused(run("serve"), "pip install 'outpace[serve]'")
