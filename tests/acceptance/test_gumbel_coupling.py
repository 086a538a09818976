"""Gumbel coupling: the output is fixed by the seed, whatever drafts; it is lossless; and it accepts as often as the
paper says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outpace.acceptance.gumbel_coupling import GumbelCoupling
from outpace.certify.exact import NEIGHBOURS, Setting, certify_exact, tiny_context
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance, SeededChance
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.shared_noise import SHARED_NOISE
from outpace.drafting.model_drafter import DraftModel
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods.registry import Context, build, find
from outpace.targets.table import TableTarget, random_table
from weights_support import with_drafts

VOCAB = 24
TARGET = TableTarget(VOCAB, random_table(VOCAB, 1))
INNER = {"levels": 1, "inner_rule": "gumbel-coupling"}
PARAMS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def coupled(name: str, draft: int = 2, **settings: Any) -> Method:
    model = TARGET if draft == 1 else TableTarget(VOCAB, random_table(VOCAB, draft, sharpness=1.2))
    second = TableTarget(VOCAB, random_table(VOCAB, draft + 50))
    return build(name, with_drafts(TARGET, model, second), settings, "gumbel-coupling")


DRAFTERS: dict[str, Callable[[], Method]] = {
    "nothing": lambda: coupled("none"),
    "a draft model": lambda: coupled("draft-model", 2, num_draft_tokens=3),
    "another draft model": lambda: coupled("draft-model", 3, num_draft_tokens=3),
    "longer drafts": lambda: coupled("draft-model", 2, num_draft_tokens=7),
    "the target itself": lambda: coupled("draft-model", 1, num_draft_tokens=4),
    "a deterministic tree": lambda: coupled("draft-model", 2, topk=3, max_nodes=8),
    "copies": lambda: coupled("pld"),
    "a drafter with a memory": lambda: coupled("cacheback"),
    "merged": lambda: coupled("merge", 2, parts=("pld", "draft-model")),
    "cascade": lambda: coupled("cascade", 3, parts=("pld", "draft-model"), confidence=0.5),
    "chosen by a bandit": lambda: coupled("metasd", 3, parts=("pld", "draft-model")),
    "a decoder over pld": lambda: coupled("hsd", 2, lengths=(4,), inner="pld", **INNER),
    "a decoder over a draft model": lambda: coupled("hsd", 2, lengths=(5,), inner="draft-model", **INNER),
    "a decoder, variable": lambda: coupled("hsd", 2, lengths=(3,), inner="pld", handover="variable", **INNER),
    "triforce": lambda: coupled("triforce", 2, num_draft_tokens=4, inner=2, retrieved=1, chunk=1, window=2, sink=1),
}


def answer(method: Method, seed: int, **params: Any) -> Generation:
    decoder = Decoder(TARGET)
    generation = decoder.submit(Request((0, 1, 2, 0, 1), method, SamplingParams(seed=seed, **params), 16))
    decoder.run()
    assert generation.error is None
    return generation


@pytest.mark.certification
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_whatever_drafts_the_seed_fixes_the_answer(params: dict[str, float]) -> None:
    plain = [answer(DRAFTERS["nothing"](), seed, **params).tokens for seed in range(12)]
    assert len(set(map(tuple, plain))) == 12
    for name, make in DRAFTERS.items():
        one = make()
        found = [answer(one, seed, **params) for seed in range(12)]
        assert [generation.tokens for generation in found] == plain, name
        if name not in ("nothing", "copies", "a drafter with a memory"):  # these find little in so short a text
            assert sum(generation.metrics.accepted for generation in found) > 0, name


def test_a_draft_model_that_is_the_target_is_always_accepted() -> None:
    for seed in range(6):
        metrics = answer(DRAFTERS["the target itself"](), seed, temperature=1.0).metrics
        assert metrics.accepted == metrics.drafted > 0


def test_requests_beside_one_another_do_not_matter() -> None:
    alone = {seed: answer(DRAFTERS["a draft model"](), seed, temperature=1.0).tokens for seed in range(3)}
    decoder, made = Decoder(TARGET), [DRAFTERS["longer drafts"](), DRAFTERS["nothing"](), DRAFTERS["merged"]()]
    running = [
        decoder.submit(Request((0, 1, 2, 0, 1), one, SamplingParams(1.0, seed=seed), 16))
        for seed, one in enumerate(made)
    ]
    decoder.run()
    assert [one.tokens for one in running] == list(alone.values())


@pytest.mark.parametrize("name", ["rsd", "sampled-tree", "specinfer", "mcsjd", "hsd"])
def test_a_drafter_that_cannot_share_the_noise_is_refused_in_words(name: str) -> None:
    with pytest.raises(BadInput, match=f"needs draft tokens that are drawn with the noise .* but '{name}' draws"):
        build(name, tiny_context(3, 0), {}, "gumbel-coupling")


# ----------------------------------------------------------------------------------------------------- lossless

CELLS = [
    Setting("temperature 1", 3, 3, (0, 1, 2, 0, 1), NEIGHBOURS[0], 8),
    Setting("top-p 0.8", 4, 3, (1, 1, 0), NEIGHBOURS[1], 9),
    Setting("penalties", 3, 3, (1, 1, 0), NEIGHBOURS[0], 10),
]
LOSSLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "draft-model": ("draft-model", {"num_draft_tokens": 2}),
    "merge": ("merge", {"parts": ("pld", "draft-model"), "settings": {"draft-model": {"num_draft_tokens": 1}}}),
    "eagle3": ("eagle3", {"mode": "chain", "depth": 2}),
    "pard2": ("pard2", {"sampled": True}),
    "early-exit": ("early-exit", {}),
    "hsd": ("hsd", {"lengths": (2,), "inner": "pld", **INNER}),
    "triforce": ("triforce", {}),
}


@pytest.mark.certification
@pytest.mark.parametrize("name", LOSSLESS)
def test_outputs_are_exact_where_all_outcomes_are_enumerated(name: str) -> None:
    method, settings = LOSSLESS[name]

    def make(context: Context) -> Method:
        return build(method, context, {**find(method).tiny, **settings}, "gumbel-coupling")

    certificate = certify_exact(name, make, CELLS)
    assert certificate.lossless is True, certificate
    assert certificate.max_abs_error is not None
    assert certificate.p_value is None, "nothing was sampled"


@pytest.mark.certification
def test_inner_rounds_may_share_noise_under_another_rule() -> None:
    """The inner tokens are then draws that the outer rule judges; what it has seen is drawn anew."""

    def make(context: Context) -> Method:
        return build("hsd", context, {"lengths": (2,), "inner": "pld", **INNER})

    certificate = certify_exact("hsd", make, CELLS[:1])
    assert certificate.lossless is True, certificate
    assert certificate.p_value is None


# --------------------------------------------------------------------------------------------------- acceptance


@pytest.mark.certification
@pytest.mark.parametrize("seed", range(6))
def test_acceptance_is_the_papers_and_between_its_bounds(seed: int) -> None:
    target = TableTarget(4, random_table(4, seed))
    draft = TableTarget(4, random_table(4, seed + 40, sharpness=1.5))
    p, q = (one.table((0, 1)).double().softmax(-1) for one in (target, draft))
    drafted = Method("drafts", DraftModel(draft), GumbelCoupling(), Fixed(1))
    accepted = 0.0
    # Two tokens: the first round drafts one, and the answer is two tokens in one round where it is accepted.
    rounds: Counter[int] = Counter()
    samples = 3000
    for number in range(samples):
        decoder = Decoder(target)
        generation = decoder.submit(Request((0, 1), drafted, SamplingParams(1.0, seed=number), 2))
        decoder.step()
        rounds[len(generation.tokens)] += 1
    accepted = rounds[2] / samples
    expected = sum(1 / sum(max(float(p[j] / p[x]), float(q[j] / q[x])) for j in range(4)) for x in range(4))
    distance = float((p - q).abs().sum() / 2)
    assert abs(accepted - expected) < 5 * (expected * (1 - expected) / samples) ** 0.5 + 1e-9
    assert (1 - distance) / (1 + distance) - 1e-9 <= expected <= 1 - distance + 1e-9


def test_noise_is_drawn_once_for_each_position() -> None:
    """A position's noise serves the draft, the rule, and later rounds that draft there again."""
    opened: Counter[int] = Counter()

    class Counting(SeededChance):
        def at(self, position: int, purpose: str) -> Chance:
            opened[position] += purpose == SHARED_NOISE
            return super().at(position, purpose)

    method = coupled("draft-model", 2, num_draft_tokens=4)
    decoder = Decoder(TARGET)
    generation = decoder.submit(Request((0, 1, 2), method, SamplingParams(1.0), 20))
    generation.sequence.chance = Counting(5)
    decoder.run()
    assert {opened[position] for position in range(3, 23)} == {1}
    noise = generation.sequence.noise
    assert noise is not None
    assert not noise._streams, "what is committed is not kept"
    assert generation.metrics.rounds < 20
