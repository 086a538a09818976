"""The Dockerfile and the systemd unit agree with the command line, the Makefile, and what the server does."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer

from outpace.cli import app
from outpace.models.gguf_cache import CACHE_VARIABLE
from outpace.serving import server
from outpace.serving.app import build_app
from serving_support import service

ROOT = Path(__file__).parents[1]
DOCKERFILE, UNIT = ROOT / "deploy" / "Dockerfile", ROOT / "deploy" / "outpace.service"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def given(name: str) -> list[str]:
    return [rest for one, rest in instructions() if one == name]


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters of ``outpace serve`` with these options, which must all exist."""
    program, command, *options = words
    assert (Path(program).name, command) == ("outpace", "serve")
    serve: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    found: dict[str, Any] = serve.make_context("serve", list(options)).params
    return found


def unit() -> dict[str, list[str]]:
    """The unit's settings of [Service]."""
    found: dict[str, list[str]] = {}
    section = UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0]
    for line in section.splitlines():
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def makefile(name: str) -> str:
    found = re.search(rf"^{name} \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert found
    return found[1]


def test_the_container_starts_the_server_that_its_port_and_health_check_name() -> None:
    [entry], [command], [exposed], [health] = map(given, ("ENTRYPOINT", "CMD", "EXPOSE", "HEALTHCHECK"))
    options = parsed([*json.loads(entry), *json.loads(command)])
    assert options["host"] == "0.0.0.0"
    assert options["model"] == ["smollm2"]
    found = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", health)
    assert found
    assert [found[1], str(options["port"])] == [exposed] * 2
    assert found[2] in {getattr(route, "path", None) for route in build_app(service()).routes}
    code = json.loads(health.partition("CMD ")[2])[2]
    compile(code, "HEALTHCHECK", "exec")


def test_the_container_runs_as_a_user_who_owns_the_cache() -> None:
    names = [name for name, _ in instructions()]
    assert names.index("USER") < names.index("ENTRYPOINT")
    [user], [volume] = given("USER"), json.loads(given("VOLUME")[0])
    assert user != "root"
    assert f"{CACHE_VARIABLE}={volume}" in " ".join(given("ENV"))
    assert f"install -d -o {user} -g {user} {volume}" in " ".join(given("RUN"))


def test_the_container_installs_what_the_makefile_does() -> None:
    defaults = dict(one.split("=", 1) for one in given("ARG"))
    assert (defaults["TORCH"], defaults["MODEL"]) == (makefile("TORCH"), makefile("MODEL"))
    assert '".[$EXTRAS]"' in " ".join(given("RUN"))
    assert defaults["EXTRAS"] == "serve"


def test_what_the_container_copies_exists_and_suffices_to_build_the_package() -> None:
    copied = [one for rest in given("COPY") if not rest.startswith("--from") for one in rest.split()[:-1]]
    assert copied
    assert all((ROOT / one).exists() for one in copied)
    project = (ROOT / "pyproject.toml").read_text()
    needed = [
        *re.findall(r'^readme = "(.+)"', project, re.M),
        *re.findall(r'^license-files = \["(.+)"\]', project, re.M),
    ]
    assert {"pyproject.toml", "src", *needed} == set(copied)
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert all(f"!{one}" in ignored for one in copied)
    assert not any(fnmatch(one, pattern) for one in copied for pattern in ignored if pattern not in ("*", "#"))


def test_the_commands_of_the_container_s_build_are_shell() -> None:
    for command in given("RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)
        assert not re.search(r"\b(sudo|curl|wget)\b", command)
        assert "apt-get install" not in command or "--no-install-recommends" in command


def test_the_unit_s_options_exist_and_stopping_waits_for_the_longest_request() -> None:
    found = unit()
    [command] = found["ExecStart"]
    options = parsed(shlex.split(command.replace("$OUTPACE_OPTIONS", "--model smollm2 --port 8000")))
    assert options["time_limit"] + server.LAST_BYTES <= int(found["TimeoutStopSec"][0])
    [credential] = found["LoadCredential"]
    assert str(options["api_keys"]).endswith("/" + credential.partition(":")[0])
    assert found["Restart"] == ["on-failure"]
    assert found["RestartPreventExitStatus"] == ["2"]
    assert any(f"{CACHE_VARIABLE}=%C/{found['CacheDirectory'][0]}" in one for one in found["Environment"])


def test_the_unit_shuts_out_what_the_server_does_not_need() -> None:
    found = unit()
    assert found["DynamicUser"] == found["ProtectHome"] == found["PrivateDevices"] == ["yes"]
    assert found["CapabilityBoundingSet"] == [""]
    assert "ProcSubset" not in found  # free memory is read from /proc/meminfo
    assert "MemoryDenyWriteExecute" not in found  # PyTorch compiles while it runs


def test_the_examples_in_the_comments_of_both_files_exist() -> None:
    for file in (DOCKERFILE, UNIT):
        for path in re.findall(r"(?:docs|deploy)/[\w./-]+", file.read_text()):
            assert (ROOT / path.rstrip(".")).exists(), path
    [options] = re.findall(r"^#   OUTPACE_OPTIONS=(.*)$", UNIT.read_text(), re.M)
    assert parsed(["outpace", "serve", *shlex.split(options)])["port"] == 8000


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/outpace/bin/outpace", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(copy) not in done.stderr, done.stderr  # warnings about other units of the machine are not ours
