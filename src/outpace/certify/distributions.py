"""Exact output distributions: of autoregressive decoding, from the target, and of a method, by every outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from outpace.core.chance import Chance, ChanceSource, Enumeration, NotEnumerable, SeededChance
from outpace.core.constraint import FORBIDDEN, AnswerComplete
from outpace.core.future_validity import EXACT, FVO, MASKED
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
    table: Table,
    vocab_size: int,
    params: SamplingParams,
    prompt: Output,
    length: int,
    stop_ids: frozenset[int] = frozenset(),
) -> OutputDistribution:
    """The distribution of at most ``length`` tokens of autoregressive decoding, fewer where a stop token or a grammar
    ends the answer. Uses no tree, no draft and no engine."""
    if params.weighting.kind in (FVO, EXACT):
        return conditional_distribution(table, vocab_size, params, prompt, length, stop_ids)
    proposal_distribution: OutputDistribution = {(): 1.0}
    for step in range(length):
        longer: OutputDistribution = defaultdict(float)
        for output, weight in proposal_distribution.items():
            if len(output) < step or (output and output[-1] in stop_ids):  # it ended before
                longer[output] += weight
                continue
            sampler = Sampler(params, prompt, vocab_size, stop_ids)
            sampler.extend(output)
            distribution = TreeDistribution(sampler, TokenTree(), table((*prompt, *output))[None])
            p = distribution.p(ROOT).double()
            if isinstance(failure := distribution.failure(ROOT), AnswerComplete):
                longer[output] += weight
                continue
            if failure is not None:
                raise failure
            p = p / p.sum()
            for token in torch.nonzero(p).flatten().tolist():
                longer[(*output, token)] += weight * float(p[token])
        proposal_distribution = dict(longer)
    return proposal_distribution


def conditional_distribution(
    table: Table,
    vocab_size: int,
    params: SamplingParams,
    prompt: Output,
    length: int,
    stop_ids: frozenset[int] = frozenset(),
) -> OutputDistribution:
    """The first ``length`` tokens of the model's own answers, given that these are valid: every answer of a finite
    grammar, its probability without the grammar, and the sum over all. Uses no future validity, tree or engine."""
    assert params.constraint is not None
    free = replace(params, constraint=None, constraint_weighting=MASKED)
    found: OutputDistribution = defaultdict(float)
    todo: list[tuple[Output, float, Any]] = [((), 1.0, params.constraint.begin())]
    while todo:
        output, weight, state = todo.pop()
        sampler = Sampler(free, prompt, vocab_size, stop_ids)
        sampler.extend(output)
        p = TreeDistribution(sampler, TokenTree(), table((*prompt, *output))[None]).p(ROOT).double()
        after = [(token, state.advance(token)) for token in range(vocab_size) if token not in stop_ids]
        further = [(token, then) for token, then in after if then is not None]
        todo += [((*output, token), weight * float(p[token]), then) for token, then in further]
        if state.complete:
            ends = [(*output, token) for token in stop_ids]
            for whole in ends if stop_ids else [] if further else [output]:
                found[whole[:length]] += weight * (float(p[whole[-1]]) if stop_ids else 1.0)
    total = sum(found.values())
    return {output: weight / total for output, weight in found.items() if weight > 0.0}


_FEW = 128
"""Branches after which their number is estimated, so that too many are not walked until the limit shows it."""
_CLEARLY = 4.0
"""Times the limit: a smaller estimate may be wrong."""
Arrivals = tuple[Target, Seq[Request], int]
"""A target, requests, and how many rounds run before the last of them joins the others."""


class _Keyed:
    """The streams of one request within one enumeration, under the key that they have in the field: requests that
    would share numbers there are correlated here."""

    def __init__(self, source: ChanceSource, key: bytes) -> None:
        self._source, self._name = source, key.hex()

    def at(self, position: int, purpose: str) -> Chance:
        return self._source.at(position, f"{self._name}|{purpose}")


def enumerated_distribution(build: Callable[[], Arrivals], limit: int = 300_000) -> tuple[OutputDistribution, int]:
    """The exact output distribution of the last request of all, and the tokens that it drafted in all branches.

    ``build`` makes target and requests afresh for every branch, so that nothing learned in one reaches another.
    Raises NotEnumerable for continuous noise, randomness from elsewhere, and more than ``limit`` branches, also
    where an estimate says so.
    """

    proposal_distribution: OutputDistribution = defaultdict(float)
    drafted = 0
    for generation, weight in enumerated_runs(build, limit):
        proposal_distribution[output_of(generation)] += weight
        drafted += generation.metrics.drafted
    return dict(proposal_distribution), drafted


def enumerated_runs(build: Callable[[], Arrivals], limit: int = 300_000) -> Iterator[tuple[Generation, float]]:
    """The last request of all after every outcome of its run and of the others, and the weight of the outcome.

    ``build`` and what is raised: as for :func:`enumerated_distribution`.
    """

    def program(chance: ChanceSource) -> Generation:
        return run_once(build, lambda own: _Keyed(chance, own.key))

    for number, outcome in enumerate(Enumeration.outcomes(program, limit=limit)):
        if number == _FEW and limit > _FEW and Enumeration.size(program) > _CLEARLY * limit:
            raise NotEnumerable(f"more than {limit} branches to enumerate, by an estimate")
        yield outcome


def output_of(generation: Generation) -> Output:
    """All new tokens of a finished generation, stop tokens included."""
    return tuple(generation.sequence.tokens[len(generation.request.prompt) :])


def run_once(build: Callable[[], Arrivals], source: Callable[[SeededChance], ChanceSource]) -> Generation:
    """Decode the requests once, each with what ``source`` makes of its own chance. Returns the last request.

    Raises what a request ended with, if it could not go on.
    """
    target, requests, rounds = build()
    decoder = Decoder(target)

    def submit(request: Request) -> Generation:
        generation = decoder.submit(request)
        assert isinstance(generation.sequence.chance, SeededChance)
        generation.sequence.chance = source(generation.sequence.chance)
        return generation

    running = [submit(request) for request in requests[:-1]]
    for _ in range(rounds):
        decoder.step()
    running.append(submit(requests[-1]))
    decoder.run()
    for generation in running:
        if generation.error is not FORBIDDEN:  # such an output ends with a token of probability 0, which shows the bias
            generation.raise_error()
    return running[-1]


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Largest difference of probability of any outcome."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
