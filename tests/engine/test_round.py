"""The round as a life: requests join, leave, stop, continue; neighbours change nothing; K/V and tokens agree."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence as Seq
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.greedy import Greedy
from outpace.acceptance.rejection import RecursiveRejection
from outpace.api.result import result
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.text import TextStream
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import DraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.targets.base import Scores, Sequence
from outpace.targets.sub_graph import FULL, SubGraph
from outpace.targets.table import TableTarget, random_table
from support import (
    BYTES,
    CERTAIN_TREE,
    CHAIN,
    Alternate,
    BanAll,
    NeverTwice,
    Path,
    Pieces,
    Q,
    Releasing,
    Toy,
    both,
    certain_tree,
    check_consistent,
    method,
    sampled_chain,
    sampled_tree,
    toy_growers,
)

VOCAB = 6
TABLE = random_table(VOCAB, 1)
PLAIN = method(None)


class Counting(Toy):
    """A drafter that keeps state per sequence and notes its life."""

    def __init__(self, inner: Toy) -> None:
        super().__init__(inner.grow, inner.proposal)
        self.known: dict[int, Path] = {}
        self.log: list[str] = []

    def begin(self, sequence: Sequence) -> DraftState:
        assert id(sequence) not in self.known
        self.known[id(sequence)] = tuple(sequence.tokens)
        self.log.append("begin")
        return super().begin(sequence)

    def propose_batch(self, states: Seq[DraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        for state in states:
            tokens = tuple(state.sequence.tokens)
            assert self.known[id(state.sequence)] == tokens, "observe was not told everything"
        self.log.append(f"propose {len(states)}")
        return super().propose_batch(states, budgets)

    def observe_batch(self, states: Seq[DraftState], verdicts: Seq[Verdict]) -> None:
        for state, verdict in zip(states, verdicts, strict=True):
            sequence = state.sequence
            assert verdict.scores.sequence is sequence
            before = self.known[id(sequence)]
            assert (*before, *verdict.committed) == tuple(sequence.tokens)
            self.known[id(sequence)] = tuple(sequence.tokens)
        self.log.append(f"observe {len(states)}")

    def end(self, state: DraftState) -> None:
        del self.known[id(state.sequence)]
        self.log.append("end")


def perfect(table: Any = TABLE) -> Method:
    """Drafts the target's own greedy answer: everything is accepted at temperature 0."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        node, path = ROOT, tokens
        for _ in range(depth):
            token = int(table(path).argmax())
            node, path = tree.add(node, token), (*path, token)

    return method(grow, Proposal(), length=5)


def counting(length: int = 3) -> tuple[Method, Counting]:
    drafter = Counting(Toy(sampled_chain(Q(random_table(VOCAB, 2))), CHAIN))
    return Method("toy", drafter, RecursiveRejection(), Fixed(length)), drafter


def alone(request: Request, target: TableTarget | None = None, tokenizer: Pieces | None = None) -> Generation:
    target = target or TableTarget(VOCAB, TABLE)
    decoder = Decoder(target, tokenizer)
    generation = decoder.submit(request)
    decoder.run()
    assert generation.finish_reason is not None
    assert not decoder.active
    return generation


def greedy_answer(prompt: Path, length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(TABLE(tuple(tokens)).argmax()))
    return tokens[len(prompt) :]


# --------------------------------------------------------------------------------- batches and neighbours


def mixture(seed: int = 0) -> list[Request]:
    candidate_trees = toy_growers(VOCAB, seed)
    methods = [PLAIN, *(method(*one, length=3) for one in candidate_trees.values())]
    params = [
        SamplingParams(),
        SamplingParams(1.0, seed=7),
        SamplingParams(0.8, top_p=0.9, repetition_penalty=1.3, seed=8),
        SamplingParams(1.4, processors=(Alternate(),), seed=9),
        SamplingParams(0.0, processors=(NeverTwice(),), presence_penalty=0.3),
    ]
    return [
        Request((index % VOCAB, 1, (index * 5) % VOCAB), one, param, max_new_tokens=3 + index % 9)
        for index, (one, param) in enumerate(zip(methods, itertools.cycle(params), strict=False))
    ]


