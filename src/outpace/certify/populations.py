"""Certificates of methods that decode a group of sequences, by every outcome of the real rounds on toy targets.

Beams: the distribution of all hypotheses together equals that of sequential stochastic beam sampling, which is
written here a second time, without engine, trees or draft; at temperature 0 the hypotheses are those of beam search.

Particles: the mean of (1/N) * sum of weight * [tokens = s] is the target's probability of s, for every text s; hence
the weighted average of any statistic is unbiased. One particle has the draft model's law, but for the target's own
tokens. Some draft models lack a token, as shipped ones do that cover a part of the vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outpace.certify.certificate import Certificate, Check
from outpace.certify.distributions import Arrivals, Output, autoregressive_distribution, distance, enumerated_runs
from outpace.certify.exact import tiny_context
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.engine.populations.beam_options import BeamOptions
from outpace.engine.populations.beams import BeamRule
from outpace.engine.populations.particles import ParticleRule
from outpace.engine.request import Request
from outpace.methods.registry import Context, build, find
from outpace.targets.table import Table, random_table

TOLERANCE = 1e-6
Hypotheses = tuple[Output, ...]
"""The tokens of all hypotheses, in order."""
Build = Callable[[Context, Mapping[str, Any]], Method]


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting. ``settings``: of the method, on top of its tiny ones."""

    name: str
    params: SamplingParams
    length: int
    settings: Mapping[str, Any]
    stop_ids: frozenset[int] = frozenset()
    vocab_size: int = 3
    prompt: Output = (0, 1, 1)
    seed: int = 11
    lacking: Output = ()
    """Tokens that the draft model lacks."""

    @property
    def context(self) -> Context:
        """The toy target and draft model."""
        return tiny_context(self.vocab_size, self.seed, lacking=self.lacking)


def _of_two(
    name: str,
    length: int,
    settings: Mapping[str, Any],
    stop_ids: frozenset[int] = frozenset(),
    lacking: Output = (),
    **sampling: Any,
) -> Cell:
    """A cell of two tokens: particles have more outcomes than beams."""
    params = SamplingParams(**{"temperature": 1.0, **sampling})
    return Cell(name, params, length, settings, stop_ids, vocab_size=2, seed=len(name), lacking=lacking)


BEAM_CELLS = (
    Cell("temperature 1", SamplingParams(temperature=1.0), 2, {"num_draft_tokens": 1}),
    Cell("temperature 0.6, two layers", SamplingParams(temperature=0.6), 3, {"num_draft_tokens": 2}, vocab_size=2),
    Cell("temperature 0.02", SamplingParams(temperature=0.02), 2, {"num_draft_tokens": 1}, seed=21),
    Cell("stop token", SamplingParams(temperature=1.0), 2, {"num_draft_tokens": 1}, frozenset({2}), seed=12),
    Cell("top-k 2", SamplingParams(temperature=1.1, top_k=2), 2, {"num_draft_tokens": 1}, seed=13),
    Cell(
        "one beam", SamplingParams(temperature=0.8), 3, {"num_draft_tokens": 2, "num_beams": 1}, vocab_size=2, seed=14
    ),
    Cell("wider than the beams", SamplingParams(temperature=1.0), 2, {"num_draft_tokens": 1, "max_width": 3}, seed=15),
    Cell(
        "drawn from some continuations",
        SamplingParams(temperature=1.0),
        2,
        {"num_draft_tokens": 1, "candidates": 3},
        seed=18,
    ),
    Cell(
        "fewer layers after rejections",
        SamplingParams(temperature=1.0),
        4,
        {"num_draft_tokens": 2, "num_beams": 1, "max_width": 1, "candidates": 1, "layer_chance": 0.5},
        vocab_size=2,
        seed=19,
    ),
    Cell("temperature 0", SamplingParams(), 5, {"num_draft_tokens": 3, "max_width": 4}, seed=16),
    Cell("temperature 0, stop token", SamplingParams(), 6, {"num_draft_tokens": 2}, frozenset({1}), 5, seed=17),
)
PARTICLE_CELLS = (
    _of_two("multinomial, two rounds", 4, {"resampling": "multinomial", "ess_threshold": 1.0}),
    _of_two("systematic, two rounds", 4, {"resampling": "systematic", "ess_threshold": 1.0}, temperature=0.8),
    _of_two("residual, two rounds", 4, {"resampling": "residual", "ess_threshold": 0.95}),
    _of_two("never resampled", 4, {"ess_threshold": 0.0}),
    _of_two("stop token", 3, {"ess_threshold": 1.0}, frozenset({1})),
    _of_two("penalties", 3, {"ess_threshold": 1.0}, presence_penalty=0.5),
    _of_two("nothing drafted", 3, {"ess_threshold": 1.0, "num_draft_tokens": 0}, top_k=1),
    _of_two("one particle", 4, {"num_particles": 1, "num_draft_tokens": 2}),
    _of_two("a draft model of one token", 4, {"ess_threshold": 1.0}, lacking=(0,), temperature=0.7),
    Cell(
        "a draft model without a token",
        SamplingParams(temperature=1.3),
        3,
        {"ess_threshold": 0.9, "missing_share": 0.3},
        seed=20,
        lacking=(1,),
    ),
)


