"""Measured times that outlive their process: read, not measured again; and whatever is wrong with the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from outpace.core import machine
from outpace.core.tree import TokenTree
from outpace.models.gguf_cache import CACHE_VARIABLE
from outpace.targets import cost_table
from outpace.targets.base import Sequence, Target
from outpace.targets.cost_table import CostTable, digest, folder, forget, table_of
from outpace.targets.costs import FixedCosts, ForwardCosts
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from outpace.targets.table import TableTarget
from target_suite import tiny_model
from test_models import tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Counted(ForwardCosts):
    """A target whose forwards take what ``cost`` says of their rows and of the tokens before them."""

    def __init__(self, cost: Callable[[int, int], float], table: CostTable | None = None) -> None:
        super().__init__(TableTarget(7, context_length=10_000), table)
        self._cost = cost
        self.measured: list[tuple[int, int]] = []

    def _time(self, sequences: Seq[Sequence], rows: int) -> float:
        context = len(sequences[0].tokens)
        self.measured.append((rows, context))
        return self._cost(rows, context)


def table(weights: str = "w", precision: str = "float32") -> CostTable:
    return table_of(weights, kind="TableTarget", precision=precision, device=torch.device("cpu"))


def test_a_second_process_reads_what_the_first_has_measured() -> None:
    first = Counted(lambda rows, context: 1e-3 * rows, table())
    second = Counted(lambda rows, context: 5e-3 * rows, table())
    found = [first.seconds(rows, 300) for rows in (1, 5, 40)]
    assert first.measured
    assert [second.seconds(rows, 300) for rows in (1, 5, 40)] == found
    assert second.measured == []


def test_longer_contexts_are_measured_when_they_are_asked_for() -> None:
    costs = Counted(lambda rows, context: 1e-3 * rows + 1e-6 * context)
    assert costs.seconds(1, 10) == pytest.approx(1e-3 + 16e-6)
    assert {context for _, context in costs.measured} == {16}
    assert costs.seconds(1, 640) == pytest.approx(1e-3 + 640e-6)
    assert costs.seconds(4, 2560) == pytest.approx(4e-3 + 2560e-6)
    assert costs.seconds(1, 9000) == pytest.approx(1e-3 + 9000e-6)
    assert {context for _, context in costs.measured} == {16, 256, 1024, 4096}, "never more than that"


def test_a_context_that_seems_to_cost_less_than_a_shorter_one_costs_the_same() -> None:
    costs = Counted(lambda rows, context: 1e-3 / context)
    assert costs.seconds(1, 200) == costs.seconds(1, 16)


def test_who_measures_at_the_same_time_takes_over_what_was_written_first() -> None:
    first, second = table(), table()
    assert first.once("other", lambda: 9.0) == 9.0
    assert second.once("more", lambda: 3.0) == 3.0  # both have read the file by now
    assert first.once("it", lambda: 1.0) == 1.0
    assert second.once("it", lambda: 2.0) == 1.0
    assert [table().once(name, pytest.fail) for name in ("other", "more", "it")] == [9.0, 3.0, 1.0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: "[" * 100_000,
        lambda text: '"\ud800"',
        lambda text: text.replace("0.25", '"soon"'),
        lambda text: text.replace("0.25", "-1.0"),
        lambda text: text.replace("0.25", "NaN"),
        lambda text: text.replace("0.25", "Infinity"),
        lambda text: text.replace('"weights": "w"', '"weights": "v"'),
        lambda text: text.replace('"format": 1', '"format": 0'),
        lambda text: json.dumps({**json.loads(text), "seconds": 3}),
    ],
)
def test_a_table_that_cannot_be_used_is_made_anew(damage: Callable[[str], str]) -> None:
    path = table().path
    assert path is not None
    assert table().once("it", lambda: 0.25) == 0.25
    path.write_text(damage(path.read_text()), encoding="utf-8", errors="surrogatepass")
    assert table().once("it", lambda: 0.5) == 0.5
    assert table().once("it", pytest.fail) == 0.5


def test_where_nothing_can_be_written_times_last_as_long_as_the_process(cache: Path) -> None:
    cache.write_text("no folder")
    costs = table()
    assert costs.once("it", lambda: 0.25) == costs.once("it", pytest.fail) == 0.25
    assert table().once("it", lambda: 0.5) == 0.5


def test_a_writer_that_holds_the_file_for_ever_delays_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_table, "_PATIENCE", 0.01)
    costs = table()
    assert costs.path is not None
    costs.path.parent.mkdir(parents=True)
    with FileLock(costs.path.with_suffix(".lock")):
        assert costs.once("it", lambda: 0.25) == 0.25
    assert not costs.path.exists()


def test_other_weights_precisions_and_thread_counts_have_times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table().once("it", lambda: 1.0) == 1.0
    assert table(precision="bfloat16").once("it", lambda: 2.0) == 2.0
    assert table("other").once("it", lambda: 3.0) == 3.0
    monkeypatch.setattr(cost_table, "threads", lambda: 77)
    assert table().once("it", lambda: 4.0) == 4.0


def test_another_machine_has_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    before = table().path
    monkeypatch.setattr(machine, "cpu_model", lambda: "another processor")
    assert table().path != before


def test_tables_can_be_dropped() -> None:
    table().once("it", lambda: 1.0)
    table("other").once("it", lambda: 1.0)
    assert forget() == 2
    assert list(folder().iterdir()) == []
    assert forget() == 0


def test_the_digest_tells_weights_apart() -> None:
    ones = [("a", torch.ones(100, 3)), ("b", torch.zeros(4))]
    assert digest(ones) == digest([(name, tensor.clone()) for name, tensor in ones])
    others = [
        [("a", torch.ones(100, 3)), ("c", torch.zeros(4))],
        [("a", torch.ones(3, 100)), ("b", torch.zeros(4))],
        [("a", torch.ones(100, 3, dtype=torch.bfloat16)), ("b", torch.zeros(4))],
        [("a", torch.full((100, 3), 1.001)), ("b", torch.zeros(4))],
    ]
    assert len({digest(one) for one in [ones, *others]}) == 5


def test_a_loaded_model_keeps_its_times_and_one_with_fixed_costs_has_none(cache: Path) -> None:
    from outpace.loading import load_from

    inner = tiny_model("llama")
    measured, fixed, again = (
        load_from(inner, tiny_tokenizer(), fixed_costs=flag).target.costs for flag in (False, True, False)
    )
    assert isinstance(fixed, FixedCosts)
    assert isinstance(measured, ForwardCosts)
    assert measured.seconds(1) == again.seconds(1) > 0.0
    assert len(list((cache / "costs").glob("*.json"))) == 1


TARGETS: dict[str, Callable[[Any], Target]] = {
    "dense": lambda inner: DenseTarget(read_decoder_spec(inner)),
    "graph": lambda inner: GraphTarget(read_decoder_spec(inner)),
    "transformers": HFTarget,
    "table": lambda inner: TableTarget(7),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_long_contexts_are_made_up_for_a_measurement(kind: str) -> None:
    target = TARGETS[kind](tiny_model("llama"))
    sequence = target.sequence([1, 2, 3])
    target.prefill([sequence])
    target.lengthen(sequence, [5] * 200)
    assert (len(sequence.tokens), target.length(sequence.kv)) == (203, 202)
    scores = target.score([(sequence, TokenTree.chain([1, 2]))])
    assert torch.isfinite(scores[0].logits).all()
    assert ForwardCosts(target).seconds(3, 100) > 0.0


def test_times_that_are_forgotten_while_others_are_measured_stay_forgotten() -> None:
    """A rehearsal decodes, and what its rounds take may show that recorded times are out of date."""
    costs = table()
    assert costs.once("forward of 1", lambda: 1.0) == 1.0

    def rehearse() -> float:
        costs.forget("forward of ")
        return 2.0

    assert costs.once("draft", rehearse) == 2.0
    assert costs.once("forward of 1", lambda: 3.0) == 3.0
    assert costs.once("draft", lambda: 4.0) == 2.0
