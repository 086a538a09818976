"""A kept sequence shows drafters that read hidden states what the forwards of earlier turns showed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence as Seq

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.fixed import Fixed
from outpace.core.sampling import SamplingParams
from outpace.drafting.base import DraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.targets.base import Sequence
from outpace.targets.hidden_rows import RowsOf
from outpace.targets.states import States
from outpace.targets.sub_graph import FULL
from outpace.targets.table import TableTarget, random_table
from support import CERTAIN_TREE, Toy, certain_tree, method

VOCAB = 6
TARGET = TableTarget(VOCAB, random_table(VOCAB, 2))


@dataclasses.dataclass(slots=True)
class ReaderState(DraftState):
    """``shown``: hidden states by position, each by layer."""

    shown: list[dict[int, Tensor]] = dataclasses.field(default_factory=list)


class Reader(Toy):
    """Drafts certain trees, and writes down the states that it is shown, by position."""

    def __init__(self, aux_hidden_state_layers: tuple[int, ...]) -> None:
        super().__init__(certain_tree(1, VOCAB), CERTAIN_TREE)
        self.aux_hidden_state_layers = aux_hidden_state_layers
        self.begun: list[ReaderState] = []

    def begin(self, sequence: Sequence) -> ReaderState:
        self.begun.append(ReaderState(sequence))
        return self.begun[-1]

    def on_prefill(self, state: DraftState, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        assert isinstance(state, ReaderState)
        assert set(hidden_states) == set(self.aux_hidden_state_layers)
        assert position == len(state.shown), "in order, without a gap"
        rows = len(hidden_states[self.aux_hidden_state_layers[0]])
        state.shown += [
            {layer: hidden_states[layer][row] for layer in self.aux_hidden_state_layers} for row in range(rows)
        ]

    def observe(self, state: DraftState, verdict: Verdict) -> None:
        assert isinstance(state, ReaderState)
        rows = verdict.hidden_states(self.aux_hidden_state_layers).chunk(len(self.aux_hidden_state_layers), -1)
        assert verdict.scores.length - 1 == len(state.shown)
        state.shown += [dict(zip(self.aux_hidden_state_layers, one, strict=True)) for one in zip(*rows, strict=True)]

    def check(self) -> None:
        """What the last request was shown is the target's state at every token but the last."""
        tokens, shown = self.begun[-1].sequence.tokens, self.begun[-1].shown
        assert len(shown) == len(tokens) - 1
        for position, states in enumerate(shown):
            for layer, state in states.items():
                assert torch.equal(state, TARGET._state(tuple(tokens[: position + 1]), FULL, layer))


def reading(*aux_hidden_state_layers: int) -> tuple[Reader, Method]:
    drafter = Reader(aux_hidden_state_layers)
    return drafter, Method("toy", drafter, RecursiveRejection(), Fixed(3))


@settings(max_examples=8, deadline=None)
@given(st.data(), st.booleans())
def test_a_turn_that_continues_shows_all_states_and_computes_none_again(data: st.DataObject, sampled: bool) -> None:
    params = SamplingParams(1.0, seed=5) if sampled else SamplingParams()
    reader, made = reading(1, 3)
    decoder = Decoder(TARGET)
    kept = None
    prompt: tuple[int, ...] = (1, 2)
    for _ in range(3):
        request = Request(prompt, made, params, max_new_tokens=5, stop_ids=frozenset({3}), keep=True, kept=kept)
        generation = decoder.submit(request)
        if kept is not None:
            same = next((i for i, (a, b) in enumerate(zip(prompt, kept.tokens, strict=False)) if a != b), len(prompt))
            assert TARGET.length(generation.sequence.kv) == min(same, len(prompt) - 1, TARGET.length(kept.kv))
        decoder.run()
        reader.check()
        fresh = Decoder(TARGET)
        again = fresh.submit(dataclasses.replace(request, keep=False, kept=None))
        fresh.run()
        assert generation.tokens == again.tokens
        assert again.sequence.states is None, "nothing is kept that nobody asked for"
        kept = generation.sequence
        shared = data.draw(st.integers(1, len(kept.tokens)))
        prompt = (*kept.tokens[:shared], *data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)))


