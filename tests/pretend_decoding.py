"""Decode on a device that is none (:mod:`pretend_device`), and print what came of it as a JSON object.

A program of its own: the device stays registered for as long as the process lives.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from gpu_stages.bits import compare
from gpu_stages.subject import Subject
from outpace.certify import _or_untrained
from outpace.certify.greedy import certify_greedy
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.methods.registry import build
from outpace.model import Model
from outpace.targets.costs import FixedCosts
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from pretend_device import DEVICE, moved, pretending
from recorder import Again
from target_suite import tiny_model

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7]]


def refused() -> str:
    """What the device says to a sum of tensors that lie in two places."""
    try:
        torch.ones(2, device=DEVICE) + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return ""


def main(methods: list[str]) -> dict[str, Any]:
    with torch.inference_mode():
        target = GraphTarget(moved(read_decoder_spec(tiny_model("llama"))), capture=Again)
        target.__dict__["costs"] = FixedCosts()  # times of a pretended device say nothing: nothing might be drafted
    nothing: Any = None
    model = Model("tiny", target, nothing, frozenset())
    context, _ = _or_untrained(model.context())
    built = {name: build(name, context) for name in methods}
    verdicts = {name: certify_greedy(one, target, PROMPTS, length=12).verdict for name, one in built.items()}
    decoder = Decoder(target)
    together = [decoder.submit(Request(tuple(one), built["none"], max_new_tokens=6)) for one in PROMPTS]
    decoder.run()
    subject = Subject(model, target)
    differences = compare(subject, subject.opened([9, 20]), [TokenTree.chain([1, 2]), TokenTree()], (1,))[1]
    return {
        "refused": refused(),
        "device": str(target.device),
        "verdicts": verdicts,
        "batch": [one.tokens for one in together],
        "differences": differences,
        "replayed": target.counts.replayed,
        "refused captures": target.counts.why,
    }


if __name__ == "__main__":
    with pretending():
        found = main(sys.argv[1:])
    print(json.dumps(found))
