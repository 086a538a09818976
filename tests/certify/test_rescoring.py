"""The statistical level rescores prefixes alone, so that scores which are wrong in themselves do not pass."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_support import SHAPES, model_of
from outpace.certify.certificate import Certificate
from outpace.certify.rescoring import PREFIXES, largest_distance
from outpace.certify.statistical import certify_statistical
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import warp
from outpace.core.tree import TokenTree
from outpace.methods.bindings import Bindings, draft_models
from outpace.methods.registry import Context, build
from outpace.targets.base import Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget

ASKED = [[3 * i + j for j in range(9)] for i in range(12)]


# ------------------------------------------------------------------------------------------------- planted faults


class _SeesSiblings:
    """A tree, but for the rows that a row sees."""

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)

    def __len__(self) -> int:
        return len(self._tree)

    def seen(self) -> list[list[int]]:
        rows, parents = self._tree.seen(), self._tree.parents
        for node, parent in enumerate(parents):
            rows[node + 1] = sorted({*rows[node + 1], *(at + 1 for at in range(node) if parents[at] == parent)})
        return rows

    def ancestor_mask(self) -> Tensor:
        mask = self._tree.ancestor_mask()
        for row, seen in enumerate(self.seen()):
            mask[row, seen] = True
        return mask


class WrongMask:
    """A node sees the siblings that stand before it."""

    def _lay_out(self, *args: Any) -> Any:
        parts, tokens, embeddings = super()._lay_out(*args)  # type: ignore[misc]
        for part in parts:
            part.tree = _SeesSiblings(part.tree)
        return parts, tokens, embeddings


class WrongPosition:
    """Every node is rotated by its number in the tree instead of its depth."""

    def _lay_out(self, *args: Any) -> Any:
        parts, tokens, embeddings = super()._lay_out(*args)  # type: ignore[misc]
        for part in parts:
            part.positions = [part.store.length + row for row in range(len(part.positions))]
        return parts, tokens, embeddings


class WrongCommit:
    """Of an accepted path the last node's K/V is the root's."""

    def take(self, rows: Any) -> None:
        wrong = [(store, side_kv, [*path[:-1], 0] if len(path) > 1 else path) for store, side_kv, path in rows]
        super().take(wrong)  # type: ignore[misc]


class Right:
    """Nothing is wrong."""


FAULTS: dict[str, type] = {
    "a node sees its sibling": WrongMask,
    "a wrong rotary position": WrongPosition,
    "a wrong K/V row is committed": WrongCommit,
}


@cache
def network() -> Any:
    return model_of(SHAPES["heads-of-16-alone"]())


def dense(fault: type, precision: str) -> Target:
    kind: Any = type(fault.__name__, (fault, DenseTarget), {})
    target: Target = kind(read_decoder_spec(network()), precision)
    return target


def generic(fault: type, dtype: torch.dtype) -> Target:
    # The fault is planted after the target's own check of itself, which finds those that show in one forward.
    kind: Any = type(fault.__name__, (fault, HFTarget), {})
    target: Target = object.__new__(kind)
    vars(target).update(vars(HFTarget(deepcopy(network()).to(dtype))))
    return target


TARGETS: dict[str, Callable[[type], Target]] = {
    "fast": lambda fault: dense(fault, "int8"),
    "generic, float32": lambda fault: generic(fault, torch.float32),
    "generic, bfloat16": lambda fault: generic(fault, torch.bfloat16),
}


def certified(target: Target, params: SamplingParams | None = None) -> Certificate:
    """With the honest network as the draft model, so that much is accepted."""
    method = build(
        "rsd", Context(target, Bindings(draft_models({"honest": HFTarget(network())}))), {"branching": (2, 2)}
    )
    return certify_statistical(method, target, ASKED, samples=300, seed=3, params=params)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_scores_are_caught(fault: str, kind: str) -> None:
    certificate = certified(TARGETS[kind](FAULTS[fault]))
    print(certificate.verdict)
    assert certificate.lossless is False, certificate
    found = certificate.rescored
    assert found is not None
    assert found.prefixes == PREFIXES
    assert found.differing > PREFIXES // 20
    assert found.largest_difference > 2 * found.tolerance
    assert found.prompt_tokens == 9
    assert found.output_tokens is not None
    assert found.output_tokens > 0, "the prompt alone is scored as it should be"
    assert f"that of {9 + found.output_tokens} tokens (9 of the prompt)" in certificate.verdict
    assert f"{found.largest_difference:.2g} apart" in certificate.verdict
    assert certificate.public()["rescored"]["differing"] == found.differing


@pytest.mark.parametrize("params", [None, SamplingParams(0.8, top_k=40, top_p=0.9, repetition_penalty=1.2)])
@pytest.mark.parametrize("kind", TARGETS)
def test_right_scores_pass(kind: str, params: SamplingParams | None) -> None:
    certificate = certified(TARGETS[kind](Right), params)
    print(certificate.verdict)
    assert certificate.lossless is True, certificate
    found = certificate.rescored
    assert found is not None
    assert (found.prefixes, found.differing) == (PREFIXES, 0)
    if kind == "fast":
        assert found.largest_difference == found.tolerance == 0.0
        assert "64 prefixes rescored alone, equal bit for bit" in certificate.verdict
    else:
        assert 0.0 < found.largest_difference <= found.tolerance < 0.2
        assert f"tolerance {found.tolerance:.2g}" in certificate.verdict


@pytest.mark.parametrize("logits", [1e-3, 0.25, 2.0])
def test_no_change_of_logits_of_that_size_moves_a_distribution_further(logits: float) -> None:
    params = SamplingParams(0.7, repetition_penalty=1.3)
    most = largest_distance(logits, params)
    plain = SamplingParams(0.7)
    generator = torch.Generator().manual_seed(1)
    for spread in (0.0, 0.5, 3.0):
        rows = spread * torch.randn(200, 12, generator=generator)
        moved = rows + logits * torch.randn(200, 12, generator=generator).sign()
        apart = 0.5 * (warp(rows, plain) - warp(moved, plain)).abs().sum(-1)
        assert float(apart.max()) <= largest_distance(logits, plain) + 1e-6 < most
    two = torch.tensor([[-logits / 2, logits / 2], [logits / 2, -logits / 2]])
    worst = 0.5 * (warp(two, plain)[0] - warp(two, plain)[1]).abs().sum()
    assert float(worst) == pytest.approx(largest_distance(logits, plain), rel=1e-4), "and one moves it as far"
