"""llama.cpp through llama-cpp-python: plain, with its prompt lookup, and with its grammars.

A JSON schema becomes GBNF by the library's own converter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


class LlamaCpp:
    """One context for the one configuration of this process."""

    takes_grammars = True

    def __init__(self, settings: dict[str, Any]) -> None:
        [options] = settings["configs"].values()
        self.version = llama_cpp.__version__
        self.precision = settings["gguf_kind"]
        self.failed: dict[str, str] = {}
        self.llama = llama_cpp.Llama(
            settings["gguf"],
            n_ctx=settings["context"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            draft_model=LlamaPromptLookupDecoding(**options) if options else None,
            logits_all=bool(options),  # a draft is judged by every row; else the library keeps too few for long prompts
            verbose=False,
        )

    def answer(
        self,
        config: str,
        prompt: list[int],
        length: int,
        emit: Callable[[list[int]], None],
        grammar: dict[str, Any] | None = None,
    ) -> None:
        """``generate`` knows no end of sequence; after ``reset`` it finds no common beginning to keep."""
        masks = None if grammar is None else _masks(grammar)
        self.llama.reset()
        for count, token in enumerate(self.llama.generate(prompt, temp=0.0, grammar=masks), 1):
            if masks is not None and llama_cpp.llama_vocab_is_eog(self.llama._model.vocab, token):
                break
            emit([token])
            if count == length:
                break


def _masks(grammar: dict[str, Any]) -> Any:
    if grammar["kind"] == "schema":
        return llama_cpp.LlamaGrammar.from_json_schema(grammar["source"], verbose=False)
    return llama_cpp.LlamaGrammar.from_string(grammar["gbnf"], verbose=False)


load = LlamaCpp
