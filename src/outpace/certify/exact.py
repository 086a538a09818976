"""The exact level: every outcome of the real round, weighed, on targets of three to five tokens.

A method is built from its tiny settings on table targets; whole outputs are enumerated through the decoder, and their
distribution is compared with autoregressive decoding's. Rules with continuous noise cannot be enumerated: their outputs
are sampled and tested against the exact distribution, and the smallest bias that this would have shown is stated.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from outpace.certify.certificate import Certificate, Check
from outpace.certify.distributions import (
    Arrivals,
    Output,
    OutputDistribution,
    autoregressive_distribution,
    distance,
    enumerated_distribution,
    output_of,
    run_once,
)
from outpace.certify.fit import detectable_bias, g_test, holm
from outpace.certify.letters import LETTERS, OTHER_LETTERS, Letters
from outpace.certify.toy_grammar import Brackets
from outpace.certify.toy_languages import SHORT
from outpace.core.chance import NotEnumerable, SeededChance
from outpace.core.sampling import SamplingParams
from outpace.datastore.store import Datastore
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.heads.base import Head
from outpace.heads.kinds import find_kind
from outpace.heads.untrained import other_choices, random_head
from outpace.methods.bindings import DRAFT_MODEL, Binding, Bindings
from outpace.methods.registry import Context, build
from outpace.model import Model
from outpace.targets.table import TableTarget, random_table, without

TOLERANCE = 1e-6
Make = Callable[[Context], Method]
"""Builds the method under test, afresh, for a tiny target."""


class NeverTwice:
    """The user's processor of the matrix: an output token does not come twice in a row of three (then all may)."""

    def begin(self, prompt: Seq[int]) -> frozenset[int]:
        return frozenset()

    def advance(self, state: frozenset[int], token: int) -> frozenset[int]:
        return state | {token}

    def process(self, state: frozenset[int], logits: Tensor) -> Tensor:
        if len(state) >= len(logits):
            return logits
        out = logits.clone()
        out[list(state)] = -torch.inf
        return out


SAMPLING: dict[str, SamplingParams] = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "top-k 2": SamplingParams(temperature=1.1, top_k=2),
    "top-p 0.8": SamplingParams(temperature=1.2, top_p=0.8),
    "min-p 0.2": SamplingParams(temperature=1.0, min_p=0.2),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.4),
    "logit bias": SamplingParams(temperature=1.0, logit_bias={1: 1.5, 2: -0.5}),
    "user's processor": SamplingParams(temperature=1.0, processors=(NeverTwice(),)),
    "grammar": SamplingParams(temperature=1.0, constraint=Brackets()),
    "greedy, penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5),
    "grammar, future validity": SamplingParams(temperature=0.9, constraint=SHORT, constraint_weighting="fvo-exact"),
}
PROMPTS: tuple[Output, ...] = ((0, 1, 2, 0, 1), (1, 1, 0))
NEIGHBOURS = ("alone", "beside autoregressive decoding")
SAME_NAMESPACE = ("after a request of its seed and namespace", "beside a request of its seed and namespace")
"""Neighbours of methods that keep something for later requests: what they drafted and learned there is drafted here."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the matrix."""

    sampling: str
    vocab_size: int
    length: int
    prompt: Output
    neighbour: str
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.sampling}, vocabulary {self.vocab_size}, {self.length} tokens after {list(self.prompt)}, "
            f"{self.neighbour}, table {self.seed}"
        )


