"""NativeBranches: rows that grow from one another in the compiled kernels (``native/branches.cpp``): a level a call, or
whole drafts where all of a round have plans."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence as Seq
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outpace.core.turns import ROUNDS
from outpace.targets.branches import Begins, Best, Branches, Draft, Found, GrownTree, Reading, Root, TreePlan
from outpace.targets.dense.binding import LANES, calls, check
from outpace.targets.dense.dense_kv import DenseKV
from outpace.targets.dense.native_model import NativeModel
from outpace.targets.threads import threads


class _Root(Structure):
    """outpace_root."""

    _fields_ = [
        *((name, c_void_p) for name in ("store", "entering")),
        *((name, c_int32) for name in ("capacity", "committed", "rows", "position")),
    ]


class _Reading(Structure):
    """outpace_reading."""

    _fields_ = [
        ("k", c_int32),
        *((name, c_void_p) for name in ("warmth", "values", "ids", "totals", "logits")),
        ("logit_stride", c_int64),
    ]


class _Kinds(Structure):
    """outpace_tree_kinds."""

    _fields_ = [
        *((name, c_void_p) for name in ("rates", "edges", "centres")),
        *((name, c_double) for name in ("floor", "ceiling")),
        *((name, c_int32) for name in ("depths", "width")),
    ]


class PlanRecord(Structure):
    """outpace_tree_plan."""

    _fields_ = [
        *((name, c_int32) for name in ("depth", "max_nodes", "topk", "expand", "cost_count", "id_count")),
        *((name, c_double) for name in ("confidence", "base_tokens", "level", "inverse_temperature", "children_share")),
        *((name, c_void_p) for name in ("costs", "ids")),
        ("kinds", _Kinds),
    ]


class DraftsRecord(Structure):
    """outpace_drafts."""

    _fields_ = [
        *((name, c_void_p) for name in ("numbers", "probs", "seconds")),
        *((name, c_int32) for name in ("number_count", "prob_count", "levels")),
    ]


def plan_record(plan: TreePlan) -> tuple[PlanRecord, object]:
    """A plan as the kernels read it, and what must live as long as that."""
    costs, ids, kinds = array("d", plan.relative_costs), plan.ids, plan.kinds
    held = costs, ids, kinds
    record = PlanRecord(*plan[:4], len(costs), len(ids), *plan[4:9], costs.buffer_info()[0], ids.buffer_info()[0])
    if kinds is not None:
        rates, depths, width, *buckets, floor, ceiling = kinds
        edges, centres = (None if one is None else one.buffer_info()[0] for one in buckets)
        record.kinds = _Kinds(rates.buffer_info()[0], edges, centres, floor, ceiling, depths, width)
    return record, held


def told(drafts: DraftsRecord, count: int) -> tuple[list[GrownTree], list[float]]:
    """The trees of ``count`` plans, and the seconds of each level."""
    numbers = array("i", ctypes.string_at(drafts.numbers, 4 * drafts.number_count))
    probs = array("d", ctypes.string_at(drafts.probs, 8 * drafts.prob_count)).tolist()
    trees, at, done = list[GrownTree](), 0, 0
    for _ in range(count):
        nodes, candidates, rows = numbers[at : at + 3]
        parts = []
        at += 3
        for length in (nodes, nodes, nodes, candidates, candidates, rows, rows + 1):
            parts.append(numbers[at : at + length])
            at += length
        tokens, parents, depths, *others = parts
        mine = probs[done : done + nodes]
        done += nodes
        trees.append(GrownTree(tokens.tolist(), parents.tolist(), depths.tolist(), mine, *others))
    return trees, array("d", ctypes.string_at(drafts.seconds, 8 * drafts.levels)).tolist()


class NativeBranches(Branches):
    """On ``model``; ``words``: the model whose embeddings rows read. ``vocabulary``: V of the logits.

    ``normed``: states are kept behind the final norm. ``rotate_up_to``: makes the model's rotations long enough for
    this many positions.
    """

    def __init__(
        self,
        model: NativeModel,
        words: NativeModel | None,
        begins: Begins,
        *,
        normed: bool,
        vocabulary: int,
        rotate_up_to: Callable[[int], None],
    ) -> None:
        self._lib = calls()
        self._models = model, words  # what the kernels read must live as long as this
        self.columns, self._rotate_up_to = vocabulary, rotate_up_to
        handle = self._lib.outpace_branches_create(
            model.handle, None if words is None else words.handle, int(begins), normed
        )
        check(handle is None)
        self._handle = handle
        self._record = _Reading()
        self._room(64)
        self._positions = 0
        self._held: list[Tensor] = []
        """What the kernels read of the sequences at every level."""

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.outpace_branches_destroy(self._handle)
            self._handle = None

    def begin(self, roots: Seq[Root], reading: Reading) -> Found:
        records, tokens = self._laid(roots)
        where = ctypes.addressof(records), len(roots), tokens.buffer_info()[0]
        found = self._run(self._lib.outpace_branches_begin, where, len(roots), reading)
        self._begun(roots)
        return found

    def draft(self, roots: Seq[Root], drafts: Seq[Draft]) -> list[float]:
        plans = list[TreePlan]()
        for one in drafts:
            plan = one.plan()
            if plan is None:
                return super().draft(roots, drafts)
            plans.append(plan)
        laid, tokens = self._laid(roots, max((plan.depth for plan in plans), default=0))
        made = [plan_record(plan) for plan in plans]
        records, result = (PlanRecord * len(made))(*(record for record, _ in made)), DraftsRecord()
        with ROUNDS:
            check(self._lib.outpace_set_threads(threads()))
            where = ctypes.addressof(laid), len(roots), tokens.buffer_info()[0], ctypes.addressof(records)
            check(self._lib.outpace_branches_draft(self._handle, *where, ctypes.addressof(result)))
        self._begun(roots)
        trees, seconds = told(result, len(plans))
        for draft, tree in zip(drafts, trees, strict=True):
            draft.grown(tree)
        return seconds

    def _laid(self, roots: Seq[Root], deeper: int = 0) -> tuple[ctypes.Array[_Root], array[int]]:
        """The roots as the kernels read them, and their tokens; rows may grow ``deeper`` positions behind them."""
        records = (_Root * len(roots))()
        tokens = array("i")
        self._positions = 0
        for record, root in zip(records, roots, strict=True):
            store: DenseKV = root.kv
            rows, entering = len(root.tokens), root.entering
            store.reserve(rows)
            record.store, record.capacity, record.committed = store.data.data_ptr(), store.capacity, store.length
            record.rows, record.position = rows, root.position
            if entering.dtype != torch.float32 or not entering.is_contiguous() or len(entering) != rows:
                raise ValueError("rows enter as contiguous float32, one for each token")
            record.entering = entering.data_ptr()
            tokens.extend(root.tokens)
            self._positions = max(self._positions, root.position + rows)
        self._positions += deeper
        self._rotate_up_to(self._positions)
        return records, tokens

    def _begun(self, roots: Seq[Root]) -> None:
        """The roots are committed."""
        for root in roots:
            root.kv.advance(len(root.tokens))
        self._held = [root.kv.data for root in roots]

    def grow(self, after: Seq[int], tokens: Seq[int], reading: Reading) -> Found:
        followed, held = array("i", after), array("i", tokens)
        self._positions += 1  # a level is one deeper at most
        self._rotate_up_to(self._positions)
        where = len(held), followed.buffer_info()[0], held.buffer_info()[0]
        return self._run(self._lib.outpace_branches_grow, where, len(held), reading)

    def _run(self, call: Callable[..., int], where: tuple[int, ...], rows: int, reading: Reading) -> Found:
        """A call, and what it has read of so many rows."""
        record, k = self._record, reading.topk
        if rows * max(k, 1) > self._size:
            self._room(rows * k)
        warmth = array("f", reading.inverse_temperatures)
        record.k, record.warmth = k, warmth.buffer_info()[0]
        logits = None
        if reading.logits:
            # Rows of logits begin on a whole register; the padding is not shown.
            logits = torch.empty(rows, -(-self.columns // LANES) * LANES, dtype=torch.float32, device="cpu")
            record.logits, record.logit_stride = logits.data_ptr(), logits.stride(0)
        else:
            record.logits = None
        with ROUNDS:
            check(self._lib.outpace_set_threads(threads()))
            check(call(self._handle, *where, ctypes.addressof(record)))
        shown = None if logits is None else logits[:, : self.columns]
        if not k:
            return Found([], shown)
        values, columns, totals = self._values[: rows * k], self._columns[: rows * k], self._totals[:rows]
        best: list[Best] = [
            (values[at : at + k], columns[at : at + k], total)
            for at, total in zip(range(0, rows * k, k), totals, strict=True)
        ]
        return Found(best, shown)

    def _room(self, size: int) -> None:
        """Room for so many values that are read."""
        self._size = size
        self._values, self._columns, self._totals = (c_float * size)(), (c_int32 * size)(), (c_float * size)()
        record = self._record
        record.values, record.ids = ctypes.addressof(self._values), ctypes.addressof(self._columns)
        record.totals = ctypes.addressof(self._totals)
