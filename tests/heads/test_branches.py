"""Rows that grow from one another: the kernels' level in one call against forwards of the head's layers, row by row."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence as Seq
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

import outpace
from eagle_support import head_of
from outpace.controllers.base import Budget
from outpace.core.errors import OutpaceError
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.calibration import Calibration
from outpace.drafting.dynamic_tree import DynamicTree, by_confidence
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.heads.feature_net import Net
from outpace.heads.runner_branches import RunnerBranches
from outpace.methods.learned.eagle.drafter import EagleNet
from outpace.methods.learned.eagle3.drafter import Eagle3Net
from outpace.targets import side_by_side
from outpace.targets.base import Target
from outpace.targets.branches import Best, Branches, Found, Reading, Root
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.native_branches import NativeBranches
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from outpace.targets.side_by_side import Gathered, gather
from target_suite import tiny_model

KINDS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"norms": "eagle3"},
    "attdrift": {"norms": "attdrift"},
    "normed": {"norms": "eagle3", "residual": "normed"},
}
LENGTHS = (1, 5, 3)


def net_of(kind: str, target: Target) -> Net:
    torch.manual_seed(3)
    if kind == "eagle":
        return EagleNet(head_of("eagle", target), target)
    return Eagle3Net(head_of("eagle3", target, **KINDS[kind]), target)


def roots(net: Net, lengths: Seq[int] = LENGTHS) -> list[Root]:
    """Rows of a few sequences, after some that are kept already."""
    rng, found = random.Random(5), list[Root]()
    generator = torch.Generator().manual_seed(7)
    for length in lengths:
        kv = net.runner.open()
        for rows in (4, length):
            tokens = [rng.randrange(net.vocab_size) for _ in range(rows)]
            width = len(net.aux_hidden_state_layers) * net.target.hidden_size
            states = torch.randn(rows, width, generator=generator)
            root = Root(kv, net.runner.length(kv), net.known(tokens, states), tokens)
            if rows == 4 and len(found) < 2:  # the last sequence has none
                net_begin(net, root)
        found.append(root)
    return found


def net_begin(net: Net, root: Root) -> None:
    RunnerBranches(net).begin([root], Reading(0, [1.0]))


def levels(roots: int, seed: int = 11, rows: int = 5, count: int = 4) -> list[list[int]]:
    """For each level which rows are followed, those of one sequence beside one another."""
    rng, owner, found = random.Random(seed), list(range(roots)), []
    for _ in range(count):
        after = sorted(rng.choices(range(len(owner)), k=rows), key=lambda row: owner[row])
        found.append(after)
        owner += [owner[row] for row in after]
    return found


def grown(branches: Branches, net: Net, lengths: Seq[int] = LENGTHS, k: int = 3, **more: int) -> list[Found]:
    rng = random.Random(13)
    scales = (1.0, 0.5, 2.0)

    def reading(rows: int) -> Reading:
        return Reading(k, [scales[row % 3] for row in range(rows)], logits=True)

    found = [branches.begin(roots(net, lengths), reading(len(lengths)))]
    for after in levels(len(lengths), **more):
        tokens = [rng.randrange(net.vocab_size) for _ in after]
        found.append(branches.grow(after, tokens, reading(len(after))))
    return found


def logits(found: Seq[Found]) -> Tensor:
    rows = [one.logits for one in found if one.logits is not None]
    assert len(rows) == len(found)
    return torch.cat(rows)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_level_of_the_kernels_is_that_of_the_layers(model: Any, kind: str, precision: str) -> None:
    target = DenseTarget(read_decoder_spec(model), precision)
    net = net_of(kind, target)
    native = net.branches()
    assert isinstance(native, NativeBranches)
    found, right = grown(native, net), grown(RunnerBranches(net), net)
    if kind == "normed" and precision == "float32":  # its norm between rows is rounded in another order
        torch.testing.assert_close(logits(found), logits(right), atol=1e-5, rtol=1e-5)
    elif kind == "normed":
        torch.testing.assert_close(logits(found), logits(right), atol=0.05, rtol=0.05)
    else:
        assert torch.equal(logits(found), logits(right))
        assert [one.best for one in found] == [one.best for one in right]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_level_of_the_kernels_is_that_of_torch(model: Any, kind: str) -> None:
    dense, generic = DenseTarget(read_decoder_spec(model)), HFTarget(model)
    net, other = net_of(kind, dense), net_of(kind, generic)
    assert isinstance(other.branches(), RunnerBranches)
    found, right = grown(net.branches(), net), grown(other.branches(), other)
    torch.testing.assert_close(logits(found), logits(right), atol=1e-4, rtol=1e-4)
    for one, expected in zip(found, right, strict=True):
        for (values, _, total), (those, _, sums) in zip(one.best, expected.best, strict=True):
            assert values == pytest.approx(those, abs=1e-4)
            assert total == pytest.approx(sums, abs=1e-4)


@torch.inference_mode()
def test_large_trees_move_to_larger_memory_and_a_new_beginning_forgets_them(model: Any) -> None:
    net = net_of("attdrift", DenseTarget(read_decoder_spec(model)))
    native = net.branches()
    for lengths in ((2, 2), (3,), (1, 4, 1)):
        found = grown(native, net, lengths, rows=30, count=5)
        right = grown(RunnerBranches(net), net, lengths, rows=30, count=5)
        assert torch.equal(logits(found), logits(right))


@torch.inference_mode()
def test_only_what_is_asked_for_is_read(model: Any) -> None:
    net = net_of("eagle3", DenseTarget(read_decoder_spec(model)))
    native = net.branches()
    found = native.begin(roots(net), Reading(0, [1.0] * 3))
    assert found.best == []
    assert found.logits is None
    best = native.grow([0, 1, 1], [4, 1, 4], Reading(net.vocab_size, [1.0] * 3)).best
    assert [len(values) for values, _, _ in best] == [net.vocab_size] * 3
    for values, columns, total in best:
        assert values == sorted(values, reverse=True)
        assert sorted(columns) == list(range(net.vocab_size))
        assert total == pytest.approx(float(torch.tensor(values).logsumexp(-1)), abs=1e-5)


@torch.inference_mode()
def test_rows_that_cannot_grow_are_refused(model: Any) -> None:
    net = net_of("attdrift", DenseTarget(read_decoder_spec(model)))
    native, reading = net.branches(), Reading(2, [1.0] * 3)
    native.begin(roots(net), reading)
    with pytest.raises(OutpaceError, match="no row 3 to follow"):
        native.grow([3], [1], Reading(2, [1.0]))
    native.begin(roots(net), reading)
    with pytest.raises(OutpaceError, match="beside one another"):
        native.grow([0, 1, 0], [1, 1, 1], reading)
    native.begin(roots(net), reading)
    with pytest.raises(OutpaceError, match="not in the vocabulary"):
        native.grow([0], [net.vocab_size], Reading(2, [1.0]))
    with pytest.raises(ValueError, match="contiguous float32"):
        native.begin([one._replace(entering=one.entering.double()) for one in roots(net)], reading)


def test_levels_keep_sequences_together() -> None:
    """The support itself: what is grown here is what the interface asks for, with several rows after one."""
    owner = [0, 1, 2]
    for after in levels(3):
        mine = [owner[row] for row in after]
        assert len(list(groupby(mine))) == len(set(mine))
        owner += mine
    assert len(set(owner)) == 3


@pytest.mark.parametrize("by_kernels", [True, False])
def test_rows_are_put_side_by_side(by_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_kernels:
        monkeypatch.setattr(side_by_side, "_plain", lambda one: False)
    whole = torch.randn(3, 9, 6)
    layers = [whole[layer, 1:, :5] for layer in range(3)]
    for rows in ([0], [0, 1, 2], [0, 3, 4, 7]):
        to = torch.full((2, len(rows), 15), torch.nan)
        gather([Gathered(layers, rows, to[0]), Gathered([layers[2], layers[0], layers[1]], rows, to[1])])
        assert torch.equal(to[0], torch.cat([layer[rows] for layer in layers], -1))
        assert torch.equal(to[1], torch.cat([layers[at][rows] for at in (2, 0, 1)], -1))


def drafted(net: Net, budgets: Seq[Budget], own: bool) -> tuple[list[TokenTree], list[float]]:
    """The trees of a budget for each root, by the target's own way or by the one that asks every draft."""
    trees = [DynamicTree(budget, Calibration(by_confidence), net.ids) for budget in budgets]
    branches = net.branches()
    assert isinstance(branches, NativeBranches)
    for _ in range(2):  # the second begins behind rows that the first has committed
        more = roots(net, LENGTHS[: len(budgets)])
        seconds = branches.draft(more, trees) if own else Branches.draft(branches, more, trees)
        assert [net.runner.length(root.kv) for root in more] == [root.position + len(root.tokens) for root in more]
        done, trees = trees, [DynamicTree(budget, Calibration(by_confidence), net.ids) for budget in budgets]
    return [tree.tree() for tree in done], seconds


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_draft_in_one_call_is_that_of_its_levels(model: Any, kind: str) -> None:
    net = net_of(kind, DenseTarget(read_decoder_spec(model)))
    costs = tuple(1.0 + 0.002 * count for count in range(30))
    for budgets in (
        [Budget(5, 20, 4)],
        [Budget(4, 12, 3, relative_costs=costs), Budget(1, 3, 5), Budget(6, 25, net.vocab_size + 1)],
    ):
        found, seconds = drafted(net, budgets, own=True)
        right, expected = drafted(net, budgets, own=False)
        assert found == right
        assert len(seconds) == len(expected) > 2
        assert all(one > 0.0 for one in seconds)
        assert max(max(tree.depths) for tree in found) >= 3


