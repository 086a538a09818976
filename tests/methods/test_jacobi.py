"""Jacobi, Gauss-Seidel-Jacobi and hybrid decoding against a plain reading of the equations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from outpace.acceptance.base import Verdict
from outpace.certify.exact import SAMPLING, Setting, certify_exact
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.calibration import Calibration
from outpace.drafting.jacobi_window import FirstGuesses, WindowState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods import registry
from outpace.methods.jacobi.jacobi import Jacobi
from outpace.methods.registry import Context
from outpace.targets.table import TableTarget, random_table
from support import NeverTwice, reference_logits

PROMPT = (0, 1, 2, 0, 3)
MODES: list[dict[str, Any]] = [
    {"mode": "jacobi", "window": 3},
    {"mode": "gs", "block": 3},
    {"mode": "hybrid", "block": 3, "window": 7},
]


def context(target: TableTarget) -> Context:
    return Context(target)


def decode(
    target: TableTarget, settings: dict[str, Any], length: int, params: SamplingParams | None = None
) -> Generation:
    method = registry.build("jacobi", context(target), settings)
    decoder = Decoder(target)
    generation = decoder.submit(Request(PROMPT, method, params or SamplingParams(), max_new_tokens=length, trace=True))
    decoder.run()
    return generation


def equation(target: TableTarget, params: SamplingParams) -> Callable[[tuple[int, ...]], int]:
    """The target's choice after the prompt and these tokens."""

    def choice(output: tuple[int, ...]) -> int:
        return int(reference_logits(target.table((*PROMPT, *output)), params, PROMPT, output).argmax())

    return choice


def iterated(choice: Callable[[tuple[int, ...]], int], window: int, length: int, pad: int) -> list[tuple[int, ...]]:
    """Jacobi iteration by its definition: the guesses of every round, until ``length`` tokens are solved."""
    solved: tuple[int, ...] = ()
    guesses: list[int] = []
    rounds = []
    while len(solved) < length:
        room = min(window, length - len(solved) - 1)
        guesses += [pad] * (room - len(guesses))
        tried = guesses[:room]
        rounds.append(tuple(tried))
        given = (*solved, *tried)
        new = [choice(given[: len(solved) + i]) for i in range(room + 1)]
        right = 0
        while right < room and tried[right] == new[right]:
            right += 1
        solved = (*solved, *new[: right + 1])
        guesses = new[right + 1 :]
    return rounds


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=1.5, frequency_penalty=0.4)])
def test_every_round_drafts_the_iterates_of_the_equations(seed: int, params: SamplingParams) -> None:
    """Penalties count along the guesses of the round, also where they are read after it."""
    target = TableTarget(6, random_table(6, seed))
    got = decode(target, {"window": 4, "guess": "pad", "pad": 5, "restart": False}, 30, params)
    expected = iterated(equation(target, params), 4, 30, pad=5)
    assert [tuple(one.tree.tokens) for one in got.rounds] == expected


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(processors=(NeverTwice(),))])
def test_the_answer_is_the_targets_own(settings: dict[str, Any], params: SamplingParams) -> None:
    accepted = 0
    for seed in range(4):
        target = TableTarget(6, random_table(6, seed))
        choice, expected = equation(target, params), tuple[int, ...]()
        for _ in range(24):
            expected = (*expected, choice(expected))
        got = decode(target, settings, 24, params)
        assert tuple(got.tokens) == expected
        accepted += got.metrics.accepted
    assert accepted > 0


def test_blocks_are_solved_one_after_the_other() -> None:
    target = TableTarget(6, random_table(6, 1))
    written = 0
    for one in decode(target, {"mode": "gs", "block": 4, "guess": "pad"}, 40).rounds:
        assert len(one.tree) == min(3 - written % 4, 39 - written)
        written += len(one.committed)
    assert written == 40


def test_hybrid_decodes_plainly_after_its_window() -> None:
    target = TableTarget(6, random_table(6, 1))
    written = 0
    for one in decode(target, {"mode": "hybrid", "block": 4, "window": 10}, 40).rounds:
        block = min(4 - written % 4, 10 - written)
        assert len(one.tree) == max(0, block - 1)
        written += len(one.committed)


# --------------------------------------------------------------------------------------------------- first guesses


