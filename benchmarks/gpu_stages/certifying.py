"""Whether methods give the answers of autoregressive decoding on this device, token by token."""

from __future__ import annotations

from typing import Any

import outpace
from gpu_stages.subject import Subject
from outpace.prompts.questions import load_prompts

METHODS = ("sam", "auto")


def certifying(subject: Subject, prompts: int) -> dict[str, Any]:
    """``passed``: no answer differs by more than a near tie of two logits, which 16 bits may round either way."""
    texts = [prompt.turns[0] for prompt in load_prompts(None, prompts)]
    found = []
    for method in METHODS:
        certificate = outpace.certify(method, subject.model, level="greedy", prompts=texts)
        found.append(certificate.public())
        print(f"{method}: {certificate.verdict}", flush=True)
    summary = "; ".join(f"{one['method']}: {one['verdict']}" for one in found)
    passed = all(one["lossless"] is not False for one in found)
    return {"passed": passed, "summary": summary, "certificates": found}
