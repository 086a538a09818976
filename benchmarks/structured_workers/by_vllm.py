"""vLLM's CPU build with xgrammar, by its engine's step loop, where outpace is not installed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any


def load(settings: dict[str, Any]) -> VLLM:
    """The folder of weights. The environment is read when vLLM is imported, so it is set before."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return VLLM(settings)


class VLLM:
    """One engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm

        self.vllm = vllm
        self.version = str(vllm.__version__)
        self.precision = settings["dtype"]
        self.failed: dict[str, str] = {}
        self.count = 0
        self.stops = set(settings["stop_ids"])
        self.engine = vllm.LLM(
            model=settings["folder"],
            dtype=settings["dtype"],
            max_model_len=settings["context"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            disable_log_stats=True,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        ).llm_engine

    def answer(self, config: str, prompt: dict[str, Any], length: int, emit: Callable[[list[int]], None]) -> None:
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        self.count += 1
        if prompt["kind"] == "schema":
            structured = StructuredOutputsParams(json=json.loads(prompt["source"]))
        else:
            structured = StructuredOutputsParams(grammar=prompt["gbnf"])
        params = self.vllm.SamplingParams(
            temperature=0.0,
            max_tokens=length,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=structured,
        )
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt["tokens"]}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                emit([token for token in output.outputs[0].token_ids if token not in self.stops])