def matrix(seed: int = 0, sampling: Mapping[str, SamplingParams] = SAMPLING) -> list[Setting]:
    """Every setting of the full certification; vocabularies, prompts and tables turn with the cells."""
    cells = []
    for number, (name, neighbour, prompt) in enumerate(product(sampling, NEIGHBOURS, PROMPTS)):
        vocab_size, length = ((3, 3), (3, 4), (4, 3), (5, 2))[(number + number // 4) % 4]
        cells.append(Setting(name, vocab_size, length, prompt, neighbour, seed * 1000 + number))
    return cells


def namespace_cells(seed: int = 0, sampling: Mapping[str, SamplingParams] = SAMPLING) -> list[Setting]:
    """The settings of :data:`SAME_NAMESPACE`: two tokens to choose from, so that both requests can be enumerated."""
    name = "top-k 2" if "top-k 2" in sampling else next(iter(sampling))
    return [
        Setting(name, 3, 3, prompt, neighbour, seed * 1000 + 500 + 3 * number)
        for number, (neighbour, prompt) in enumerate(zip(SAME_NAMESPACE, PROMPTS, strict=True))
    ]


def cells_of(method: Method, seed: int = 0, sampling: Mapping[str, SamplingParams] = SAMPLING) -> list[Setting]:
    """Every setting in which ``method`` is certified."""
    return [*matrix(seed, sampling), *(namespace_cells(seed, sampling) if method.drafter.remembers else ())]


def rotating_slice(
    cells: Seq[Setting], seed: int, count: int, sampling: Mapping[str, SamplingParams] = SAMPLING
) -> list[Setting]:
    """``count`` settings picked by ``seed``. One of them samples where any does: in a greedy one a lossless rule is not
    asked."""
    rng = random.Random(seed)
    first = rng.choice([cell for cell in cells if not sampling[cell.sampling].greedy] or list(cells))
    others = [cell for cell in cells if cell != first]
    return [first, *rng.sample(others, min(count - 1, len(others)))]


def tiny_context(
    vocab_size: int,
    seed: int,
    pieces: Seq[str | None] = LETTERS,
    others: Seq[str | None] = OTHER_LETTERS,
    lacking: Seq[int] = (),
) -> Context:
    """A table target, an untrained head, and toy draft models of its vocabulary and, with tokenizers, of another.

    ``pieces`` and ``others`` are the texts of the tokens of the two vocabularies. ``lacking``: tokens that the draft
    models never draft, as those over a part of the vocabulary.
    """

    def toy(size: int, number: int) -> TableTarget:
        return TableTarget(size, random_table(size, seed + number, order=1, sharpness=1.2))

    other = Model("toy", toy(len(others), 900), Letters(others), frozenset())
    drafts: dict[str, Binding] = {}
    named_heads = [""]

    def draft_model(name: str) -> Binding:
        if name not in drafts:
            drafted = toy(vocab_size, 500 + 200 * len(drafts))
            if lacking:
                drafted.table = without(drafted.table, lacking)
            drafts[name] = Binding(name, DRAFT_MODEL, lambda: drafted, choice=lambda: other)
        return drafts[name]

    def default(kind: str, name: str) -> Seq[Binding]:
        """Two draft models, or one of any name; a head of any kind and name: another name, other weights."""
        if kind == DRAFT_MODEL:
            return [draft_model(one) for one in ([name] if name else ["one", "two"])]
        if name not in named_heads:
            named_heads.append(name)
        number = (seed + named_heads.index(name)) % 4
        return [Binding(name or kind, kind, lambda: toy_head(kind, vocab_size, number))]

    return Context(
        TableTarget(vocab_size, seed=seed),
        Bindings(default=default),
        tokenizer=Letters(pieces[:vocab_size]),
        datastore=lambda: toy_datastore(vocab_size),
    )


@cache
def toy_head(kind: str, vocab_size: int, number: int) -> Head:
    """An untrained head for toy targets of one vocabulary; ``number`` varies vocabulary, LM head and options."""
    words, rank = vocab_size - number % 2, 2 if number == 2 else 0
    options = other_choices(find_kind(kind).Options) if number == 3 else None
    return random_head([kind], TableTarget(vocab_size), seed=number, vocabulary=words, rank=rank, options=options)


def toy_datastore(vocab_size: int) -> Datastore:
    """A corpus of three documents over a toy vocabulary, with contexts that go on in several ways."""
    rng = random.Random(vocab_size)
    return Datastore.of([rng.randrange(vocab_size) for _ in range(length)] for length in (4, 9, 12))


def requests(make: Make, setting: Setting, params: SamplingParams) -> Arrivals:
    """The requests of one cell: its neighbour's, and the method's, which is the last to join."""
    context = tiny_context(setting.vocab_size, setting.seed)
    watched = Request(setting.prompt, make(context), params, max_new_tokens=setting.length)
    if setting.neighbour == "alone":
        return context.target, [watched], 0
    if setting.neighbour == "beside autoregressive decoding":
        # One sampled token, then gone: it leaves the batch while the watched request runs on.
        other = Request((2, 0), build("none", context), SamplingParams(temperature=1.0), max_new_tokens=1)
        return context.target, [other, watched], 0
    watched = replace(watched, namespace="shared")
    # A token more than the other: what a drafter learns of a token, it often learns a round later.
    twin = replace(watched, max_new_tokens=setting.length + 1)
    whole = setting.neighbour == SAME_NAMESPACE[0]
    return context.target, [twin, watched], twin.max_new_tokens if whole else setting.length


def certify_exact(
    name: str,
    make: Make,
    settings: Seq[Setting] | None = None,
    *,
    sampling: Mapping[str, SamplingParams] = SAMPLING,
    samples: int = 20_000,
    alpha: float = 0.01,
    seed: int = 0,
    outcomes: int = 300_000,
    on_progress: Callable[[Setting], None] | None = None,
) -> Certificate:
    """Compare the distribution of whole outputs with autoregressive decoding's in every setting.

    Settings with continuous noise, or with more than ``outcomes``, are sampled: for them are ``samples`` and ``alpha``.
    ``sampling``: the parameters that settings name.
    """
    checks: list[Check] = []
    freedoms: list[int] = []
    drafted = 0
    for setting in matrix(seed, sampling) if settings is None else settings:
        if on_progress is not None:
            on_progress(setting)
        params = sampling[setting.sampling]
        table = random_table(setting.vocab_size, setting.seed)
        plain = autoregressive_distribution(table, setting.vocab_size, params, setting.prompt, setting.length)
        try:
            proposal_distribution, count = enumerated_distribution(partial(requests, make, setting, params), outcomes)
            error = distance(proposal_distribution, plain)
            checks.append(Check(str(setting), error <= TOLERANCE, max_abs_error=error))
        except NotEnumerable as reason:
            p_value, freedom, count = _sampled(partial(requests, make, setting, params), plain, samples, seed)
            checks.append(Check(str(setting), None, p_value=p_value, note=f"sampled: {reason}"))
            freedoms.append(freedom)
        drafted += count
    certificate = _conclude(name, checks, freedoms, samples, alpha)
    if certificate.lossless and not drafted and make(tiny_context(3, 0)).may_draft:
        return replace(certificate, lossless=None, verdict="inconclusive: the method drafted nothing in any setting")
    return certificate


def _sampled(
    batch: Callable[[], Arrivals], plain: OutputDistribution, samples: int, seed: int
) -> tuple[float, int, int]:
    counts: Counter[Output] = Counter()
    drafted = 0
    for number in range(seed * samples, (seed + 1) * samples):
        generation = run_once(batch, partial(SeededChance.reseeded, seed=number))
        counts[output_of(generation)] += 1
        drafted += generation.metrics.drafted
    outcomes = list({*plain, *counts})
    return *g_test([counts[o] for o in outcomes], [samples * plain.get(o, 0.0) for o in outcomes]), drafted


def _conclude(name: str, checks: list[Check], freedoms: list[int], samples: int, alpha: float) -> Certificate:
    errors = [check.max_abs_error for check in checks if check.max_abs_error is not None]
    p_values = [check.p_value for check in checks if check.p_value is not None]
    worst = max(errors, default=None)
    p_value = holm(p_values) if p_values else None
    exact_fails = worst is not None and worst > TOLERANCE
    sampled_fails = p_value is not None and p_value < alpha
    power = [detectable_bias(samples, freedom, alpha / len(p_values)) for freedom in freedoms]
    bias = max((one for one in power if one is not None), default=None)
    if exact_fails:
        first = next(check for check in checks if check.passed is False)
        verdict = f"not lossless: output probabilities are off by {first.max_abs_error:.2g} with {first.name}"
    elif sampled_fails:
        verdict = (
            f"not lossless: sampled outputs differ in distribution from autoregressive decoding, p = {p_value:.2g}"
        )
    elif not checks:
        verdict = "no setting was run"
    elif p_values:
        # One possible outcome a setting, say at temperature 0, leaves a test nothing to find.
        size = "that these samples could show" if bias is None else f"above {bias:.3g} (total variation)"
        verdict = f"no bias {size} in {len(p_values)} sampled settings"
        if errors:
            verdict += f"; {len(errors)} settings exact to {worst:.1g}"
    else:
        verdict = (
            f"exact: output probabilities equal those of autoregressive decoding to within {worst:.1g} in "
            f"{len(errors)} settings"
        )
    lossless = None if not checks else not (exact_fails or sampled_fails)
    return Certificate(name, "exact", lossless, verdict, worst, p_value, bias, checks=tuple(checks))
