"""Attention over long contexts: pairs of keys, chunks of keys and threads that share them change no bit."""

from __future__ import annotations

import random

import pytest
import torch

from dense_support import ARITHMETICS, KEPT_IN_BLOCKS, Plain, target_of, threads
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Sequence
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.sub_graph import SubGraph
from target_suite import opened, random_tokens, random_tree

CHUNK = 256  # native/attention.h
SHAPES = ("heads-of-32-in-fours", "window-of-6")
everywhere = pytest.mark.parametrize("precision", ARITHMETICS)
in_shapes = pytest.mark.parametrize("shape", SHAPES)


def with_garbage(target: DenseTarget, sequence: Sequence) -> Sequence:
    """A copy whose store holds NaN wherever no committed key or value is, nor the neighbor that is read beside it."""
    twin = target.sequence(sequence.tokens, kv=target.fork(sequence.kv))
    honest = twin.kv.data.clone()
    twin.kv.data.view(torch.uint8).fill_(255)  # NaN as float32 and as bfloat16
    used = twin.kv.length // 16 * 16 * twin.kv.width
    twin.kv.data[..., :used] = honest[..., :used]
    length = twin.kv.length
    twin.kv.truncate(length // 16 * 16)
    for token in range(twin.kv.length, length):  # commit the rest again, one by one
        twin.tokens = sequence.tokens[: token + 1]
        target.commit(target.score([(twin, TokenTree())]), [[]])
    twin.tokens = list(sequence.tokens)
    return twin


@everywhere
@in_shapes
def test_paths_across_pairs_and_chunks(shape: str, precision: str) -> None:
    target = target_of(shape, precision, 64)
    rng = random.Random(3)
    tokens = random_tokens(CHUNK + 12, rng)
    for length in (*range(13, 20), *range(CHUNK - 6, CHUNK + 5), CHUNK + 11):
        plain = Plain(target, tokens[:length])
        tree = random_tree(14, rng)
        last = len(tree) - 1
        for token in random_tokens(9, rng):
            last = tree.add(last, token)
        sequence = opened(target, tokens[:length])
        expected = plain.tree(tree)
        assert torch.equal(target.score([(sequence, tree)])[0].logits, expected)
        assert torch.equal(target.score([(with_garbage(target, sequence), tree)])[0].logits, expected)


@everywhere
@in_shapes
def test_threads_that_share_a_context(shape: str, precision: str) -> None:
    target = target_of(shape, precision, 100)
    rng = random.Random(4)
    long, short = (opened(target, random_tokens(count, rng)) for count in (3 * CHUNK + 7, 19))
    tree = random_tree(20, rng)
    subset = torch.tensor(sorted(rng.sample(range(3 * CHUNK + 6), 2 * CHUNK + 3)))
    batches = [([(long, TokenTree())], {}), ([(long, tree)], {0: subset}), ([(short, tree), (long, tree)], {})]
    for batch, kv in batches:
        found = []
        for count in (1, 2, 3, 8):
            with threads(count):
                scores = target.score(batch, graph=SubGraph(kv=kv))
                found.append(torch.cat([part.logits for part in scores.parts]))
        assert all(torch.equal(one, found[0]) for one in found[1:])


@everywhere
def test_prefill_in_any_chunks_and_threads(precision: str) -> None:
    target = target_of(KEPT_IN_BLOCKS[1], precision)
    tokens = random_tokens(CHUNK + 37, random.Random(5))
    found = []
    for chunk, count in ((512, 1), (1, 2), (7, 3), (64, 8), (255, 2)):
        target.prefill_chunk = chunk
        with threads(count):
            sequence = opened(target, tokens)
            found.append(target.score([(sequence, TokenTree.chain([3, 4]))])[0].logits)
    assert all(torch.equal(one, found[0]) for one in found[1:])


@everywhere
def test_what_was_committed_before_a_truncation_weighs_nothing(precision: str) -> None:
    target = target_of(KEPT_IN_BLOCKS[0], precision)
    tokens = random_tokens(40, random.Random(6))
    sequence = opened(target, tokens)
    sequence.kv.truncate(20)  # of a pair, the first is left
    sequence.tokens = tokens[:21]
    tree = TokenTree()
    tree.add(tree.add(ROOT, 5), 6)
    assert torch.equal(target.score([(sequence, tree)])[0].logits, Plain(target, tokens[:21]).tree(tree))
