"""The override for builds of vLLM that lose temperatures: it finds the defect, mends it, and leaves a right kernel."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.integrations.vllm import cpu_expand


def right(output: Tensor, values: Tensor, ends: Tensor, before: float, after: float, MAX_NUM_TOKENS: int = 0) -> None:
    start = 0
    for value, end in zip(values.tolist(), ends.tolist(), strict=True):
        output[start:end] = after if value == before else value
        start = end


def broken(output: Tensor, values: Tensor, ends: Tensor, before: float, after: float, MAX_NUM_TOKENS: int = 0) -> None:
    """As vLLM 0.32 for CPUs: it fills a converted copy of its output, unless that is of int64."""
    converted = output if output.dtype == torch.int64 else output.to(torch.int64)
    right(converted, values.to(torch.int64), ends.to(torch.int64), before, after)


def test_the_defect_is_found() -> None:
    assert cpu_expand.is_broken(broken)
    assert not cpu_expand.is_broken(right)
    assert not cpu_expand.is_broken(cpu_expand.expand)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_the_override_expands(dtype: torch.dtype) -> None:
    values, ends = torch.tensor([0.0, 2.5, 3.0]).to(dtype), torch.tensor([2, 2, 6])
    found, wanted = torch.full((6,), 9).to(dtype), torch.full((6,), 9).to(dtype)
    cpu_expand.expand(found, values, ends, 0, 1, 128)
    right(wanted, values, ends, 0, 1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kernel", [right, broken])
def test_it_applies_where_the_self_test_shows_the_defect(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package, module = ModuleType("vllm"), ModuleType("vllm.utils.cpu_triton_utils")
    module._expand_kernel_impl = kernel  # type: ignore[attr-defined]
    for name, one in (("vllm", package), ("vllm.utils", ModuleType("vllm.utils")), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, one)
    cpu_expand.install()
    installed = module._expand_kernel_impl
    cpu_expand.install()
    assert module._expand_kernel_impl is installed
    with caplog.at_level(logging.WARNING):
        found = torch.full((3,), float("nan"))
        installed(
            output=found,
            input_val=torch.tensor([0.7, 0.0]),
            cu_num_tokens=torch.tensor([1, 3]),
            replace_from=0,
            replace_to=1,
            MAX_NUM_TOKENS=128,
        )
    assert found.tolist() == pytest.approx([0.7, 1.0, 1.0])
    assert ("loses the temperature" in caplog.text) == (kernel is broken)


def test_without_vllm_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    cpu_expand.install()
