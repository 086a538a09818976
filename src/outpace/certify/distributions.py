"""Exact output distributions: of autoregressive decoding, from the target, and of a method, by every outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any

import torch

from outpace.core.chance import Chance, ChanceSource, Enumeration
from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.engine.decoder import Decoder
from outpace.engine.request import Generation, Request
from outpace.targets.base import Target
from outpace.targets.table import Table

Output = tuple[int, ...]
OutputDistribution = dict[Output, float]


def autoregressive_distribution(
    table: Table, vocab_size: int, params: SamplingParams, prompt: Output, length: int
) -> OutputDistribution:
    """The distribution of ``length`` tokens of autoregressive decoding. Uses no tree, no draft and no engine."""
    proposal_distribution: OutputDistribution = {(): 1.0}
    for _ in range(length):
        longer: OutputDistribution = defaultdict(float)
        for output, weight in proposal_distribution.items():
            sampler = Sampler(params, prompt, vocab_size)
            sampler.extend(output)
            distribution = TreeDistribution(sampler, TokenTree(), table((*prompt, *output))[None])
            p = distribution.p(ROOT).double()
            if (failure := distribution.failure(ROOT)) is not None:
                raise failure
            p = p / p.sum()
            for token in torch.nonzero(p).flatten().tolist():
                longer[(*output, token)] += weight * float(p[token])
        proposal_distribution = dict(longer)
    return proposal_distribution


class _Own:
    """A request's own streams within one enumeration: requests of equal seed would share their numbers."""

    def __init__(self, source: ChanceSource, name: int) -> None:
        self._source, self._name = source, name

    def at(self, position: int, purpose: str) -> Chance:
        return self._source.at(position, f"{self._name}|{purpose}")


def enumerated_distribution(
    build: Callable[[], tuple[Target, Seq[Request]]], watched: int = 0, limit: int = 300_000
) -> tuple[OutputDistribution, int]:
    """The exact output distribution of request ``watched`` of the batch, and the tokens it drafted in all branches.

    ``build`` makes target and requests afresh for every branch, so that nothing learned in one reaches another.
    Raises NotImplementedError for continuous noise and RuntimeError for more than ``limit`` branches.
    """

    def program(chance: ChanceSource) -> Generation:
        return run_once(build, lambda index: _Own(chance, index))[watched]

    proposal_distribution: OutputDistribution = defaultdict(float)
    drafted = 0
    for generation, weight in Enumeration.outcomes(program, limit=limit):
        proposal_distribution[output_of(generation)] += weight
        drafted += generation.metrics.drafted
    return dict(proposal_distribution), drafted


def output_of(generation: Generation) -> Output:
    """All new tokens of a finished generation, stop tokens included."""
    return tuple(generation.sequence.tokens[len(generation.request.prompt) :])


def run_once(
    build: Callable[[], tuple[Target, Seq[Request]]], source: Callable[[int], ChanceSource]
) -> list[Generation]:
    """Decode the requests once with the given chance. Raises what a request ended with, if it could not go on."""
    target, requests = build()
    decoder = Decoder(target)
    running = [decoder.submit(request) for request in requests]
    for index, generation in enumerate(running):
        generation.sequence.chance = source(index)
    decoder.run()
    for generation in running:
        generation.raise_error()
    return running


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Largest difference of probability of any outcome."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
