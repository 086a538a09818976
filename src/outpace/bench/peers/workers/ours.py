"""outpace itself, as one library among the others: one precision a process, every method in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outpace import loading
from outpace.constraints import Grammar, compiled
from outpace.core.errors import OutpaceError
from outpace.core.sampling import SamplingParams
from outpace.core.version import __version__
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.engine.warm_up import warm_up


def load(settings: dict[str, Any]) -> Ours:
    """The model in the settings' dtype, and the methods that it takes."""
    torch.set_num_threads(settings["threads"])
    return Ours(settings)


class Ours:
    """One model, and a method for every configuration."""

    takes_grammars = True

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = __version__
        self.failed: dict[str, str] = {}
        device = settings.get("device", "cpu")
        self.model = loading.load(settings["model"], dtype=settings["dtype"], device=device)
        self.precision = str(self.model.info["dtype"]).removeprefix("torch.")
        if self.precision != settings["dtype"]:  # a row that computes in something else would be a row too many
            note = self.model.info.get("note") or "no reason given"
            raise RuntimeError(f"computes in {self.precision} instead of {settings['dtype']}: {note}")
        draft = loading.load(settings["draft"], dtype=settings["dtype"], device=device) if settings["draft"] else None
        self.methods: dict[str, Method] = {}
        for name in settings["configs"]:
            try:
                method = self.model.method(name, draft_model=draft, head=settings["heads"])
                warm_up(self.model.target, method, 1)  # on a new machine: costs are not measured amid answers
                self.methods[name] = method
            except OutpaceError as error:  # one that needs a draft model, say; the others can run
                self.failed[name] = str(error)

    def answer(
        self,
        config: str,
        prompt: list[int],
        length: int,
        emit: Callable[[list[int]], None],
        grammar: dict[str, Any] | None = None,
    ) -> None:
        """Round by round, as a stream would read it. Without a grammar no token ends an answer: it has its full
        length."""
        params, stop_ids = SamplingParams(), frozenset[int]()
        if grammar is not None:
            constraint = compiled(Grammar(grammar["kind"], grammar["source"]), self.model.tokenizer)
            params, stop_ids = SamplingParams(constraint=constraint), self.model.eos_ids
        decoder = Decoder(self.model.target)
        generation = decoder.submit(Request(tuple(prompt), self.methods[config], params, length, stop_ids))
        told, more = 0, True
        while more:
            more = decoder.step()
            emit(generation.tokens[told:])
            told = len(generation.tokens)
        generation.raise_error()
