"""What the tests of self-drafting share: models that can spare some of their sublayers, and autoregressive decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from typing import Any

import torch

from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.fixed import Fixed
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from target_suite import tiny_model

TARGETS: dict[str, Callable[[Any], Target]] = {
    "dense": lambda model: DenseTarget(read_decoder_spec(model)),
    "hf": HFTarget,
}


def spare_model(attention: Iterable[int] = (), mlp: Iterable[int] = (), scale: float = 0.01, seed: int = 1) -> Any:
    """A Llama of four layers, of which the named sublayers add next to nothing: it can do without them."""
    model = tiny_model("llama", seed)
    with torch.no_grad():
        for layer in attention:
            model.model.layers[layer].self_attn.o_proj.weight.mul_(scale)
        for layer in mlp:
            model.model.layers[layer].mlp.down_proj.weight.mul_(scale)
    return model


def context(target: Target) -> Context:
    """A context without a draft model."""
    return Context(target)


def plain() -> Method:
    return Method("none", NoDraft(), RecursiveRejection(), Fixed(0))


def decode(
    target: Target,
    method: Method,
    prompts: Iterable[Seq[int]],
    count: int = 24,
    params: SamplingParams = SamplingParams(),  # noqa: B008
    namespace: str = "",
) -> list[Generation]:
    """The prompts as one batch, to the end."""
    decoder = Decoder(target)
    running = [
        decoder.submit(Request(tuple(one), method, params, max_new_tokens=count, namespace=namespace))
        for one in prompts
    ]
    decoder.run()
    return running


def texts(running: Iterable[Generation]) -> list[list[int]]:
    return [list(one.tokens) for one in running]
