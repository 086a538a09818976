"""OpenVINO GenAI: plain, prompt lookup, and with a draft model. It reads the GGUF file itself."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai

_BLOCKS = 512 * 1024  # more tokens in a forward than any prompt has: one forward for the prompt


class OpenVINO:
    """One pipeline for the one configuration of this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        [(_, given)] = settings["configs"].items()
        options = dict(given)
        self.version = version("openvino-genai")
        self.failed: dict[str, str] = {}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = _BLOCKS
        more: dict[str, Any] = {}
        if options.pop("lookup", False):
            more["prompt_lookup"] = True
        if options.pop("draft", False):
            more["draft_model"] = openvino_genai.draft_model(settings["draft_gguf"], "CPU")
        self.pipeline = openvino_genai.LLMPipeline(
            settings["gguf"], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=settings["threads"], **more
        )
        computed = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
        self.precision = f"{settings['gguf_kind']} in {computed}"
        self.config = openvino_genai.GenerationConfig(do_sample=False, ignore_eos=True, **options)
        self.config.apply_chat_template = False

    def answer(self, config: str, prompt: list[int], length: int, emit: Callable[[list[int]], None]) -> None:
        """Greedy, through a streamer of tokens."""
        self.config.max_new_tokens = length
        self.pipeline.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), self.config, _streamer(emit))


load = OpenVINO


def _streamer(emit: Callable[[list[int]], None]) -> Any:
    running = openvino_genai.StreamingStatus.RUNNING

    class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
        def write(self, token: int | list[int]) -> Any:
            emit([token] if isinstance(token, int) else list(token))
            return running

        def end(self) -> None:
            pass

    return Streamer()
