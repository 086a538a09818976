"""llama.cpp's own quantization, through llama-cpp-python: a GGUF file in another format."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import llama_cpp


def load(settings: dict[str, Any]) -> SimpleNamespace:
    """Write ``target``, which has the weights of ``source`` in ``format``. It answers nothing afterwards."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{settings['format']}")
    params.allow_requantize = True
    params.nthread = settings["threads"]
    failed = llama_cpp.llama_model_quantize(
        os.fsencode(settings["source"]), os.fsencode(settings["target"]), ctypes.byref(params)
    )
    if failed:
        raise RuntimeError(f"llama.cpp cannot write {settings['format']} (error {failed})")
    return SimpleNamespace(version=llama_cpp.__version__, precision=settings["format"], failed={})