@settings(max_examples=25)
@given(st.data())
def test_neighbours_change_nothing(data: st.DataObject) -> None:
    """Whoever else runs, and whenever they join, a request's tokens are those it has alone."""
    requests = mixture(data.draw(st.integers(0, 20)))
    chosen = data.draw(st.lists(st.sampled_from(requests), min_size=1, max_size=6))
    target = TableTarget(VOCAB, TABLE)
    decoder = Decoder(target)
    generations = []
    for request in chosen:
        for _ in range(data.draw(st.integers(0, 3))):
            decoder.step()
        generations.append(decoder.submit(request))
    decoder.run()
    for request, generation in zip(chosen, generations, strict=True):
        assert generation.tokens == alone(request).tokens
        assert generation.sequence.tokens == [*request.prompt, *generation.tokens]
        assert generation.finish_reason == "length"
        check_consistent(target, generation)
    assert not decoder.active
    assert not decoder.step()


@settings(max_examples=20)
@given(st.integers(0, 100), st.integers(1, 12))
def test_at_temperature_0_every_method_says_what_plain_decoding_says(seed: int, length: int) -> None:
    for grow, proposal in toy_growers(VOCAB, seed).values():
        for rule in (Greedy(), RecursiveRejection()):
            one = Request((seed % VOCAB,), method(grow, proposal, rule=rule, length=4), max_new_tokens=length)
            assert alone(one).tokens == greedy_answer(one.prompt, length)


def test_the_seed_decides_and_nothing_else() -> None:
    request = Request((1,), method(sampled_chain(Q(TABLE)), CHAIN), SamplingParams(1.0, seed=3), max_new_tokens=30)
    other = dataclasses.replace(request, params=SamplingParams(1.0, seed=4))
    assert alone(request).tokens == alone(request).tokens
    assert alone(request).tokens != alone(other).tokens


def test_drafters_are_told_of_every_round_and_every_departure() -> None:
    one, drafter = counting()
    decoder = Decoder(TableTarget(VOCAB, TABLE))
    params = SamplingParams(1.0, seed=1)
    first = decoder.submit(Request((1,), one, params, max_new_tokens=6))
    decoder.step()
    second = decoder.submit(Request((2, 3), one, params, max_new_tokens=4))
    third = decoder.submit(Request((2, 3), PLAIN, params, max_new_tokens=9))
    while first.finish_reason is None and second.finish_reason is None:
        decoder.step()
    (first if second.finish_reason else second).cancel()
    decoder.run()
    assert third.finish_reason == "length"
    assert not drafter.known
    assert drafter.log.count("begin") == drafter.log.count("end") == 2
    assert drafter.log[:3] == ["begin", "propose 1", "observe 1"]
    assert "observe 2" in drafter.log


