"""Attention over long contexts: pairs of keys, chunks of keys and threads that share them change no bit."""

from __future__ import annotations

import random

import pytest
import torch

from dense_support import ARITHMETICS, KEPT_IN_BLOCKS, SHAPES as DENSE_SHAPES, Plain, model_of, target_of, threads
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Sequence
from outpace.targets.choice import choose_target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.sub_graph import SubGraph
from target_suite import opened, random_tokens, random_tree, tiny_model

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


@pytest.mark.parametrize(("precision", "bound"), [("bfloat16", 0.06), ("bfloat16/int8", 0.1)])
@pytest.mark.parametrize("shape", ["heads-of-8-in-threes", "heads-of-80", "norms-of-queries", "softcaps"])
def test_rounded_keys_and_values_give_nearly_the_same_scores(shape: str, precision: str, bound: float) -> None:
    exact, rounded = target_of(shape, "float32"), target_of(shape, precision)
    rng = random.Random(7)
    tokens, tree = random_tokens(60, rng), random_tree(12, rng)
    expected, found = (one.score([(opened(one, tokens), tree)])[0].logits for one in (exact, rounded))
    difference = (found - expected).square().mean().sqrt() / expected.std()
    assert 0 < float(difference) < bound


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16/int8"])
def test_keys_are_read_as_they_were_made(precision: str) -> None:
    exact, target = target_of("heads-of-80", "float32"), target_of("heads-of-80", precision)
    tokens = random_tokens(45, random.Random(8))
    expected, found = (one.keys(opened(one, tokens).kv, 5, 41)[0] for one in (exact, target))
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=0.05 * float(expected.abs().max()), rtol=0)


def test_eight_bits_take_about_half_the_memory() -> None:
    wide, narrow = (target_of("heads-of-64-in-threes", one) for one in ("bfloat16", "bfloat16/int8"))
    assert wide.kv_bytes_per_token == 3 * 2 * 1 * 64 * 2
    assert narrow.kv_bytes_per_token == 3 * 2 * 1 * (64 + 4)
    sequence = opened(narrow, random_tokens(30, random.Random(9)))
    assert sequence.kv.data.nbytes == sequence.kv.capacity * narrow.kv_bytes_per_token
    assert narrow.arithmetic != wide.arithmetic, "costs that were measured with one are not those of the other"


def test_a_few_large_dimensions_of_keys_leave_bits_to_the_others() -> None:
    model = model_of(DENSE_SHAPES["heads-of-64-in-threes"]())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[5] *= 30
    spec = read_decoder_spec(model)
    exact, rounded = DenseTarget(spec), DenseTarget(spec, "bfloat16", kv_dtype="int8")
    tokens = random_tokens(50, random.Random(10))
    wanted, found = (one.score([(opened(one, tokens), TokenTree())])[0].logits for one in (exact, rounded))
    assert float((found - wanted).norm() / wanted.norm()) < 0.2


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "int8"), ("float32", "bfloat16")])
def test_float32_keeps_float32(dtype: str, kv_dtype: str) -> None:
    with pytest.raises(BadInput, match="float32 keeps its K/V in float32"):
        DenseTarget(read_decoder_spec(model_of(DENSE_SHAPES[KEPT_IN_BLOCKS[0]]())), dtype, kv_dtype=kv_dtype)


def test_rows_of_other_arithmetic_are_not_committed_in_eight_bits() -> None:
    store = target_of(KEPT_IN_BLOCKS[0], "bfloat16/int8").open()
    with pytest.raises(ValueError, match="its own target's forwards"):
        store.take(torch.zeros(3, 2, 1, 4, 64), range(4))
    assert store.length == 0


def test_a_target_that_keeps_no_eight_bits_is_refused() -> None:
    model = model_of(DENSE_SHAPES[KEPT_IN_BLOCKS[0]]()).to(torch.bfloat16)
    with pytest.raises(BadInput, match="kv_dtype int8 is not available for this model, use auto: the generic target"):
        choose_target(model, kind="generic", kv_dtype="int8")
    with pytest.raises(BadInput, match="use auto: architecture gpt2"):
        choose_target(tiny_model("gpt2").to(torch.bfloat16), kv_dtype="int8")
    target, note = choose_target(model, kv_dtype="int8")
    assert target.kv_dtype == "int8" and note == ""