def certify_population(
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    most: int | None = None,
    make: Build | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Certificate:
    """Certify a method that decodes groups, in all cells or the first ``most``. Raises BadInput for one without a law.

    ``settings``: on top of its tiny ones, under those of a cell. ``make``: builds it, in place of the registry.
    """
    base = {**find(name).tiny, **(settings or {})} if make is None else dict(settings or {})

    def built(context: Context, own: Mapping[str, Any]) -> Method:
        return build(name, context, {**base, **own}) if make is None else make(context, {**base, **own})

    kinds = {BeamRule: (BEAM_CELLS, _beams), ParticleRule: (PARTICLE_CELLS, _particles)}
    rule = _rule(built(tiny_context(3, 0), {}))
    found = next((one for kind, one in kinds.items() if isinstance(rule, kind)), None)
    if found is None:
        raise BadInput(f"method '{name}' decodes groups by a rule that states no law: there is nothing to certify")
    cells, test = found
    checks = []
    for number, cell in enumerate(cells[:most]):
        if on_progress is not None:
            on_progress(number, len(cells[:most]), cell.name)
        checks.append(test(cell, built))
    worst = max(one.max_abs_error or 0.0 for one in checks)
    failed = [one for one in checks if one.passed is False]
    what = (
        "hypotheses have the law of stochastic beam sampling, and at temperature 0 are those of beam search"
        if test is _beams
        else "weighted averages of every statistic equal the target's"
    )
    verdict = (
        f"exact: {what}, to within {worst:.1g} in {len(checks)} settings"
        if not failed
        else f"off by {failed[0].max_abs_error:.2g} with {failed[0].name}"
    )
    return Certificate(name, "population", False, verdict, worst, checks=tuple(checks))


def is_population(name: str, settings: Mapping[str, Any] | None = None) -> bool:
    """Whether a method decodes groups of sequences."""
    info = find(name)
    if info.lossless:
        return False
    try:
        return build(name, tiny_context(3, 0), {**info.tiny, **(settings or {})}).population is not None
    except BadInput:
        return False


def _rule(method: Method) -> object:
    if method.population is None:
        return None
    return method.population(Request((0,), method, SamplingParams(temperature=1.0), max_new_tokens=1)).rule


def _arrivals(cell: Cell, built: Build) -> Callable[[], Arrivals]:
    def arrivals() -> Arrivals:
        context = cell.context
        method = built(context, cell.settings)
        request = Request(cell.prompt, method, cell.params, max_new_tokens=cell.length, stop_ids=cell.stop_ids)
        return context.target, [request], 0

    return arrivals


# ------------------------------------------------------------------------------------------------------- beams


def _beams(cell: Cell, built: Build) -> Check:
    context = cell.context
    method = built(context, cell.settings)
    rule = _rule(method)
    assert isinstance(rule, BeamRule)
    table = random_table(cell.vocab_size, cell.seed)
    expected = sequential_beams(table, cell, rule.options)
    found: dict[Hypotheses, float] = defaultdict(float)
    for generation, weight in enumerated_runs(_arrivals(cell, built)):
        found[tuple(one.tokens for one in generation.hypotheses)] += weight
    error = distance(found, expected)
    return Check(cell.name, error <= TOLERANCE, max_abs_error=error)


def sequential_beams(table: Table, cell: Cell, options: BeamOptions) -> dict[Hypotheses, float]:
    """The distribution of all hypotheses of stochastic beam sampling, or of beam search at temperature 0, one token at
    a time: float64, without engine, tree and draft. ``options``: early stopping must be False."""
    found: dict[Hypotheses, float] = defaultdict(float)
    todo: list[tuple[dict[Output, float], dict[Output, float], float]] = [({(): 0.0}, {}, 1.0)]
    while todo:
        running, finished, weight = todo.pop()
        length = len(next(iter(running))) + 1
        pairs = _continuations(table, cell, running)
        for order, share in _orders(pairs, cell, options.num_beams, last=length == cell.length):
            ended = dict(finished)
            going: dict[Output, float] = {}
            for rank, tokens in enumerate(order):
                score = pairs[tokens][0]
                if tokens[-1] in cell.stop_ids or length == cell.length:
                    if rank < options.num_beams:
                        ended[tokens] = score / length**options.length_penalty
                elif len(going) < options.num_beams:
                    going[tokens] = score
            best = sorted(ended, key=lambda one: -ended[one])[: options.num_beams]
            kept = {one: ended[one] for one in best}
            full = len(kept) == options.num_beams
            hopeless = full and going and max(going.values()) / length**options.length_penalty <= min(kept.values())
            if not going or hopeless:
                found[tuple(best)] += weight * share
            else:
                todo.append((going, kept, weight * share))
    return found


def _continuations(table: Table, cell: Cell, running: Mapping[Output, float]) -> dict[Output, tuple[float, float]]:
    """All continuations of the beams that may follow: log-probability, and weight in a draw (temperature above 0)."""
    found = {}
    for tokens, score in running.items():
        logits = table((*cell.prompt, *tokens)).double()
        rows = logits.log_softmax(-1).tolist()
        least = -math.inf
        if cell.params.top_k:
            least = sorted(rows, reverse=True)[min(cell.params.top_k, len(rows)) - 1]
        for token, row in enumerate(rows):
            if row >= least:
                total = score + row
                drawn = math.exp(total / cell.params.temperature) if cell.params.temperature else 0.0
                found[(*tokens, token)] = (total, drawn)
    return found


def _orders(
    pairs: Mapping[Output, tuple[float, float]], cell: Cell, beams: int, *, last: bool
) -> list[tuple[tuple[Output, ...], float]]:
    """Every order in which continuations may be taken, as far as it matters, and its probability."""
    most = max(2, 1 + len(cell.stop_ids)) * beams
    if cell.params.greedy:
        ranked = sorted(pairs, key=lambda one: -pairs[one][0])
        return [(tuple(ranked[:most]), 1.0)]
    done: list[tuple[tuple[Output, ...], float]] = []
    todo: list[tuple[tuple[Output, ...], float]] = [((), 1.0)]
    while todo:
        taken, share = todo.pop()
        going = sum(one[-1] not in cell.stop_ids for one in taken)
        enough = len(taken) >= beams and (last or going >= beams)
        left = {one: weight for one, (_, weight) in pairs.items() if one not in taken}
        if enough or len(taken) == most or not left:
            done.append((taken, share))
            continue
        total = sum(left.values())
        todo += [((*taken, one), share * weight / total) for one, weight in left.items()]
    return done


# --------------------------------------------------------------------------------------------------- particles


def _particles(cell: Cell, built: Build) -> Check:
    table = random_table(cell.vocab_size, cell.seed)
    target = autoregressive_distribution(table, cell.vocab_size, cell.params, cell.prompt, cell.length, cell.stop_ids)
    estimate: dict[Output, float] = defaultdict(float)
    answers: dict[Output, float] = defaultdict(float)
    for generation, weight in enumerated_runs(_arrivals(cell, built)):
        particles = generation.hypotheses
        for one in particles:
            estimate[one.tokens] += weight * math.exp(one.log_weight) / len(particles)
        answers[particles[0].tokens] += weight
    error = distance(estimate, target)
    if cell.settings.get("num_particles") == 1:
        error = max(error, distance(answers, _of_one(cell, built)))
    return Check(cell.name, error <= TOLERANCE, max_abs_error=error)


def _of_one(cell: Cell, built: Build) -> dict[Output, float]:
    """The law of one particle's answer: draft tokens from the draft model, every last of a round from the target."""
    drafted = int(cell.settings["num_draft_tokens"])
    draft = cell.context.bindings.need("draft model", "")[0].load()
    found: dict[Output, float] = {(): 1.0}
    for at in range(cell.length):
        begin = at - at % (drafted + 1)
        room = cell.length - begin - 1
        own = at - begin >= min(drafted, room)
        table: Table = random_table(cell.vocab_size, cell.seed) if own else draft.table
        longer: dict[Output, float] = {}
        for tokens, weight in found.items():
            law = (table((*cell.prompt, *tokens)).double() / cell.params.temperature).softmax(-1)
            for token in torch.nonzero(law).flatten().tolist():
                longer[(*tokens, token)] = weight * float(law[token])
        found = longer
    return found
