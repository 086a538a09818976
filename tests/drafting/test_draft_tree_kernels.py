"""Trees that the compiled kernels choose are those of DynamicTree, to the last bit: any logits, budgets and rates."""

from __future__ import annotations

import copy
import ctypes
import random
import subprocess
from array import array
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.controllers.base import Budget
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.calibration import Calibration
from outpace.drafting.dynamic_tree import CENTRES, DEEP, DynamicTree, by_confidence, by_rank
from outpace.targets.branches import Best, Branches, Draft, Found, Reading, Root
from outpace.targets.dense import kernel_build
from outpace.targets.dense.native_branches import DraftsRecord, PlanRecord, plan_record, told

# The kernels' trees without a model: the caller gives what is read of the rows of each level.
_PROGRAM = """
#include "draft_tree.h"
using namespace outpace;
typedef void (*Rows)(int, const int32_t*, const int32_t*, int, const float*, float*, int32_t*, float*);
static std::vector<int32_t> numbers;
static std::vector<double> probs, seconds;
extern "C" int grow(const outpace_tree_plan* plans, int count, int columns, Rows rows, outpace_drafts* drafts) try {
    std::vector<DraftTree> trees;
    for (int i = 0; i < count; ++i) trees.emplace_back(plans[i], i);
    DraftLevel level;
    numbers.clear(), probs.clear(), seconds.clear();
    grow_trees(trees, columns, level, seconds, [&](DraftLevel& one) {
        rows(int(one.warmth.size()), one.after.empty() ? nullptr : one.after.data(), one.tokens.data(), one.k, one.warmth.data(),
             one.values.data(), one.columns.data(), one.totals.data());
    });
    for (DraftTree& tree : trees) tree.report(numbers, probs);
    *drafts = {numbers.data(), probs.data(), seconds.data(), int32_t(numbers.size()), int32_t(probs.size()), int32_t(seconds.size())};
    return 0;
} catch (const std::exception&) { return 1; }
"""  # noqa: E501 - C++
COLUMNS = 9
IDS = array("i", range(20, 20 + COLUMNS))
_Rows = ctypes.CFUNCTYPE(
    None, ctypes.c_int, *[ctypes.POINTER(ctypes.c_int32)] * 2, ctypes.c_int, *[ctypes.POINTER(ctypes.c_float)] * 2,
    ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_float),
)  # fmt: skip


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("draft_tree")
    source, library = folder / "trees.cpp", folder / "trees.so"
    source.write_text(_PROGRAM)
    flags = [*kernel_build._FLAGS, *kernel_build.tuning().split(), f"-I{kernel_build.SOURCE}", "-shared"]
    command = [*kernel_build._compiler(), *flags, str(source), "-o", str(Path(library))]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(library))


@dataclass
class Rows(Branches):
    """Rows whose logits depend on the path alone, by ``seed``; what was run is kept in ``levels``."""

    seed: int
    columns: int = COLUMNS
    paths: list[tuple[int, ...]] = field(default_factory=list)
    levels: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def begin(self, roots: Seq[Root], reading: Reading) -> Found:
        self.paths = [(number,) for number in range(len(roots))]
        return Found([self.best(path, reading, at) for at, path in enumerate(self.paths)])

    def grow(self, after: Seq[int], tokens: Seq[int], reading: Reading) -> Found:
        new = [(*self.paths[row], token) for row, token in zip(after, tokens, strict=True)]
        self.paths += new
        self.levels.append((list(after), list(tokens)))
        return Found([self.best(path, reading, at) for at, path in enumerate(new)])

    def best(self, path: tuple[int, ...], reading: Reading, at: int) -> Best:
        rng = random.Random(f"{self.seed} {path}")
        sharpness = rng.choice((0.0, 0.5, 2.0, 6.0))
        drawn = [rng.gauss(0.0, 1.0) * sharpness for _ in range(COLUMNS)]
        if rng.random() < 0.2:  # some tokens cannot follow, or none can
            banned = rng.choice((1, 3, COLUMNS - 1, COLUMNS))
            for column in rng.sample(range(COLUMNS), banned):
                drawn[column] = -np.inf
        if rng.random() < 0.2:
            drawn[1] = drawn[4] = drawn[0]
        logits = np.array(drawn, np.float32)
        order = np.argsort(-logits, kind="stable")[: reading.topk]
        with np.errstate(divide="ignore"):
            total = np.float32(np.log(np.exp(np.float32(reading.inverse_temperatures[at]) * logits).sum()))
        return logits[order].tolist(), order.tolist(), float(total)

    def draft_by(self, kernel: Any, drafts: Seq[Draft]) -> list[float]:
        """As :meth:`draft`, with the choice of rows by the kernel."""

        def run(count: int, after: Any, tokens: Any, k: int, warmth: Any, *found: Any) -> None:
            reading = Reading(k, warmth[:count])
            roots: list[Any] = [None] * count
            level = self.grow(after[:count], tokens[:count], reading) if after else self.begin(roots, reading)
            values, columns, totals = found
            for at, (mine, where, total) in enumerate(level.best):
                totals[at] = total
                for rank in range(k):
                    values[at * k + rank], columns[at * k + rank] = mine[rank], where[rank]

        plans = [one.plan() for one in drafts]
        assert None not in plans
        made = [plan_record(plan) for plan in plans if plan is not None]
        records, result = (PlanRecord * len(made))(*(record for record, _ in made)), DraftsRecord()
        called = _Rows(run)
        assert kernel.grow(records, len(made), COLUMNS, called, ctypes.byref(result)) == 0
        trees, seconds = told(result, len(made))
        for draft, tree in zip(drafts, trees, strict=True):
            draft.grown(tree)
        return seconds


