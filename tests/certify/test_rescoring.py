"""The statistical level rescores prefixes alone, so that scores which are wrong in themselves do not pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from copy import copy
from functools import cache
from typing import Any

import pytest
import torch

from dense_support import SHAPES, model_of
from outpace.certify.certificate import Certificate
from outpace.certify.statistical import certify_statistical
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.methods.registry import Context, build
from outpace.targets.base import Target
from outpace.targets.dense.architectures import read_decoder_spec
from outpace.targets.dense.dense_kv import DenseKV
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.hf import HFTarget
from outpace.targets.layered_kv import LayeredKV
from outpace.targets.row_target import RowTarget

SHAPE = "heads-of-16-alone"
ASKED = [[3 * i + j for j in range(9)] for i in range(12)]


# ------------------------------------------------------------------------------------------------- planted faults


class _SeesSiblings(TokenTree):
    def seen(self) -> list[list[int]]:
        paths = super().seen()
        for node, parent in enumerate(self.parents):
            siblings = [other + 1 for other in range(node) if self.parents[other] == parent]
            paths[node + 1] = sorted({*paths[node + 1], *siblings})
        return paths


class WrongMask(RowTarget):
    """A node sees the siblings that stand before it."""

    def _lay_out(self, *args: Any) -> Any:
        parts, tokens, embeddings = super()._lay_out(*args)
        for part in parts:
            part.tree = copy(part.tree)
            part.tree.__class__ = _SeesSiblings
        return parts, tokens, embeddings


class WrongPosition(RowTarget):
    """Every node is rotated by its number in the tree instead of its depth."""

    def _lay_out(self, *args: Any) -> Any:
        parts, tokens, embeddings = super()._lay_out(*args)
        for part in parts:
            part.positions = [part.store.length + row for row in range(len(part.positions))]
        return parts, tokens, embeddings


class WrongCommit(RowTarget):
    """Of an accepted path the last node's K/V is the root's."""

    def open(self) -> Any:
        store = super().open()
        take = store.take

        def take_wrongly(side_kv: Any, rows: Seq[int]) -> None:
            take(side_kv, [*rows[:-1], 0] if len(rows) > 1 else rows)

        store.take = take_wrongly
        return store


class Right(RowTarget):
    """Nothing is wrong."""


FAULTS: dict[str, type[RowTarget]] = {
    "a node sees its sibling": WrongMask,
    "a wrong rotary position": WrongPosition,
    "a wrong K/V row is committed": WrongCommit,
}


@cache
def network(seed: int = 0) -> Any:
    return model_of(SHAPES[SHAPE](), seed)


def dense(fault: type[RowTarget], precision: str) -> Target:
    kind: Any = type(fault.__name__, (fault, DenseTarget), {})
    return kind(read_decoder_spec(network()), precision)  # type: ignore[no-any-return]


def generic(fault: type[RowTarget], dtype: torch.dtype) -> Target:
    kind: Any = type(fault.__name__, (fault, HFTarget), {})
    model = model_of(SHAPES[SHAPE]()).to(dtype)
    # The fault is planted after the target's own check of itself, which finds the ones that show in a forward.
    target = HFTarget(model)
    target.__class__ = kind
    return target


TARGETS: dict[str, Callable[[type[RowTarget]], Target]] = {
    "fast, float32": lambda fault: dense(fault, "float32"),
    "fast, int8": lambda fault: dense(fault, "int8"),
    "generic, float32": lambda fault: generic(fault, torch.float32),
    "generic, bfloat16": lambda fault: generic(fault, torch.bfloat16),
}


def certified(target: Target, params: SamplingParams | None = None, samples: int = 900) -> Certificate:
    """With the honest network as the draft model, so that much is accepted."""
    method = build("rsd", Context(target, lambda: HFTarget(network())), {"branching": (2, 2)})
    return certify_statistical(method, target, ASKED, samples=samples, seed=3, params=params)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_scores_are_caught(fault: str, kind: str) -> None:
    certificate = certified(TARGETS[kind](FAULTS[fault]))
    print(certificate.verdict)
    assert certificate.lossless is False, certificate


@pytest.mark.parametrize("kind", TARGETS)
def test_right_scores_pass(kind: str) -> None:
    certificate = certified(TARGETS[kind](Right))
    assert certificate.lossless is True, certificate
