"""llama.cpp with its grammars, through llama-cpp-python: a JSON schema becomes GBNF by the library's own converter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp


class LlamaCpp:
    """One context, for every prompt a grammar."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = llama_cpp.__version__
        self.precision = settings["gguf_kind"]
        self.failed: dict[str, str] = {}
        self.llama = llama_cpp.Llama(
            settings["gguf"],
            n_ctx=settings["context"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            verbose=False,
        )

    def answer(self, config: str, prompt: dict[str, Any], length: int, emit: Callable[[list[int]], None]) -> None:
        if prompt["kind"] == "schema":
            grammar = llama_cpp.LlamaGrammar.from_json_schema(prompt["source"], verbose=False)
        else:
            grammar = llama_cpp.LlamaGrammar.from_string(prompt["gbnf"], verbose=False)
        self.llama.reset()
        vocabulary = self.llama._model.vocab
        for count, token in enumerate(self.llama.generate(prompt["tokens"], temp=0.0, grammar=grammar), 1):
            if llama_cpp.llama_vocab_is_eog(vocabulary, token):
                break
            emit([token])
            if count == length:
                break


load = LlamaCpp
