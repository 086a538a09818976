"""vLLM: plain, n-gram and suffix decoding, by its engine's step loop, where outpace is not installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def load(settings: dict[str, Any]) -> VLLM:
    """The folder of weights. The environment is read when vLLM is imported, so it is set before."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads wait for each other where anything else needs their core
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return VLLM(settings)


class VLLM:
    """One engine for the one configuration of this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm

        [speculative] = settings["configs"].values()
        self.vllm = vllm
        self.version = str(vllm.__version__)
        self.precision = settings["dtype"]
        self.failed: dict[str, str] = {}
        self.count = 0
        self.engine = vllm.LLM(
            model=settings["folder"],
            dtype=settings["dtype"],
            max_model_len=settings["context"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            speculative_config=dict(speculative) or None,
            **settings.get("engine", {}),
        ).llm_engine

    def answer(self, config: str, prompt: list[int], length: int, emit: Callable[[list[int]], None]) -> None:
        """Greedy; each step hands out the tokens since the last."""
        self.count += 1
        params = self.vllm.SamplingParams(
            temperature=0.0,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            output_kind=self.vllm.sampling_params.RequestOutputKind.DELTA,
        )
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                emit(list(output.outputs[0].token_ids))