def continued(first: Method, then: Method) -> Sequence:
    """The second turn's sequence, before its prefill."""
    decoder = Decoder(TARGET)
    kept = decoder.submit(Request((1, 2, 4), first, max_new_tokens=5, keep=True))
    decoder.run()
    prompt = (*kept.sequence.tokens, 2, 2)
    sequence = decoder.submit(Request(prompt, then, max_new_tokens=4, kept=kept.sequence)).sequence
    reused = TARGET.length(sequence.kv)
    decoder.run()
    if isinstance(then.drafter, Reader):
        then.drafter.check()
    assert reused in (0, len(kept.sequence.tokens) - 1)
    sequence.prompt_length = reused
    return sequence


def test_what_was_not_kept_is_computed_again() -> None:
    assert continued(method(None), reading(1)[1]).prompt_length == 0
    assert continued(reading(1)[1], reading(1, 2)[1]).prompt_length == 0
    assert continued(reading(1, 2)[1], reading(2)[1]).prompt_length > 0
    assert continued(reading(1)[1], method(None)).prompt_length > 0


def test_states_that_are_kept_are_read_though_the_drafter_does_without() -> None:
    """A cache of K/V shows them to the next request that begins with this text."""

    class Resting(Reader):
        def observed_layers(self, states: Seq[DraftState], idle: int) -> Seq[int]:
            return ()

        def observe(self, state: DraftState, verdict: Verdict) -> None:
            """It does without."""

    drafter = Resting((1,))
    decoder = Decoder(TARGET)
    made = Method("toy", drafter, RecursiveRejection(), Fixed(3))
    running = [decoder.submit(Request((1, 2, one), made, max_new_tokens=90, keep=True)) for one in range(3)]
    alone = decoder.submit(Request((4, 2), made, max_new_tokens=90))
    decoder.run()
    assert alone.error is None
    for one in running:
        states, count = one.sequence.states, len(one.sequence.tokens) - 1
        assert one.error is None and states is not None and states.length((1,)) == count
        for position, row in enumerate(states.rows(0, count)[1]):
            assert torch.equal(row, TARGET._state(tuple(one.sequence.tokens[: position + 1]), FULL, 1))


def test_states_come_in_pieces_of_bounded_size() -> None:
    states = States((2,))
    rows = torch.arange(600.0).view(600, 1)
    states.add({2: rows[:500], 7: rows})
    states.add({2: rows[500:]})
    states.add({2: rows[:0]})
    assert states.length((2,)) == 600
    assert states.length((2, 7)) == 0
    pieces = list(states.chunks())
    assert [position for position, _ in pieces] == [0, 256, 500]
    assert torch.cat([piece[2] for _, piece in pieces]).flatten().tolist() == list(range(600))
    assert pieces[0][1][2].data_ptr() == rows.data_ptr()  # nothing was copied
    assert [len(piece[2]) for _, piece in states.first(300, (2,)).chunks()] == [256, 44]
    assert list(states.first(0, (2,)).chunks()) == []
    assert states.rows(490, 510)[2].flatten().tolist() == list(range(490, 510))


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(sorted), max_size=90), st.booleans()
)
def test_rows_of_rounds_follow_those_of_the_prompt_in_order(rounds: list[list[int]], shared: bool) -> None:
    """However many rounds wait to be copied, and whether a round's forward scored other requests before this one."""
    states, want = States((1, 2)), list[float]()
    for at, rows in enumerate(rounds):
        made = {layer: torch.arange(12.0).view(6, 2) + 100 * at + 10_000 * layer for layer in (1, 2, 5)}
        own = RowsOf(made, 2, 6) if shared else made
        if at % 7 == 3:
            states.add(own)
            want += own[2][:, 0].tolist()
        else:
            states.add_rows(own, rows)
            want += own[2][rows, 0].tolist()
        assert states.length((2, 1)) == len(want)
    if want:
        whole = states.whole()
        assert whole[2][:, 0].tolist() == want
        assert whole[1][:, 1].tolist() == [one - 10_000 + 1 for one in want]
        assert states.first(len(want) // 2 + 1, (2,)).whole()[2][:, 0].tolist() == want[: len(want) // 2 + 1]