def test_one_forward_serves_all_and_only_those_with_a_budget_draft() -> None:
    class Watched(TableTarget):
        calls: list[list[int]]

        def score(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append([len(tree) for _, tree in batch])
            return super().score(batch, *args, **kwargs)

    target = Watched(VOCAB, TABLE)
    target.calls = []
    decoder = Decoder(target)
    decoder.submit(Request((1,), perfect(), max_new_tokens=7))
    decoder.submit(Request((2,), PLAIN, max_new_tokens=2))
    decoder.submit(Request((3,), perfect(), max_new_tokens=1))
    decoder.run()
    # five drafted and a bonus, then one token is left: drafting for it would be for nothing
    assert target.calls == [[5, 0, 0], [0, 0]]


# ------------------------------------------------------------------------------------------ where answers end


@pytest.mark.parametrize("length", range(1, 14))
def test_max_new_tokens_is_exact_and_the_cache_agrees(length: int) -> None:
    target = TableTarget(VOCAB, TABLE)
    for one in (PLAIN, perfect(), method(certain_tree(1, VOCAB), CERTAIN_TREE)):
        generation = alone(Request((2, 1), one, max_new_tokens=length), target)
        assert generation.tokens == greedy_answer((2, 1), length)
        assert generation.finish_reason == "length"
        check_consistent(target, generation)


def test_a_drafter_that_ignores_its_budget_is_cut() -> None:
    def long(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        node, path = ROOT, tokens
        for _ in range(9):
            token = int(TABLE(path).argmax())
            node, path = tree.add(node, token), (*path, token)

    target = TableTarget(VOCAB, TABLE)
    generation = alone(Request((2, 1), method(long, Proposal()), max_new_tokens=5), target)
    assert generation.tokens == greedy_answer((2, 1), 5)
    check_consistent(target, generation)
    assert generation.metrics.accepted == 5


@given(st.sets(st.integers(0, VOCAB - 1), max_size=3), st.integers(0, VOCAB - 1), st.booleans())
def test_stop_tokens_end_the_answer_and_are_not_part_of_it(stops: set[int], first: int, sampled: bool) -> None:
    params = SamplingParams(1.0, seed=first) if sampled else SamplingParams()
    unstopped = Request((first,), perfect(), params, max_new_tokens=12)
    free = alone(unstopped).tokens
    target = TableTarget(VOCAB, TABLE)
    generation = alone(dataclasses.replace(unstopped, stop_ids=frozenset(stops)), target)
    at = next((index for index, token in enumerate(free) if token in stops), None)
    if at is None:
        assert (generation.tokens, generation.finish_reason) == (free, "length")
    elif sampled:  # the stop token may have been cut from a longer path: what came before it is the same
        assert (generation.tokens, generation.finish_reason) == (free[:at], "stop")
    else:
        assert (generation.tokens, generation.finish_reason) == (free[:at], "stop")
        assert generation.sequence.tokens == [first, *free[: at + 1]]
    check_consistent(target, generation)


def text_target(text: str, context_length: int = 256) -> TableTarget:
    """A byte model that says one text, whatever it is given."""
    data = text.encode()

    def table(path: Path) -> Tensor:
        logits = torch.zeros(256)
        logits[data[len(path) - 1] if len(path) <= len(data) else 0] = 9.0
        return logits

    return TableTarget(256, table, context_length=context_length)


TEXT = "one é two 😀 three STOP four END five six seven"


@pytest.mark.parametrize(
    "stops", [(), ("STOP",), ("END", "STOP"), ("é",), ("o 😀",), ("nothing",), ("seven",), ("on",)]
)
@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("length", [5, 24, 30, 80])
def test_text_streams_and_stops(stops: tuple[str, ...], drafting: bool, length: int) -> None:
    target = text_target(TEXT + "\n" * 80)
    one = perfect(target.table) if drafting else PLAIN
    request = Request((65,), one, max_new_tokens=length, stop_strings=stops)
    decoder = Decoder(target, BYTES)
    generation = decoder.submit(request)
    pieces = list(decoder.stream(generation))
    whole = (TEXT + "\n" * 80).encode()[:length]
    expected = TextStream(BYTES, stops)
    taken = []
    for token in whole:
        taken.append(token)
        expected.push(token)
        if expected.stopped is not None:
            break
    expected.finish()
    assert "".join(pieces) == generation.text == expected.text
    assert generation.tokens == taken
    assert generation.finish_reason == ("stop" if len(taken) < length or expected.stopped else "length")
    check_consistent(target, generation)
    if "nothing" in stops or not stops:
        assert generation.text == whole.decode(errors="replace")


def test_streams_of_several_requests_lose_nothing() -> None:
    """Whoever steps the decoder, each stream yields its own whole text."""
    for order in itertools.permutations(range(3)):
        target = text_target(TEXT)
        decoder = Decoder(target, BYTES)
        generations = [
            decoder.submit(Request((65,), one, max_new_tokens=length))
            for one, length in ((PLAIN, 20), (perfect(target.table), 20), (PLAIN, 30))
        ]
        texts = {index: "".join(decoder.stream(generations[index])) for index in order}
        for index, generation in enumerate(generations):
            assert texts[index] == generation.text == TEXT.encode()[: len(generation.tokens)].decode()


def test_a_full_context_ends_the_answer() -> None:
    for one in (PLAIN, perfect()):
        target = TableTarget(VOCAB, TABLE, context_length=10)
        generation = alone(Request((1, 2, 3), one, max_new_tokens=50), target)
        assert generation.finish_reason == "length"
        assert generation.tokens == greedy_answer((1, 2, 3), 7)
        assert len(generation.sequence.tokens) == 10
        check_consistent(target, generation)


def test_cancelling() -> None:
    one, drafter = counting()
    target = TableTarget(VOCAB, TABLE)
    decoder = Decoder(target, Pieces([b"a", b"b", b"c", b"d", b"e", b"f"]))
    params = SamplingParams(1.0, seed=1)
    held = ("a!", "b!", "c!", "d!", "e!", "f!")
    request = Request((1,), one, params, max_new_tokens=50, stop_strings=held)
    stays = decoder.submit(dataclasses.replace(request, max_new_tokens=20))
    goes, never = decoder.submit(request), decoder.submit(request)
    never.cancel()
    decoder.step()
    decoder.step()
    assert len(goes.text) == len(goes.tokens) - 1
    goes.cancel()
    goes.cancel()
    so_far = list(goes.tokens)
    decoder.run()
    assert goes.finish_reason == never.finish_reason == "cancelled"
    assert goes.tokens == so_far
    assert goes.text == decoder.tokenizer.decode(so_far)  # type: ignore[union-attr]
    assert goes.take_text() == goes.text
    assert never.tokens == []
    check_consistent(target, goes)
    assert not drafter.known
    assert drafter.log.count("begin") == 2, "a request that was cancelled before it joined never begins"
    assert stays.tokens == alone(stays.request, tokenizer=Pieces([b"x"] * VOCAB)).tokens
    stays.cancel()
    assert stays.finish_reason == "length", "what has ended stays as it ended"


def test_every_cache_is_released_once() -> None:
    target = Releasing(VOCAB, TABLE)
    decoder = Decoder(target)
    request = Request((1, 2, 3), perfect(), max_new_tokens=5)
    kept = decoder.submit(dataclasses.replace(request, keep=True))
    decoder.submit(request)
    decoder.submit(request).cancel()
    decoder.run()
    assert list(target.held) == [id(kept.sequence.kv)]
    again = decoder.submit(dataclasses.replace(request, kept=kept.sequence, prompt=(1, 2, 3, 4)))
    running = decoder.submit(dataclasses.replace(request, max_new_tokens=50))
    decoder.step()
    running.cancel()
    decoder.run()
    assert again.finish_reason == "length"
    assert list(target.held) == [id(kept.sequence.kv)]
    with pytest.raises(BadInput):
        decoder.submit(dataclasses.replace(request, prompt=()))
    assert list(target.held) == [id(kept.sequence.kv)], "a refused request holds nothing"


# ------------------------------------------------------------------------------------------------ continuing


@settings(max_examples=30)
@given(st.data(), st.booleans())
def test_a_kept_conversation_continues_as_a_fresh_one(data: st.DataObject, sampled: bool) -> None:
    params = SamplingParams(1.0, seed=5, presence_penalty=0.4) if sampled else SamplingParams()
    one = method(both(sampled_chain(Q(TABLE)), certain_tree(1, VOCAB)), length=3)
    target = TableTarget(VOCAB, TABLE)
    decoder = Decoder(target)
    first = decoder.submit(Request((1, 2), one, params, max_new_tokens=5, stop_ids=frozenset({3}), keep=True))
    decoder.run()
    before = list(first.sequence.kv)
    history = first.sequence.tokens
    shared = data.draw(st.integers(1, len(history)))
    prompt = (*history[:shared], *data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)))
    request = Request(prompt, one, params, max_new_tokens=6)
    continued = decoder.submit(dataclasses.replace(request, kept=first.sequence))
    agreeing = next((i for i in range(len(prompt)) if tuple(history[: i + 1]) != prompt[: i + 1]), len(prompt))
    assert target.length(continued.sequence.kv) == min(len(prompt) - 1, len(before), agreeing)
    decoder.run()
    assert continued.tokens == alone(request).tokens
    check_consistent(target, continued)
    assert first.sequence.kv == before, "the kept state must stay as it was"


