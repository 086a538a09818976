"""vLLM: plain, n-gram and suffix decoding, and grammars, by its engine's step loop, where outpace is not installed."""

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
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads wait for each other where anything else needs their core
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return VLLM(settings)


class VLLM:
    """One engine for the one configuration of this process. ``settings["engine"]``: further options of it.

    Where answers have grammars its tokenizer is one of them (``skip_tokenizer_init``), and ``settings["stop_ids"]`` are
    the tokens that end an answer.
    """

    takes_grammars = True

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm

        [speculative] = settings["configs"].values()
        self.vllm = vllm
        self.version = str(vllm.__version__)
        self.precision = settings["dtype"]
        self.failed: dict[str, str] = {}
        self.count = 0
        self.stops = frozenset(settings.get("stop_ids", ()))
        options: dict[str, Any] = {
            "max_model_len": settings["context"],
            "max_num_seqs": 1,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "speculative_config": dict(speculative) or None,
        }
        options |= settings.get("engine", {})
        self.engine = vllm.LLM(model=settings["folder"], dtype=settings["dtype"], **options).llm_engine

    def answer(
        self,
        config: str,
        prompt: list[int],
        length: int,
        emit: Callable[[list[int]], None],
        grammar: dict[str, Any] | None = None,
    ) -> None:
        """Greedy; each step hands out the tokens since the last."""
        self.count += 1
        ends = {"ignore_eos": True} if grammar is None else {"structured_outputs": _structured(grammar)}
        params = self.vllm.SamplingParams(
            temperature=0.0,
            max_tokens=length,
            detokenize=False,
            output_kind=self.vllm.sampling_params.RequestOutputKind.DELTA,
            **ends,
        )
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens = output.outputs[0].token_ids
                emit([token for token in tokens if grammar is None or token not in self.stops])


def _structured(grammar: dict[str, Any]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if grammar["kind"] == "schema":
        return StructuredOutputsParams(json=json.loads(grammar["source"]))
    return StructuredOutputsParams(grammar=grammar["gbnf"])
