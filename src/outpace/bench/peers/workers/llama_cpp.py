"""llama.cpp through llama-cpp-python: plain, with its prompt lookup, and with its grammars.

A JSON schema becomes GBNF by the library's own converter. The library's sampler asks the grammar about all tokens of
the vocabulary at each position. llama.cpp's own programs (``common_sampler_sample``) take the likeliest token first,
and ask about the others only where the grammar forbids it: a grammar with ``"on_demand"`` is obeyed like that. Both
find the same tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._internals import LlamaTokenDataArray
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
        if grammar is not None and grammar.get("on_demand"):
            tokens = self._on_demand(prompt, masks)
        else:
            tokens = self.llama.generate(prompt, temp=0.0, grammar=masks)
        for count, token in enumerate(tokens, 1):
            if masks is not None and llama_cpp.llama_vocab_is_eog(self.llama._model.vocab, token):
                break
            emit([token])
            if count == length:
                break

    def _on_demand(self, prompt: list[int], masks: Any) -> Iterator[int]:
        """Greedy tokens; the grammar is asked about the likeliest alone, and about all where it forbids that one."""
        llama, text = self.llama, masks._grammar.encode()
        sampler = llama_cpp.llama_sampler_init_grammar(llama._model.vocab, text, masks._root.encode())
        if not sampler:
            raise ValueError("llama.cpp cannot read the grammar")
        size = llama.n_vocab()
        one, every = LlamaTokenDataArray(n_vocab=1), LlamaTokenDataArray(n_vocab=size)
        try:
            tokens = prompt
            while True:
                llama.eval(tokens)
                row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), shape=(size,))
                token = int(row.argmax())
                one.candidates_data.id[0], one.candidates_data.logit[0] = token, row[token]
                llama_cpp.llama_sampler_apply(sampler, ctypes.byref(one.candidates))
                if not np.isfinite(one.candidates_data.logit[0]):
                    every.copy_logits(row)
                    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(every.candidates))
                    token = int(every.candidates_data.logit.argmax())
                llama_cpp.llama_sampler_accept(sampler, token)
                yield token
                tokens = [token]
        finally:
            llama_cpp.llama_sampler_free(sampler)


def _masks(grammar: dict[str, Any]) -> Any:
    if grammar["kind"] == "schema":
        return llama_cpp.LlamaGrammar.from_json_schema(grammar["source"], verbose=False)
    return llama_cpp.LlamaGrammar.from_string(grammar["gbnf"], verbose=False)


load = LlamaCpp