# ------------------------------------------------------------------------------------- what is said of a round


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_trace_shows_every_round(temperature: float) -> None:
    params = SamplingParams(temperature, seed=2)
    one = method(sampled_tree(Q(TABLE), (2, 2)), length=2)
    generation = alone(Request((1,), one, params, max_new_tokens=20, trace=True))
    assert [token for one_round in generation.rounds for token in one_round.committed] == generation.tokens
    assert len(generation.rounds) == generation.metrics.rounds
    for one_round in generation.rounds:
        path = [one_round.tree.tokens[node] for node in one_round.path]
        assert list(one_round.committed[: len(path)]) == path[: len(one_round.committed)]
        assert list(one_round.path) == (one_round.tree.path(one_round.path[-1]) if one_round.path else [])
    assert alone(Request((1,), one, params, max_new_tokens=5)).rounds == []


@pytest.mark.parametrize("stops", [frozenset[int](), frozenset({2, 4})])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_every_token_of_the_answer(stops: frozenset[int], temperature: float) -> None:
    params = SamplingParams(
        temperature, seed=3, logprobs=True, top_logprobs=2, repetition_penalty=1.2, logit_bias={1: 1.0}
    )
    for one in (PLAIN, perfect(), method(sampled_chain(Q(TABLE)), CHAIN, length=4)):
        generation = alone(Request((1, 5), one, params, max_new_tokens=15, stop_ids=stops))
        assert [entry.token for entry in generation.logprobs] == generation.tokens
        history = [1, 5]
        for entry in generation.logprobs:
            expected = TABLE(tuple(history)).log_softmax(-1)
            assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-5)
            assert [index for index, _ in entry.top] == expected.topk(2).indices.tolist()
            history.append(entry.token)
    assert alone(Request((1,), PLAIN, max_new_tokens=3)).logprobs == []


