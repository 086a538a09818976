"""What the tests of draft LMs share: heads without training, text of a toy target, exact laws of what they draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.heads.base import Batch, Head, Teacher, teacher_of
from outpace.heads.untrained import random_head
from outpace.methods.registry import Context, build
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from outpace.targets.table import TableTarget, random_table
from support import NeverTwice, round_error
from target_suite import tiny_model
from weights_support import with_head

TARGETS: dict[str, Callable[[], Target]] = {
    "dense": lambda: DenseTarget(read_decoder_spec(tiny_model("llama"))),
    "hf": lambda: HFTarget(tiny_model("llama")),
}
PARAMS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=1.3, top_p=0.7),
    "repetition penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "banned": SamplingParams(temperature=1.0, logit_bias={2: float("-inf")}),
    "processor": SamplingParams(temperature=1.0, processors=(NeverTwice(),)),
    "greedy": SamplingParams(),
}


def context(target: Target, head: Head) -> Context:
    """A context in which this head was named."""
    return with_head(target, head)


def law_error(kind: str, name: str, settings: dict[str, Any], params: SamplingParams, words: int, rank: int) -> float:
    """How far one round and what follows it is from autoregressive decoding, over three tokens of which some are
    words."""
    table = random_table(3, 1, sharpness=1.0)
    target = TableTarget(3, table)
    head = random_head([kind], target, seed=3, vocabulary=words, rank=rank, options={"layers": 1})
    return round_error(build(name, context(target, head), settings), params, table=table, prompt=(0, 2, 1))


def answers(target: Target, method: Method, prompts: Seq[Seq[int]], params: SamplingParams, count: int) -> list[Any]:
    """The prompts decoded as one batch."""
    decoder = Decoder(target)
    running = [decoder.submit(Request(tuple(one), method, params, max_new_tokens=count)) for one in prompts]
    decoder.run()
    return running


def text(target: TableTarget, rows: int = 8, length: int = 24, prompt: int = 4, seed: int = 0) -> Batch:
    """Conversations whose answers are the target's likeliest tokens, with its states, of several lengths."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    states = {layer: torch.zeros(rows, length, target.vocab_size) for layer in range(target.num_layers + 1)}
    real, answer = torch.zeros(rows, length, dtype=torch.bool), torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        size, said = length - row % 3, prompt + row % 2
        path = torch.randint(target.vocab_size, (said,), generator=draws).tolist()
        while len(path) < size:
            path.append(int(target.table(tuple(path)).argmax()))
        tokens[row, :size] = torch.tensor(path)
        real[row, :size], answer[row, said:size] = True, True
        sequence = target.sequence([*path, 0])

        def keep(_: Any, position: int, hidden_states: Any, row: int = row) -> None:
            for layer, found in hidden_states.items():
                states[layer][row, position : position + len(found)] = found

        target.prefill([sequence], tuple(states), keep)
    return Batch(tokens, states, real, answer)


def trained(
    head: Head, target: Target, batch: Batch, steps: int = 60, rate: float = 0.02
) -> tuple[Teacher, list[float]]:
    """Train on one batch; returns the teacher and the loss of every step."""
    teacher = teacher_of(target, head, torch.device("cpu"))
    head.requires_grad_(True).train()
    optimiser = torch.optim.Adam(head.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = head.losses(batch, teacher)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(loss.detach()))
    head.requires_grad_(False).eval()
    return teacher, losses


def aux_layers_of(target: Target, tokens: Seq[int], layers: Seq[int]) -> dict[int, Tensor]:
    """The states of all tokens but the last, (tokens - 1, hidden) by layer."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    sequence = target.sequence(tokens)

    def keep(_: Any, position: int, hidden_states: Any) -> None:
        for layer, rows in hidden_states.items():
            found[layer].append(rows.clone())

    target.prefill([sequence], tuple(layers), keep)
    target.close(sequence.kv)
    return {layer: torch.cat(pieces) for layer, pieces in found.items()}
