"""outpace: language models generate faster by speculative decoding, and say the same.

>>> import outpace
>>> model = outpace.load("smollm2")                              # doctest: +SKIP
>>> print(outpace.generate(model, "Why is the sky blue?").text)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outpace.core.version import __version__

if TYPE_CHECKING:
    from outpace.api import Result as Result
    from outpace.api import generate as generate
    from outpace.api import stream as stream
    from outpace.core.errors import BadInput as BadInput
    from outpace.core.errors import OutpaceError as OutpaceError
    from outpace.core.sampling import SamplingParams as SamplingParams
    from outpace.core.tree import TokenTree as TokenTree
    from outpace.engine.method import Method as Method
    from outpace.loading import load as load
    from outpace.model import Model as Model

# Imported on first use: `outpace --help` and error messages must not wait for torch.
_HOME = {
    "BadInput": "outpace.core.errors",
    "Method": "outpace.engine.method",
    "Model": "outpace.model",
    "OutpaceError": "outpace.core.errors",
    "Result": "outpace.api",
    "SamplingParams": "outpace.core.sampling",
    "TokenTree": "outpace.core.tree",
    "generate": "outpace.api",
    "load": "outpace.loading",
    "stream": "outpace.api",
}
__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'outpace' has no attribute '{name}'")