def test_logprobs_with_a_stop_string_cover_the_tokens() -> None:
    target = text_target(TEXT)
    params = SamplingParams(logprobs=True)
    request = Request((65,), perfect(target.table), params, max_new_tokens=40, stop_strings=("STOP",))
    generation = alone(request, target, BYTES)
    assert [entry.token for entry in generation.logprobs] == generation.tokens


# ------------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1,) * 300}, "300 tokens"),
        ({"prompt": (1, VOCAB)}, f"token {VOCAB}"),
        ({"prompt": (-1,)}, "token -1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -3}, "max_new_tokens"),
        ({"stop_strings": ("x",)}, "tokenizer"),
        ({"params": SamplingParams(logit_bias={VOCAB: 1.0})}, "logit_bias"),
        ({"method": method(None, rule=Greedy()), "params": SamplingParams(1.0)}, "temperature"),
    ],
)
def test_bad_requests_are_refused_and_disturb_nobody(change: Mapping[str, Any], words: str) -> None:
    decoder = Decoder(TableTarget(VOCAB, TABLE))
    good = decoder.submit(Request((1,), perfect(), max_new_tokens=8))
    decoder.step()
    with pytest.raises(BadInput, match=words) as caught:
        decoder.submit(dataclasses.replace(Request((1,), PLAIN, max_new_tokens=4), **change))
    assert "\n" not in str(caught.value)
    decoder.run()
    assert good.tokens == greedy_answer((1,), 8)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadInput, match="empty stop string"):
        Decoder(text_target(TEXT), BYTES).submit(Request((65,), PLAIN, stop_strings=("a", "")))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_bans_everything_ends_its_own_request_in_words(temperature: float) -> None:
    params = SamplingParams(temperature, processors=(BanAll(),))
    for one in (PLAIN, perfect()):
        decoder = Decoder(TableTarget(VOCAB, TABLE))
        beside = decoder.submit(Request((1,), one, max_new_tokens=3))
        failing = decoder.submit(Request((1,), one, params, max_new_tokens=3))
        decoder.run()
        assert failing.finish_reason == "error"
        assert "bans every token" in str(failing.error)
        assert beside.finish_reason == "length"
        assert beside.tokens == greedy_answer((1,), 3)
        with pytest.raises(BadInput, match="every token"):
            result(failing)