def test_first_guesses() -> None:
    state = WindowState(TableTarget(50).sequence((7, 1, 2, 3, 4, 9, 2, 3)))
    assert FirstGuesses("pad", 5).fill(state, (), 3) == ([5, 5, 5], 0)
    assert FirstGuesses("last").fill(state, (), 2) == ([3, 3], 0)
    assert FirstGuesses("last").fill(state, (8,), 2) == ([8, 8], 0)
    lookup = FirstGuesses()
    assert lookup.fill(state, (), 4) == ([4, 9, 2, 3], 2)
    assert lookup.fill(state, (1,), 2) == ([2, 3], 1)
    assert lookup.fill(state, (30,), 2) == ([30, 30], 0)


def scripted(script: Sequence[int], vocab: int) -> TableTarget:
    """A target that follows a script, and says anything where the text does not."""

    def table(path: tuple[int, ...]) -> Tensor:
        follows = path == (*PROMPT, *script)[: len(path)]
        token = script[len(path) - len(PROMPT)] if follows else random.Random(str(path)).randrange(vocab)
        return 6.0 * one_hot(torch.tensor(token), vocab).float()

    return TableTarget(vocab, table)


def test_starting_afresh_pays_on_text_that_repeats() -> None:
    """Once a guess was wrong, all iterates are here; what the text says is right."""
    target = scripted([5, 9, 6, 8, 5, 7, 9] * 12, 12)
    restarted, iterated = (decode(target, {"window": 3, "restart": restart}, 70).metrics for restart in (True, False))
    assert restarted.accepted > 2 * iterated.accepted


def test_iterates_are_kept_where_they_come_right_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the target goes by the position alone, so that iterates always do; that is learned, and used."""

    def table(path: tuple[int, ...]) -> Tensor:
        return 6.0 * one_hot(torch.tensor(random.Random(len(path)).randrange(4)), 4).float()

    target = TableTarget(4, table)
    learned = decode(target, {"window": 3}, 120).metrics
    monkeypatch.setattr(Calibration, "learn", lambda *_: None)
    believed = decode(target, {"window": 3}, 120).metrics
    assert learned.accepted > 1.5 * believed.accepted


# ----------------------------------------------------------------------------------------- budgets, other's trees


def test_the_window_is_cut_where_guesses_stop_paying() -> None:
    drafter = Jacobi("jacobi", 6, 4, FirstGuesses("last"))
    state = drafter.begin(TableTarget(9).sequence((1, 2)))
    dear = Budget(6, relative_costs=(1.0, 1.001, *(5.0 + n for n in range(6))))
    assert len(drafter.propose(state, dear)) == 1
    assert len(drafter.propose(state, Budget(6))) == 6
    assert len(drafter.propose(state, Budget(6, max_nodes=2))) == 2
    assert len(drafter.propose(state, Budget(0))) == 0


def test_rounds_of_others_are_lived_through() -> None:
    """Not asked, or asked and not scored: guesses for later positions stay."""
    drafter = Jacobi("jacobi", 4, 4, FirstGuesses("pad", 0), restart=False)
    target = TableTarget(6, random_table(6, 2))
    sequence = target.sequence(PROMPT)
    state = drafter.begin(sequence)
    first = drafter.propose(state, Budget(4)).tokens
    none = target.score([(sequence, TokenTree())])
    sequence.tokens += [5, 4]
    drafter.observe(state, Verdict((), 4, none[0], (5, 4)))
    sequence.tokens += [3]
    drafter.observe(state, Verdict((), 3, none[0], (3,)))
    assert drafter.propose(state, Budget(4)).tokens[:1] == first[3:]


# ------------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("settings", MODES)
def test_sampling_is_exact(settings: dict[str, Any]) -> None:
    cells = [
        Setting(sampling, 3, 4, (0, 1, 2, 0, 1), neighbour, 11)
        for sampling, neighbour in (
            ("temperature 1", "alone"),
            ("top-p 0.8", "beside autoregressive decoding"),
            ("penalties", "alone"),
            ("user's processor", "alone"),
        )
    ]
    assert all(not SAMPLING[cell.sampling].greedy for cell in cells)

    def make(context: Context) -> Method:
        return registry.build("jacobi", context, settings)

    certificate = certify_exact("jacobi", make, cells)
    assert certificate.lossless, certificate.verdict
    assert all(check.passed for check in certificate.checks), "exact, not sampled"


def test_settings_are_checked() -> None:
    target = TableTarget(6)
    with pytest.raises(BadInput, match="padding token 6"):
        registry.build("jacobi", context(target), {"guess": "pad", "pad": 6})
    with pytest.raises(BadInput, match="block"):
        registry.build("jacobi", context(target), {"block": 0})
