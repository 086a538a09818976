"""An override for builds of vLLM for CPUs that lose every request's temperature where they speculate.

vLLM 0.32 verifies draft tokens with one temperature (and top-k, top-p) for each row: ``expand_batch_to_tokens`` of
``vllm.v1.sample.rejection_sampler`` copies the requests' values into a tensor made by ``new_empty``. Without Triton it
calls ``cpu_triton_utils._expand_kernel_impl``, which hands a C++ kernel its arguments converted by ``_ensure_int64``.
For a tensor of floats that is a copy: the kernel fills the copy, the tensor itself stays uninitialised, and logits are
divided by what it happens to hold. Greedy requests do not read it. The override is installed only where a self-test
shows this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

MODULE, FUNCTION = "vllm.utils.cpu_triton_utils", "_expand_kernel_impl"
_log = logging.getLogger(__name__)


def expand(
    output: Any, input_val: Any, cu_num_tokens: Any, replace_from: float, replace_to: float, *_: Any, **__: Any
) -> None:
    """Fill ``output`` (tokens,) with each request's value of ``input_val`` (requests,), as often as
    ``cu_num_tokens`` (requests,), a running sum, says; values equal to ``replace_from`` become ``replace_to``."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(torch.repeat_interleave(values, counts))


def is_broken(kernel: Callable[..., Any]) -> bool:
    """Whether a kernel leaves a tensor of floats as it was, or fills it with other values than it should."""
    import torch

    ends = torch.tensor([2, 3], dtype=torch.int32)
    for values in (torch.tensor([0.5, 1.25]), torch.tensor([0.0, 0.7])):
        found, right = torch.full((3,), float("nan")), torch.empty(3)
        kernel(found, values, ends, 0, 1, 128)
        expand(right, values, ends, 0, 1)
        if not torch.equal(found, right):
            return True
    return False


class Tested:
    """Stands for the kernel: tests it when it is first called, and replaces it where it is broken.

    Not before: the library with vLLM's kernels may not be loaded when plug-ins are.
    """

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel = kernel
        self._chosen: Callable[..., Any] | None = None

    def __call__(
        self,
        output: Any,
        input_val: Any,
        cu_num_tokens: Any,
        replace_from: Any,
        replace_to: Any,
        MAX_NUM_TOKENS: Any = None,  # noqa: N803 - the kernel's own name
    ) -> None:
        if self._chosen is None:
            broken = is_broken(self.kernel)
            self._chosen = expand if broken else self.kernel
            if broken:
                _log.warning(
                    "this build of vLLM loses the temperature of requests where it speculates (%s.%s); outpace has "
                    "replaced that function",
                    MODULE,
                    FUNCTION,
                )
        self._chosen(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS)


def install() -> None:
    """Put the test in the place of the kernel, before vLLM's workers register it. Does nothing where there is none."""
    import importlib

    try:
        module = importlib.import_module(MODULE)
        kernel = getattr(module, FUNCTION)
    except (ImportError, AttributeError):  # another build, or a version that has none
        return
    if not isinstance(kernel, Tested):
        setattr(module, FUNCTION, Tested(kernel))