def test_a_stream_of_another_decoder_is_refused() -> None:
    target = TableTarget(VOCAB, TABLE)
    generation = Decoder(target).submit(Request((1,), PLAIN))
    with pytest.raises(ValueError, match="another decoder"):
        next(Decoder(target).stream(generation))


# --------------------------------------------------------------------------------------------------- head start


class Starting(Toy):
    """A drafter that has run part of the target's forward: here, all of it, over the trees that it proposes."""

    def __init__(self, target: TableTarget) -> None:
        super().__init__(certain_tree(4, VOCAB), CERTAIN_TREE)
        self.target = target
        self.handed: list[Scores] = []
        self._trees: dict[int, TokenTree] = {}

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        tree = self._trees[id(state)] = super().propose(state, budget)
        return tree

    def reusable_forward(self, states: Seq[DraftState]) -> Scores | None:
        if any(id(one) not in self._trees for one in states):
            return None
        self.handed.append(self.target.score([(one.sequence, self._trees.pop(id(one))) for one in states]))
        return self.handed[-1]


class Resuming(TableTarget):
    """Notes what its forwards go on from."""

    def __init__(self) -> None:
        super().__init__(VOCAB, TABLE)
        self.rounds: list[tuple[list[Sequence], Scores | None]] = []

    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        aux_hidden_state_layers: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        scores = super().score(batch, aux_hidden_state_layers, graph, resume)
        self.rounds.append(([sequence for sequence, _ in batch], resume))
        return scores


def test_a_head_start_is_taken_when_its_drafter_is_alone_in_the_batch_and_only_then() -> None:
    target = Resuming()
    drafter = Starting(TableTarget(VOCAB, TABLE))  # a target of its own, so that its passes are not counted
    one = Method("starting", drafter, RecursiveRejection(), Fixed(3))
    decoder = Decoder(target)
    pair = [decoder.submit(Request(prompt, one, max_new_tokens=9)) for prompt in ((1,), (2, 3))]
    decoder.step()
    assert target.rounds == [([each.sequence for each in pair], drafter.handed[0])]
    guest = decoder.submit(Request((4,), PLAIN, max_new_tokens=2))
    while guest.finish_reason is None:
        decoder.step()
        assert target.rounds[-1][1] is None, "another request is in the batch: it was not part of the draft's pass"
    handed = len(drafter.handed)
    assert handed == 1, "nor is it asked for in vain"
    decoder.run()
    assert len(drafter.handed) > handed
    for each in pair:
        assert each.tokens == greedy_answer(each.request.prompt, 9)


def test_a_drafter_without_a_head_start_changes_nothing() -> None:
    target = Resuming()
    decoder = Decoder(target)
    decoder.submit(Request((1,), perfect(), max_new_tokens=6))
    decoder.run()
    assert {resume for _, resume in target.rounds} == {None}
