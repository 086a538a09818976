"""outpace with a grammar: one precision a process, every method in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outpace import loading
from outpace.constraints import Grammar, compiled
from outpace.core.sampling import SamplingParams
from outpace.core.version import __version__
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request


def load(settings: dict[str, Any]) -> Ours:
    """The model in the settings' dtype, and its methods."""
    torch.set_num_threads(settings["threads"])
    return Ours(settings)


class Ours:
    """One model, and a method for every configuration."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = __version__
        self.failed: dict[str, str] = {}
        self.model = loading.load(settings["model"], dtype=settings["dtype"], device="cpu")
        self.precision = str(self.model.info["dtype"]).removeprefix("torch.")
        self.methods = {name: self.model.method(name) for name in settings["configs"]}

    def answer(self, config: str, prompt: dict[str, Any], length: int, emit: Callable[[list[int]], None]) -> None:
        """Round by round, until the grammar's end or the length."""
        constraint = compiled(Grammar(prompt["kind"], prompt["source"]), self.model.tokenizer)
        params = SamplingParams(constraint=constraint)
        decoder = Decoder(self.model.target)
        request = Request(tuple(prompt["tokens"]), self.methods[config], params, length, self.model.eos_ids)
        generation = decoder.submit(request)
        told, more = 0, True
        while more:
            more = decoder.step()
            emit(generation.tokens[told:])
            told = len(generation.tokens)
        generation.raise_error()
