"""Beside the compiled kernels torch keeps to one thread in a round, models that it runs itself excepted."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

import outpace.targets.threads as used
from dense_support import SHAPES, target_of, threads
from outpace.controllers.base import Budget
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.methods.registry import Context, build
from outpace.targets.hf import HFTarget
from target_suite import tiny_model


def test_torch_rests_and_has_its_threads_back() -> None:
    with threads(3):
        with used.torch_at_rest():
            assert (torch.get_num_threads(), used.threads()) == (1, 3)
            with used.torch_at_rest():
                assert (torch.get_num_threads(), used.threads()) == (1, 3)
            with used.torch_at_work():
                assert (torch.get_num_threads(), used.threads()) == (3, 3)
            assert (torch.get_num_threads(), used.threads()) == (1, 3)
        assert (torch.get_num_threads(), used.threads()) == (3, 3)
        with used.torch_at_work():
            assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), used.torch_at_rest():
            raise KeyError
        assert (torch.get_num_threads(), used.threads()) == (3, 3)


def test_another_thread_of_the_process_is_not_at_rest() -> None:
    seen: list[int] = []
    with threads(3), used.torch_at_rest():
        other = threading.Thread(target=lambda: seen.append(used._asked()))
        other.start()
        other.join()
    assert seen == [0]


def test_a_round_beside_the_kernels_leaves_them_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = target_of(next(iter(SHAPES)), "float32"), HFTarget(tiny_model("llama"))
    method = build("pld", Context(target))
    drafting, scoring, elsewhere = list[tuple[int, int]](), list[tuple[int, int]](), list[int]()
    propose, run, forward = method.drafter.propose_batch, target.native.run, draft.model.base_model.forward

    def proposing(states: Seq[Any], budgets: Seq[Budget]) -> list[TokenTree]:
        drafting.append((torch.get_num_threads(), used.threads()))
        sequence = draft.sequence([1, 2, 3])
        draft.prefill([sequence])  # as a draft model would that torch runs
        return propose(states, budgets)

    def running(record: object) -> None:
        scoring.append((torch.get_num_threads(), used.threads()))
        run(record)  # type: ignore[arg-type]

    def forwarding(*given: object, **named: object) -> object:
        elsewhere.append(torch.get_num_threads())
        return forward(*given, **named)

    monkeypatch.setattr(method.drafter, "propose_batch", proposing)
    monkeypatch.setattr(target.native, "run", running)
    monkeypatch.setattr(draft.model.base_model, "forward", forwarding)
    with threads(2):
        decoder = Decoder(target)
        decoder.submit(Request((1, 2, 3, 1, 2), method, SamplingParams(), max_new_tokens=8))
        decoder.run()
        assert torch.get_num_threads() == 2
    assert set(drafting) == set(scoring) == {(1, 2)}
    assert drafting
    assert set(elsewhere) == {2}