def a_calibration(rng: random.Random, kind: str) -> Calibration | None:
    """Rates that have been learned, or not yet."""
    if kind == "none":
        return None
    made = Calibration(by_confidence if kind == "confident" else by_rank)
    for _ in range(rng.choice((0, 30, 600))):
        width = len(CENTRES) if kind == "confident" else 8
        made.learn((rng.randint(1, DEEP), rng.randrange(width)), rng.choice((0.0, 1.0, rng.random())))
    return made


def a_budget(rng: random.Random) -> Budget:
    costs: tuple[float, ...] = ()
    if rng.random() < 0.6:
        steps = [rng.random() * rng.choice((0.01, 0.1, 0.5)) for _ in range(rng.choice((0, 1, 2, 12, 30)))]
        costs = tuple(1.0 + sum(steps[:count]) for count in range(len(steps) + 1))
    return Budget(
        depth=rng.choice((1, 2, 4, 8)),
        max_nodes=rng.choice((1, 2, 5, 12, 40)),
        topk=rng.choice((1, 2, 4, 8, COLUMNS, COLUMNS + 3)),
        confidence=rng.choice((0.0, 0.0, 0.0, 0.2, 0.6)),
        relative_costs=costs,
        base_tokens=rng.choice((1.0, 1.7, 4.3)),
    )


def lists(tree: TokenTree) -> Any:
    children = [tree.children(node) for node in range(ROOT, len(tree))]
    return tree.tokens, tree.parents, tree.depths, tree.path_acceptance_probs, tree.draws, children


def rates(calibration: Calibration | None) -> Any:
    if calibration is None:
        return None
    return calibration.table(DEEP, len(CENTRES)).tolist(), calibration._counts


@pytest.mark.parametrize("kind", ["none", "confident", "ranks"])
def test_the_kernels_choose_the_tree_of_python(kernel: Any, kind: str) -> None:
    rng, seen = random.Random(kind), Counter[str]()
    for seed in range(250):
        shared = a_calibration(rng, kind)
        requests: list[tuple[Budget, Calibration | None, dict[str, Any]]] = []
        for _ in range(rng.choice((1, 1, 2, 5))):
            own = shared if rng.random() < 0.5 else a_calibration(rng, kind)
            settings = {
                "expand": rng.choice((1, 2, 4, 9)),
                "confident": kind != "ranks",
                "inverse_temperature": rng.choice((1.0, 1.0, 0.7, 1.6)),
                "level": rng.choice((0.0, 0.02, 0.3)),
            }
            requests.append((a_budget(rng), own, settings))
        others = copy.deepcopy(requests)
        right = [DynamicTree(budget, calibration, IDS, **more) for budget, calibration, more in requests]
        found = [DynamicTree(budget, calibration, IDS, **more) for budget, calibration, more in others]
        reference, rows = Rows(seed), Rows(seed)
        roots: list[Any] = [None] * len(requests)
        levels = reference.draft(roots, right), rows.draft_by(kernel, found)
        assert len(levels[0]) == len(levels[1])
        assert rows.levels == reference.levels
        for one, other, (_, expected, _), (_, calibration, _) in zip(right, found, requests, others, strict=True):
            tree = one.tree()
            assert lists(other.tree()) == lists(tree)
            assert rates(calibration) == rates(expected)
            committed = tree.path_tokens(rng.choice([*tree.leaves()])) + [rng.choice(IDS) for _ in range(2)]
            target_row: Any = None if rng.random() < 0.5 else lambda at: [1.0 / (at + token) for token in range(1, 60)]
            before = repr(rates(expected))
            one.learn(committed, target_row)
            other.learn(committed, target_row)
            assert rates(calibration) == rates(expected)
            seen["learned"] += before != repr(rates(expected))
            seen["drafted"] += len(tree) > 1
            seen["nothing"] += len(tree) == 0
            seen["branched"] += any(len(tree.children(node)) > 1 for node in range(ROOT, len(tree)))
        seen["deep"] += len(levels[0]) > 3
    assert all(seen[what] > 20 for what in ("drafted", "nothing", "branched", "deep")), seen
    assert (seen["learned"] > 100) == (kind != "none")


def test_a_policy_is_asked_in_python() -> None:
    assert DynamicTree(Budget(2, 4, 2, policy=object()), None, IDS).plan() is None  # type: ignore[arg-type]


def test_the_kernels_refuse_plans_without_room(kernel: Any) -> None:
    plan = DynamicTree(Budget(2, 4, 2), None, IDS).plan()
    assert plan is not None
    for broken in (plan._replace(depth=0), plan._replace(max_nodes=0), plan._replace(topk=0), plan._replace(expand=0)):
        record, _ = plan_record(broken)
        assert kernel.grow(ctypes.byref(record), 1, COLUMNS, _Rows(), ctypes.byref(DraftsRecord())) == 1


def test_rates_in_a_row_follow_what_is_learned() -> None:
    calibration = Calibration(by_rank)
    calibration.learn((2, 1), 1.0)
    table = calibration.table(3, 2)
    assert table.tolist() == [calibration.rate((row, column)) for row in (1, 2, 3) for column in (0, 1)]
    for kind in ((1, 0), (3, 1), (7, 7)):
        calibration.learn(kind, 1.0)
    assert calibration.table(3, 2).tolist() == [calibration.rate((row, at)) for row in (1, 2, 3) for at in (0, 1)]
    assert calibration.table(3, 2)[5] > by_rank((3, 1))
