"""Replays give the accepted lengths of decoding: exactly at temperature 0, in distribution above it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.block import Block
from outpace.acceptance.rejection import RecursiveRejection, Rejection
from outpace.controllers.fixed import Fixed
from outpace.core.chance import ChanceSource, Enumeration
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.drafting.model_drafter import DraftModel
from outpace.engine.decoder import Decoder
from outpace.engine.known_answers import KnownAnswer, close_answers, known_answers
from outpace.engine.method import Method
from outpace.engine.replay import ReplayTarget, replay, replayable
from outpace.engine.request import Request
from outpace.engine.round_records import UNCOUNTED, RoundRecord, record_rounds
from outpace.engine.teacher_forcing import chain_rounds, likelihood_ratios, path_acceptance
from outpace.methods.registry import Context, build
from outpace.model import Model
from outpace.targets.costs import ForwardCosts
from outpace.targets.table import TableTarget, random_table
from support import Toy, autoregressive_distribution, certain_tree

SAMPLED = SamplingParams(temperature=1.0)
PROMPTS = [(1, 2, 1, 2), (3,), (4, 4, 2, 4), (5, 1)]


def counted(rounds: list[RoundRecord]) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """What does not depend on a clock."""
    return [(one.requests, one.drafted, one.committed) for one in rounds]


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize(
    ("name", "settings"), [("pld", {}), ("pld", {"num_draft_tokens": 3}), ("sam", {}), ("auto", {}), ("none", {})]
)
def test_a_greedy_replay_is_decoding_round_by_round(name: str, settings: dict[str, int], at_once: int) -> None:
    target = TableTarget(12, random_table(12, 8))
    method = build(name, Context(target), settings)
    requests = [Request(prompt, method, max_new_tokens=30, stop_ids=frozenset({0})) for prompt in PROMPTS]
    answers = known_answers(target, requests)
    replayed = replay(target, answers, method, at_once)
    assert counted(replayed) == counted(record_rounds(target, requests, at_once))
    tokens = [
        sum(count for one in replayed for at, count in zip(one.requests, one.committed, strict=True) if at == number)
        for number in range(len(PROMPTS))
    ]
    assert tokens == [len(one.tokens) for one in answers]


def rounds_by_answer(target: TableTarget, method: Method, prompt: tuple[int, ...], length: int) -> float:
    """The expected number of rounds of decoding, by all outcomes."""

    def program(chance: ChanceSource) -> int:
        decoder = Decoder(target)
        generation = decoder.submit(Request(prompt, method, SAMPLED, max_new_tokens=length))
        generation.sequence.chance = chance
        decoder.run()
        return generation.metrics.rounds

    return sum(weight * rounds for rounds, weight in Enumeration.outcomes(program, limit=500_000))


def answer(target: TableTarget, prompt: tuple[int, ...], tokens: tuple[int, ...], table: object = None) -> KnownAnswer:
    probs = []
    for at, token in enumerate(tokens):
        row = target.table((*prompt, *tokens[:at])).softmax(-1)
        probs.append(float(row[token]))
    return KnownAnswer(prompt, tokens, tuple(probs), target.sequence(prompt, SAMPLED), SAMPLED, len(tokens))


def test_deterministic_drafts_of_sampled_answers_are_accepted_as_often_as_in_decoding() -> None:
    target, prompt, length = TableTarget(3, random_table(3, 4)), (1, 2), 4
    toy = Toy(certain_tree(7, 3, nodes=4), Proposal(tree=True))
    method = Method("toy", toy, RecursiveRejection(), Fixed(3))
    expected = rounds_by_answer(target, method, prompt, length)
    found = 0.0
    for tokens, weight in autoregressive_distribution(target.table, SAMPLED, prompt, length).items():
        found += weight * len(replay(target, [answer(target, prompt, tokens)], method))
    assert found == pytest.approx(expected, abs=1e-6)
    assert expected < length - 0.3


@pytest.mark.parametrize(("rule", "block"), [(Block(), True), (Rejection(), False)])
@pytest.mark.parametrize("gamma", [1, 2])
def test_chains_of_a_draft_model_follow_from_likelihood_ratios(rule: AcceptanceRule, block: bool, gamma: int) -> None:
    target, draft, prompt, length = TableTarget(3, random_table(3, 4)), TableTarget(3, random_table(3, 9)), (1, 2), 4
    method = Method("draft-model", DraftModel(draft), rule, Fixed(gamma))
    expected = rounds_by_answer(target, method, prompt, length) - 1.0
    found = 0.0
    for tokens, weight in autoregressive_distribution(target.table, SAMPLED, prompt, length).items():
        [ratios] = likelihood_ratios(draft, [answer(target, prompt, tokens)])
        found += weight * chain_rounds(ratios, gamma, block=block).rounds
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_draft_model_whose_context_ends_before_the_answer_drafts_nothing() -> None:
    target, draft = TableTarget(3, random_table(3, 4)), TableTarget(3, random_table(3, 9), context_length=4)
    long, short = answer(target, (1, 2) * 3, (0, 1, 2)), answer(target, (1, 2), (0, 1, 2))
    assert likelihood_ratios(draft, [long])[0] == [0.0] * 3
    assert likelihood_ratios(draft, [short])[0] == [0.0] * 3  # its room is less than the answer
    assert max(likelihood_ratios(TableTarget(3, random_table(3, 9)), [short])[0]) > 0.0


def test_block_verification_passes_a_path_that_a_likely_token_makes_up_for() -> None:
    ratios = [2.0, 0.5, 0.5]
    assert path_acceptance(ratios) == [1.0, 1.0, 0.5]
    assert path_acceptance(ratios, block=False) == [1.0, 0.5, 0.25]


def test_greedy_chains_are_those_of_decoding(smollm2: Model) -> None:
    method = smollm2.method("draft-model", {"num_draft_tokens": 3}, draft_model="draft-lm")
    tokens = tuple(smollm2.tokenizer.chat([{"role": "user", "content": "Name three colors."}]))
    request = Request(tokens, method, max_new_tokens=24, stop_ids=smollm2.eos_ids)
    [known] = answers = known_answers(smollm2.target, [request])
    drafter = method.drafter
    assert isinstance(drafter, DraftModel)
    expected = chain_rounds(likelihood_ratios(drafter.draft, answers)[0], 3)
    decoded = record_rounds(smollm2.target, [request])
    close_answers(smollm2.target, answers)
    assert expected.rounds == len(decoded) - 1
    assert sum(one.committed[0] for one in decoded) == len(known.tokens)


@pytest.mark.parametrize("settings", [{"max_nodes": 6, "depth": 3}, {"topk": 1, "max_nodes": 3, "depth": 3}])
def test_a_head_drafts_from_the_states_that_were_kept(smollm2: Model, settings: dict[str, int]) -> None:
    method = smollm2.method("eagle3", settings)
    requests = [
        Request(tuple(smollm2.tokenizer.chat([{"role": "user", "content": text}])), method, max_new_tokens=20)
        for text in ("Why is the sky blue?", "List the first ten numbers.")
    ]
    answers = known_answers(smollm2.target, requests, method.drafter.aux_hidden_state_layers)
    replayed = counted(replay(smollm2.target, answers, method, 2))
    assert replayed == counted(record_rounds(smollm2.target, requests, 2))
    close_answers(smollm2.target, answers)
    assert len(replayed) < 20


def test_what_cannot_be_replayed_is_refused() -> None:
    target = TableTarget(5)
    context = Context(target)
    chain = Method("draft-model", DraftModel(TableTarget(5, seed=3)), Block(), Fixed(2))
    assert replayable(chain, SamplingParams())
    assert not replayable(chain, SAMPLED)
    assert not replayable(build("recycling", context), SamplingParams())
    assert not replayable(build("lookahead", context), SamplingParams())
    with pytest.raises(ValueError, match="do not follow from known answers"):
        replay(target, [answer(target, (1,), (2, 3))], chain)
    with pytest.raises(BadInput, match="not known"):
        record_rounds(ReplayTarget(target, []), [Request((1, 2), build("pld", context))])


def test_a_batch_keeps_its_size_to_the_end() -> None:
    target = TableTarget(6, random_table(6, 3))
    method = build("none", Context(target))
    requests = [Request(prompt, method, max_new_tokens=length) for prompt, length in (((1,), 2), ((2,), 7), ((3,), 3))]
    rounds = record_rounds(target, requests, 2)
    assert {len(one.requests) for one in rounds} == {2}
    for number, length in enumerate((2, 7, 3)):
        assert sum(number in one.requests for one in rounds) == length
    assert UNCOUNTED in rounds[-1].requests


def test_an_answer_of_a_single_round_is_known() -> None:
    target = TableTarget(12, random_table(12, 8))
    method = build("none", Context(target), {})
    [known] = known_answers(target, [Request((1, 2), method, SAMPLED, max_new_tokens=1)])
    assert len(known.tokens) == len(known.probs) == 1 and 0.0 < known.probs[0] <= 1.0
    close_answers(target, [known])


@pytest.mark.parametrize(("each", "drafting"), [(0.0, True), (5.0, False)])
def test_whether_batches_draft_in_a_replay_follows_from_what_their_rounds_would_take(
    each: float, drafting: bool
) -> None:
    """A replay runs no forward, so its clock says nothing: drafts that make a round far longer are given up."""

    class Free(ForwardCosts):
        def _time(self, sequences: object, rows: int) -> float:
            return 1e-3

    target = TableTarget(12, random_table(12, 8), context_length=600)
    target.costs = Free(target)
    method, plain = build("pld", Context(target)), build("none", Context(target))
    prompts = [(at, more, at) for at in range(1, 11) for more in (2, 3)]
    answers = known_answers(target, [Request(one, plain, max_new_tokens=400) for one in prompts])

    def verifying(rows: Sequence[int], contexts: Sequence[int]) -> float:
        assert len(rows) == len(contexts) == 2
        return 1.0 + each * (sum(rows) - len(rows))

    rounds = replay(target, answers, method, 2, verifying)
    assert any(one.draft_tokens for one in rounds[:32])
    later = [one.draft_tokens > 0 for one in rounds[45:56]]
    assert any(later) is drafting
