"""SharedDecoder: many threads, one decoder; what fails or is cancelled leaves it, and K/V are closed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import outpace
from cli_support import WORDS, Letters, toy
from outpace.core.errors import BadInput
from outpace.core.turns import ROUNDS
from outpace.engine.decoder import Decoder
from outpace.engine.scheduler import Limits
from outpace.engine.shared_decoder import SharedDecoder
from outpace.model import Model
from outpace.targets.table import TableTarget


class Counting(TableTarget):
    """Knows how many K/V are open."""

    def __init__(self) -> None:
        super().__init__(len(WORDS), seed=5, context_length=4000)
        self.open_kv = 0

    def open(self) -> Any:
        self.open_kv += 1
        return super().open()

    def fork(self, kv: Any, length: int | None = None) -> Any:
        self.open_kv += 1
        return super().fork(kv, length)

    def close(self, kv: Any) -> None:
        self.open_kv -= 1
        super().close(kv)


def counting() -> tuple[Model, Counting]:
    target = Counting()
    return Model("counting", target, Letters(), frozenset({0})), target


def idle(model: Model) -> None:
    """Wait until nothing is decoded."""
    thread = model.shared._thread
    if thread is not None:
        thread.join(60)
    assert model.shared._thread is None


def test_calls_from_many_threads_share_rounds_and_get_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = counting()
    texts = [f"{letter} text" for letter in "abcdef"]
    expected = {text: toy_answer(text) for text in texts}
    found: dict[str, list[int]] = {}
    batches: list[int] = []
    honest = Decoder.round

    def spy(self: Decoder, active: Any) -> None:
        batches.append(len(active))
        honest(self, active)

    monkeypatch.setattr(Decoder, "round", spy)

    def work(text: str) -> None:
        found[text] = model.generate(text, max_new_tokens=30, ignore_eos=True, method="sam").tokens

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    with ROUNDS:  # nothing runs before all have asked
        for thread in threads:
            thread.start()
        while len(ROUNDS._waiting) < len(threads):
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert found == expected
    assert max(batches) > 1
    idle(model)
    assert target.open_kv == 0


def toy_answer(text: str) -> list[int]:
    model, _ = counting()
    return model.generate(text, max_new_tokens=30, ignore_eos=True, method="none").tokens


def test_a_stream_that_is_closed_or_dropped_leaves() -> None:
    model, target = counting()
    pieces = model.stream("abc", max_new_tokens=3000, ignore_eos=True)
    first = next(pieces)
    with pytest.raises(BadInput, match="the answer has not ended"):
        _ = pieces.result
    pieces.close()
    pieces.close()
    assert list(pieces) == []
    assert pieces.result.finish_reason == "cancelled"
    assert pieces.result.text.startswith(first)
    dropped = model.stream("abc", max_new_tokens=3000, ignore_eos=True)
    next(dropped)
    del dropped
    gc.collect()
    idle(model)
    assert target.open_kv == 0


def test_one_that_waits_and_is_cancelled_never_runs() -> None:
    model, target = counting()
    model.shared.limits = Limits(max_batch=1)
    running = model.stream("abc", max_new_tokens=2000, ignore_eos=True)
    next(running)
    waiting = model.stream("abc", max_new_tokens=2000, ignore_eos=True)
    waiting._ticket.cancel()
    running.close()
    assert "".join(waiting) == ""
    assert waiting.result.finish_reason == "cancelled"
    idle(model)
    assert target.open_kv == 0


def test_what_breaks_a_round_is_raised_to_all_and_the_next_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = counting()
    whole = model.generate("abc", max_new_tokens=9).text

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Counting, "score", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.generate(["abc", "x"], max_new_tokens=9)
    assert model.generate("abc", max_new_tokens=9).text == whole
    idle(model)
    assert target.open_kv == 0


def test_ctrl_c_while_waiting_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, target = counting()

    class Pressed:
        def put(self, value: Any) -> None: ...
        def get(self) -> Any:
            raise KeyboardInterrupt

        def __class_getitem__(cls, item: Any) -> Any:
            return cls

    monkeypatch.setattr("outpace.api.calls.SimpleQueue", Pressed)
    with pytest.raises(KeyboardInterrupt):
        model.generate("abc", max_new_tokens=3000, ignore_eos=True)
    idle(model)
    assert target.open_kv == 0


def test_a_processor_may_ask_the_model_itself() -> None:
    model, other = toy(), toy()
    inner: list[str] = []

    def curious(ids: list[int], logits: Tensor) -> Tensor:
        if not inner:
            inner.append(model.generate("abc", max_new_tokens=4).text + other.generate("abc", max_new_tokens=4).text)
        return logits

    model.generate("x", max_new_tokens=3, processors=curious)
    assert inner == [2 * toy().generate("abc", max_new_tokens=4).text]


def test_the_thread_computes_with_as_many_threads_as_torch_is_set_to() -> None:
    model, seen = toy(), list[int]()

    def watch(ids: list[int], logits: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return logits

    before = torch.get_num_threads()
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            model.generate("abc", max_new_tokens=2, method="none", processors=watch)
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 2, 1, 1]


def test_a_model_can_be_collected_when_nothing_runs() -> None:
    model = toy()
    model.generate("abc", max_new_tokens=2)
    idle(model)
    known = weakref.ref(model.shared)
    del model
    gc.collect()
    assert known() is None


def test_a_forked_process_and_the_end_of_one() -> None:
    """A child decodes with a thread of its own; a process ends while something is decoded."""
    code = (
        "import os, sys\n"
        "from cli_support import toy\n"
        "model = toy()\n"
        "model.shared.submit([])\n"
        "pieces = model.stream('abc', max_new_tokens=300, ignore_eos=True, method='none')\n"
        "child = os.fork()\n"
        "text = model.generate('abc', max_new_tokens=4, method='none').text\n"
        "if child == 0:\n"
        "    os._exit(0 if len(text) == 4 else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "left = model.stream('abc', max_new_tokens=300, ignore_eos=True, method='none')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "0", "")


def test_several_decoders_of_one_target_take_turns() -> None:
    target = toy().target
    shared = [SharedDecoder(target, Letters()) for _ in range(2)]
    assert shared[0].limits.max_batch == 8
    models = [toy() for _ in range(2)]
    texts: list[str] = ["", ""]

    def work(at: int) -> None:
        texts[at] = "".join(models[at].stream("abc", max_new_tokens=40, ignore_eos=True))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts[0] == texts[1] == outpace.generate(toy(), "abc", max_new_tokens=40, ignore_eos=True).text
