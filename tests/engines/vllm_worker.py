"""Answers of vLLM's engine in one process, a configuration after the other; run by vLLM's own interpreter.

    python vllm_worker.py < plan.json      # a JSON object a line on standard output, for each configuration

A process of its own for each server would import vLLM three times for each. Standard library and vLLM alone.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
OUT = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


def accepted(engine: Any) -> float:
    """Draft tokens that were accepted in this process."""
    return sum(float(one.value) for one in engine.get_metrics() if one.name == "vllm:spec_decode_num_accepted_tokens")


def answers(plan: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """All prompts, one after the other, or all at once where the run says ``together``."""
    import vllm

    engine = vllm.LLM(
        model=plan["folder"],
        dtype=plan["dtype"],
        max_model_len=run.get("context", plan["context"]),
        max_num_seqs=run.get("requests", 1),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=run["speculative_config"],
        additional_config=run.get("additional_config") or {},
        **run.get("engine", {}),
    )
    before = accepted(engine)
    asked = [
        vllm.SamplingParams(max_tokens=length, ignore_eos=True, temperature=run.get("temperature", 0.0), seed=1)
        for length in run.get("lengths", [plan["length"]] * len(run["prompts"]))
    ]
    prompts = [{"prompt_token_ids": one} for one in run["prompts"]]
    if run.get("together"):
        outputs = engine.generate(prompts, asked, use_tqdm=False)
    else:
        outputs = [engine.generate([one], [how], use_tqdm=False)[0] for one, how in zip(prompts, asked, strict=True)]
    found = [list(one.outputs[0].token_ids) for one in outputs]
    return {"label": run["label"], "answers": found, "accepted": accepted(engine) - before}


def main() -> None:
    plan = json.load(sys.stdin)
    for run in plan["runs"]:
        try:
            reply = answers(plan, run)
        except Exception as error:  # the others are still of interest
            reply = {"label": run["label"], "error": f"{type(error).__name__}: {error}"}
        gc.collect()
        OUT.write(json.dumps(reply) + "\n")
        OUT.flush()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)
