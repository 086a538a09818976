"""transformers' ``generate``: plain, prompt lookup, and assisted by a draft model. One model serves all three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StaticCache


def load(settings: dict[str, Any]) -> Transformers:
    """The model in the settings' dtype."""
    torch.set_num_threads(settings["threads"])
    return Transformers(settings)


class Transformers:
    """The model and what each configuration adds to ``generate``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version = transformers.__version__
        self.precision = settings["dtype"]
        self.failed: dict[str, str] = {}
        device = settings.get("device", "cpu")
        self.model = _model(settings["folder"], settings["dtype"], device)
        self.options: dict[str, dict[str, Any]] = {}
        for config, given in settings["configs"].items():
            options = dict(given)
            if options.pop("draft", False):
                options["assistant_model"] = _model(settings["draft_folder"], settings["dtype"], device)
            if options.pop("static_cache", False):  # of one size for all prompts: on a GPU the forward is compiled once
                cache = StaticCache(config=self.model.config, max_cache_len=settings["context"])
                options["past_key_values"] = cache
            self.options[config] = options

    def answer(self, config: str, prompt: list[int], length: int, emit: Callable[[list[int]], None]) -> None:
        """Greedy, through the streamer: with a draft it is given several tokens at once."""
        options, tokens = self.options[config], torch.tensor([prompt], device=self.model.device)
        with torch.inference_mode():
            if "past_key_values" in options:
                options["past_key_values"].reset()
            self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=length,
                do_sample=False,
                streamer=_Streamer(emit),
                **options,
            )


class _Streamer:
    def __init__(self, emit: Callable[[list[int]], None]) -> None:
        self.emit, self.prompted = emit, False

    def put(self, value: torch.Tensor) -> None:
        """The first call brings the prompt back."""
        if self.prompted:
            self.emit(value.flatten().tolist())
        self.prompted = True

    def end(self) -> None:
        """Nothing is held back."""


def _model(folder: str, dtype: str, device: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
    model.generation_config.eos_token_id = None  # without one, nothing ends an answer early
    model.generation_config.pad_token_id = 0
    return model