@torch.inference_mode()
def test_drafts_of_which_one_has_no_plan_are_asked(model: Any) -> None:
    class Counted(DynamicTree):
        asked = 0

        def plan(self) -> None:
            return None

        def take_best(self, best: Seq[Best]) -> list[tuple[int, int]]:
            self.asked += 1
            return super().take_best(best)

    net = net_of("eagle3", DenseTarget(read_decoder_spec(model)))
    plain, counted = (kind(Budget(3, 6, 2), None, net.ids) for kind in (DynamicTree, Counted))
    net.branches().draft(roots(net, (1, 1)), [plain, counted])
    assert counted.asked == 3  # type: ignore[attr-defined]
    assert len(plain.tree()) == len(counted.tree()) == 6


@torch.inference_mode()
def test_a_plan_whose_columns_have_no_tokens_is_refused(model: Any) -> None:
    net = net_of("eagle3", DenseTarget(read_decoder_spec(model)))
    with pytest.raises(OutpaceError, match="has no token"):
        net.branches().draft(roots(net, (1,)), [DynamicTree(Budget(2, 2, 2), None, net.ids[:-1])])


@pytest.mark.parametrize("settings", [{}, {"max_nodes": 12, "depth": 5}, {"mode": "tree"}])
def test_drafts_and_answers_of_a_real_model_are_those_of_levels(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests at once, greedy and sampled, with the drafts in one call and with a call for each level."""
    texts = ("Name three colors.", "Write a haiku about rain.", "def fibonacci(n):", "Why is the sky blue?")

    def decoded() -> tuple[list[list[int]], list[TokenTree]]:
        model = outpace.load("smollm2", fixed_costs=True)
        chosen = model.method("eagle3", settings)
        drafter, drafts = chosen.drafter, list[TokenTree]()
        propose = drafter.propose_batch

        def recorded(*asked: Any) -> list[TokenTree]:
            trees: list[TokenTree] = propose(*asked)
            drafts.extend(copy.deepcopy(trees))
            return trees

        monkeypatch.setattr(drafter, "propose_batch", recorded)
        decoder = Decoder(model.target, model.tokenizer)
        sampled = settings.get("mode") == "tree"
        asked = [
            decoder.submit(
                Request(
                    tuple(model.tokenizer.chat([{"role": "user", "content": text}])),
                    chosen,
                    SamplingParams(temperature=0.8 if sampled and at % 2 else 0.0, seed=at),
                    max_new_tokens=24,
                )
            )
            for at, text in enumerate(texts)
        ]
        decoder.run()
        return [list(one.tokens) for one in asked], drafts

    answers, drafts = decoded()
    monkeypatch.setattr(NativeBranches, "draft", Branches.draft)
    assert decoded() == (answers, drafts)
    assert sum(map(len, drafts)) > 100
