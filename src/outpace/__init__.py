"""outpace: language models generate faster by speculative decoding, and say the same.

>>> import outpace
>>> model = outpace.load("smollm2")                              # doctest: +SKIP
>>> print(outpace.generate(model, "Why is the sky blue?").text)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outpace.api import Result as Result
    from outpace.api import generate as generate
    from outpace.api import stream as stream
    from outpace.errors import BadInput as BadInput
    from outpace.errors import OutpaceError as OutpaceError
    from outpace.method import Method as Method
    from outpace.models import Model as Model
    from outpace.models import load as load
    from outpace.sampling import SamplingParams as SamplingParams
    from outpace.tree import TokenTree as TokenTree

# Imported on first use: `outpace --help` and error messages must not wait for torch.
_HOME = {
    "BadInput": "outpace.errors",
    "Method": "outpace.method",
    "Model": "outpace.models",
    "OutpaceError": "outpace.errors",
    "Result": "outpace.api",
    "SamplingParams": "outpace.sampling",
    "TokenTree": "outpace.tree",
    "generate": "outpace.api",
    "load": "outpace.models",
    "stream": "outpace.api",
}
__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'outpace' has no attribute '{name}'")
