"""del: what every exit would have drafted, and the choice of exit and length that follows from it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from outpace.acceptance.base import Verdict
from outpace.certify.exact import certify_exact, matrix
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.self_draft import DraftPass
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods import registry
from outpace.methods.registry import Context
from outpace.methods.self_speculative.early_exit import EarlyExit, EarlyExitState, ExitRecord, exits_of
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.sub_graph import SubGraph
from outpace.targets.table import TableTarget
from self_draft_support import TARGETS, context, decode, plain, spare_model, texts
from target_suite import random_tokens

RNG = random.Random(2)
PROMPTS = [random_tokens(count, RNG) for count in (14, 5)]
FREE: dict[str, Any] = {"row_cost": 0.0, "head_cost": 0.0, "num_draft_tokens": 4}
"""Settings under which drafting is cheap, so that it happens."""


def late() -> Any:
    """A model whose last two layers hardly matter: after two, and after three, it has said what it will."""
    return spare_model({2, 3}, {2, 3})


def built(target: Target, **settings: Any) -> tuple[Method, EarlyExit]:
    method = registry.build("del", context(target), {**FREE, **settings})
    assert isinstance(method.drafter, EarlyExit)
    return method, method.drafter


def test_lossless_on_a_slice_of_the_matrix() -> None:
    def make(context: Context) -> Method:
        return registry.build("del", context, registry.find("del").tiny)

    certificate = certify_exact("del", make, [matrix(1)[index] for index in (10, 13)])
    assert certificate.lossless, certificate.verdict


@pytest.mark.parametrize("kind", TARGETS)
def test_greedy_decoding_is_plain_decoding(kind: str) -> None:
    target = TARGETS[kind](late())
    found = decode(target, built(target)[0], PROMPTS, 20)
    assert texts(found) == texts(decode(target, plain(), PROMPTS, 20))
    assert all(one.metrics.accepted > 4 for one in found)


# --------------------------------------------------------------------------------------------------- shadow tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_shadow_acceptance_is_what_each_exit_would_have_had(temperature: float) -> None:
    """Of every exit, on every accepted row, against a forward that really exits there."""
    target = DenseTarget(read_decoder_spec(spare_model({2}, {2})))
    method, drafter = built(target, rows=999, rest=1)
    drafter.memory = 1.0  # nothing fades, so that sums can be compared
    params = SamplingParams(temperature=temperature, seed=3)
    decoder = Decoder(target)
    generation = decoder.submit(Request(tuple(PROMPTS[0]), method, params, max_new_tokens=18))
    decoder.step()
    assert isinstance(generation.draft_state, EarlyExitState)
    records = generation.draft_state.exits
    priors = [ExitRecord(layer).rate for layer in drafter.aux_hidden_state_layers]
    while decoder.step():
        pass
    tokens = generation.sequence.tokens
    for record, prior in zip(records, priors, strict=True):
        expected = prior.total
        for at in range(len(PROMPTS[0]), len(tokens)):
            before = target.sequence(tokens[:at])
            target.prefill([before])
            exit_ = target.score([(before, TokenTree())], graph=SubGraph(stop=record.layer))[0].logits[0]
            if temperature:
                full = target.score([(before, TokenTree())])[0].logits[0]
                both = [(one / temperature).softmax(-1) for one in (exit_, full)]
                expected += float(torch.minimum(*both).sum())
            else:
                expected += int(exit_.argmax()) == tokens[at]
        assert record.rate.total == pytest.approx(expected, abs=1e-3)
        assert record.rate.weight == pytest.approx(prior.weight + len(tokens) - len(PROMPTS[0]))


def test_shadow_tokens_take_no_more_rows_than_rounds_have_earned() -> None:
    target = DenseTarget(read_decoder_spec(late()))
    for rows in (1, 2, 6):
        spent: list[int] = []
        head = target.lm_head

        def counted(hidden: torch.Tensor, head: Any = head, spent: list[int] = spent) -> Any:
            spent.append(len(hidden))
            return head(hidden)

        target.lm_head = counted  # type: ignore[method-assign]
        [one] = decode(target, registry.build("del", context(target), {**FREE, "rows": rows}), PROMPTS[:1], 60)
        target.lm_head = head  # type: ignore[method-assign]
        at_first = 2 * 3  # every exit on two tokens
        assert at_first <= sum(spent) <= at_first + rows * one.metrics.rounds
        assert sum(spent) > 0.5 * rows * one.metrics.rounds
        assert all(count % 3 == 0 for count in spent), "all three exits are judged on the same tokens"


def test_a_stop_token_that_comes_first_is_no_shadow_token() -> None:
    target = DenseTarget(read_decoder_spec(late()))
    [free] = decode(target, plain(), PROMPTS[:1], 1)
    decoder = Decoder(target)
    stop = frozenset(free.tokens)
    one = decoder.submit(Request(tuple(PROMPTS[0]), built(target)[0], max_new_tokens=4, stop_ids=stop))
    decoder.run()
    assert (list(one.tokens), one.finish_reason) == ([], "stop")


def test_exits_ask_for_no_states_of_the_prompt() -> None:
    """States of every layer for every token of a prompt would be more memory than its K/V."""
    target = DenseTarget(read_decoder_spec(late()))
    method, drafter = built(target)
    assert drafter.aux_hidden_state_layers == (1, 2, 3)
    decoder = Decoder(target)
    first = decoder.submit(Request(tuple(PROMPTS[0]), method, max_new_tokens=6, keep=True))
    decoder.run()
    assert first.sequence.states is None
    # So K/V of the first turn is continued as it is.
    prefilled: list[tuple[int, ...]] = []
    prefill = target.prefill

    def watched(sequences: Any, layers: Any = (), *rest: Any) -> None:
        prefilled.append((len(sequences[0].tokens) - sequences[0].kv.length - 1, *layers))
        prefill(sequences, layers, *rest)

    target.prefill = watched  # type: ignore[method-assign, assignment]
    longer = (*first.sequence.tokens, 5, 6)
    decoder.submit(Request(longer, method, max_new_tokens=2, kept=first.sequence))
    decoder.run()
    assert prefilled == [(2,)]


# ------------------------------------------------------------------------------------------------------ the choice


def record(layer: int, rate: float) -> ExitRecord:
    made = ExitRecord(layer)
    made.rate.total = rate * made.rate.weight
    return made


@pytest.mark.parametrize("seed", range(20))
def test_exit_and_length_have_the_most_tokens_per_layer(seed: int) -> None:
    rng = random.Random(seed)
    drafter = EarlyExit(TableTarget(5, layers=12), (3, 6, 9), head=rng.random() * 3, row=rng.random())
    exits = [record(layer, rng.random()) for layer in (3, 6, 9)]
    found, length = drafter.choice(exits, 6)

    def pace(one: ExitRecord, count: int) -> float:
        a = one.rate.value
        return (1 - a ** (count + 1)) / (1 - a) / (count * (one.layer + drafter.head + drafter.row) + 12 + drafter.head)

    best = max(pace(one, count) for one in exits for count in range(7))
    assert pace(found, length) == pytest.approx(best)


def test_nothing_is_drafted_where_no_exit_pays_and_again_when_one_does() -> None:
    target = TableTarget(5, layers=8)
    _, drafter = built(target, exits=[2, 4], rows=2, rest=3)
    sequence = target.sequence([0, 1, 2])
    state = drafter.begin(sequence)
    target.prefill([sequence])
    state.exits, state.rows = [record(2, 0.01), record(4, 0.05)], 0.0
    looked = []
    for _ in range(6):
        assert len(drafter.propose_batch([state], [Budget(4)])[0]) == 0
        weight = state.exits[0].rate.weight
        scores = target.score([(sequence, TokenTree())], aux_hidden_state_layers=drafter.aux_hidden_state_layers)
        drafter.observe(state, Verdict((), 1, scores[0], (1,)))
        looked.append(state.exits[0].rate.weight != weight)
    assert looked == [False, False, True] * 2, "a look at the exits every third round"
    state.exits = [record(2, 0.9), record(4, 0.05)]
    drafter.dynamic = False
    assert len(drafter.propose_batch([state], [Budget(4)])[0]) == 4


class Unlearning(EarlyExit):
    """The estimates switched off: every exit keeps its prior."""

    def learn(self, state: EarlyExitState, verdict: Verdict, drafted: DraftPass | None) -> None:
        return


def test_the_exit_that_predicts_is_found() -> None:
    """After two layers all is said, after one nothing is. By priors the cheapest exit looks best, and stays so."""
    accepted = {}
    for kind in (EarlyExit, Unlearning):
        target = DenseTarget(read_decoder_spec(late()))
        method, _ = built(target)
        drafter = kind(target, (1, 2, 3), dynamic=False)
        method = Method("del", drafter, method.rule, method.controller)
        decoder = Decoder(target)
        one = decoder.submit(Request(tuple(PROMPTS[0]), method, max_new_tokens=60))
        layers = []
        while decoder.step():
            layers.append(drafter.plan(one.draft_state, Budget(4))[0].stop)
        accepted[kind] = one.metrics.accepted
        assert set(layers[10:]) == ({2} if kind is EarlyExit else {1})
    assert accepted[EarlyExit] > 2 * accepted[Unlearning]


def test_confidence_ends_a_draft() -> None:
    """Stopping where an exit is unsure saves draft tokens that would be refused; switched off, they are drafted."""
    rates = {}
    for dynamic in (True, False):
        target = DenseTarget(read_decoder_spec(spare_model({2, 3}, {2, 3}, scale=0.1)))
        found = decode(target, built(target, exits=[2, 3], dynamic=dynamic, rest=1)[0], PROMPTS, 60)
        drafted = sum(one.metrics.drafted for one in found)
        assert drafted > 20
        rates[dynamic] = sum(one.metrics.accepted for one in found) / drafted
    assert rates[True] > rates[False] + 0.05


def test_thresholds_lie_between_right_and_wrong() -> None:
    one = ExitRecord(3)
    for _ in range(200):
        one.confidence_right.add(0.9, 0.9)
        one.confidence_wrong.add(0.3, 0.9)
    assert one.threshold == pytest.approx(0.6, abs=1e-3)


def test_the_verifying_forward_takes_over_the_exits_layers() -> None:
    class Cold(EarlyExit):
        def reusable_forward(self, states: Any) -> None:
            return None

    spent = {}
    for kind in (EarlyExit, Cold):
        target = DenseTarget(read_decoder_spec(late()))
        rows = 0
        run = target.run

        def counted(plan: Any, tokens: Any, run: Any = run, **options: Any) -> Any:
            nonlocal rows
            rows += (plan.stop - plan.start) * len(tokens)
            return run(plan, tokens, **options)

        target.run = counted  # type: ignore[method-assign]
        method, _ = built(target)
        decode(target, Method("del", kind(target, (1, 2)), method.rule, method.controller), PROMPTS, 30)
        spent[kind] = rows
    assert spent[EarlyExit] < 0.95 * spent[Cold]


# ---------------------------------------------------------------------------------------------------------- settings


def test_exits_are_checked() -> None:
    target = TableTarget(5, layers=12)
    assert exits_of(target, None) == tuple(range(1, 12)), "every layer but the last"
    assert exits_of(target, (9, 4, 4)) == (4, 9)
    assert exits_of(TableTarget(5, layers=2), None) == (1,)
    for exits in ((0,), (12,), (3, -1)):
        with pytest.raises(BadInput, match="cannot exit after"):
            exits_of(target, exits)
    with pytest.raises(BadInput, match="no exit"):
        exits_of(target, ())
    with pytest.raises(BadInput, match="no exit"):
        exits_of(TableTarget(5, layers=1), None)
