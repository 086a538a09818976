"""outpace: language models generate faster by speculative decoding, with the same output distribution.

>>> import outpace
>>> model = outpace.load("smollm2")                              # doctest: +SKIP
>>> print(outpace.generate(model, "Why is the sky blue?").text)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outpace.core.version import __version__

if TYPE_CHECKING:
    from outpace.advice.advising import advise as advise
    from outpace.api.calls import agenerate as agenerate, generate as generate
    from outpace.api.conversation import Conversation as Conversation, chat as chat
    from outpace.api.result import Result as Result
    from outpace.api.streams import AsyncStream as AsyncStream, Stream as Stream, astream as astream, stream as stream
    from outpace.bench.benchmark import bench as bench
    from outpace.bench.head_evaluation import evaluate_head as evaluate_head
    from outpace.certify import certify as certify
    from outpace.constraints.grammar import Grammar as Grammar, GrammarLimits as GrammarLimits
    from outpace.core.errors import BadInput as BadInput, OutpaceError as OutpaceError
    from outpace.core.sampling import SamplingParams as SamplingParams
    from outpace.core.tree import TokenTree as TokenTree
    from outpace.engine.method import Method as Method
    from outpace.heads.exchange import export_head as export_head, import_head as import_head
    from outpace.integrations.transformers.accelerate import (
        AcceleratedModel as AcceleratedModel,
        accelerate as accelerate,
    )
    from outpace.loading import load as load
    from outpace.model import Model as Model
    from outpace.training.job import train as train

# Imported on first use: `outpace --help` and error messages must not wait for torch.
_HOME = {
    "BadInput": "outpace.core.errors",
    "Grammar": "outpace.constraints.grammar",
    "GrammarLimits": "outpace.constraints.grammar",
    "Method": "outpace.engine.method",
    "Model": "outpace.model",
    "OutpaceError": "outpace.core.errors",
    "AcceleratedModel": "outpace.integrations.transformers.accelerate",
    "AsyncStream": "outpace.api.streams",
    "Conversation": "outpace.api.conversation",
    "Result": "outpace.api.result",
    "Stream": "outpace.api.streams",
    "accelerate": "outpace.integrations.transformers.accelerate",
    "advise": "outpace.advice.advising",
    "agenerate": "outpace.api.calls",
    "astream": "outpace.api.streams",
    "chat": "outpace.api.conversation",
    "SamplingParams": "outpace.core.sampling",
    "TokenTree": "outpace.core.tree",
    "evaluate_head": "outpace.bench.head_evaluation",
    "export_head": "outpace.heads.exchange",
    "generate": "outpace.api.calls",
    "import_head": "outpace.heads.exchange",
    "load": "outpace.loading",
    "stream": "outpace.api.streams",
    "train": "outpace.training.job",
}
_CALLABLE_ROOMS = ("bench", "certify")
"""Packages that are called like the function of their name (:mod:`outpace.core.callable_rooms`)."""
__all__ = ["__version__", *sorted((*_HOME, *_CALLABLE_ROOMS))]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _CALLABLE_ROOMS:
        return importlib.import_module(f"outpace.{name}")
    raise AttributeError(f"module 'outpace' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
