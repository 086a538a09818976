"""A forward lays its root's K/V behind the committed ones: nothing shows of it until it is committed."""

from __future__ import annotations

import random

import pytest
import torch

from dense_support import ARITHMETICS, config, model_of, target_of, threads
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.base import Sequence
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.native_model import Commitment
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.sub_graph import SubGraph
from target_suite import opened, random_tokens, random_tree

SHAPE = "window-of-6"
everywhere = pytest.mark.parametrize("precision", ARITHMETICS)


def same_as_fresh(target: DenseTarget, sequence: Sequence, tree: TokenTree) -> None:
    """Whether what is committed is, bit for bit, what a prefill of the same tokens leaves."""
    fresh = opened(target, sequence.tokens)
    assert torch.equal(target.score([(sequence, tree)])[0].logits, target.score([(fresh, tree)])[0].logits)
    length = target.length(sequence.kv)
    assert torch.equal(target.keys(sequence.kv, 0, length), target.keys(fresh.kv, 0, length))


def count_copies(target: DenseTarget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each later commit copies."""
    copied: list[int] = []
    honest = target.native.commit

    def counted(commitments: list[Commitment]) -> None:
        copied.append(sum(len(one.rows) for one in commitments))
        honest(commitments)

    monkeypatch.setattr(target.native, "commit", counted)
    return copied


@everywhere
def test_rounds_commit_what_a_prefill_leaves(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rng = target_of(SHAPE, precision), random.Random(1)
    copied = count_copies(target, monkeypatch)
    pair = [opened(target, random_tokens(length, rng)) for length in (1, 14)]
    for accepted in (0, 0, 2, 0, 3, 0, 0, 1, 0, 0, 0):
        drafts = random_tokens(3, rng)
        paths = [range(accepted), ()]
        target.commit(target.score([(pair[0], TokenTree.chain(drafts)), (pair[1], TokenTree())]), paths)
        assert (copied.pop() if accepted else 0) == accepted
        assert not copied, "roots are not copied"
        pair[0].tokens += [*drafts[:accepted], *random_tokens(1, rng)]
        pair[1].tokens += random_tokens(1, rng)
        for one in pair:
            same_as_fresh(target, one, random_tree(5, rng))


@everywhere
@pytest.mark.parametrize("length", [16, 17, 31, 256, 257])
def test_scores_are_committed_in_any_order(precision: str, length: int) -> None:
    target, rng = target_of(SHAPE, precision), random.Random(length)
    sequence = opened(target, random_tokens(length, rng))
    kept = target.score([(sequence, TokenTree.chain([5, 6]))])
    other = target.sequence([*sequence.tokens[:-1], 7], kv=sequence.kv)  # another root on the same K/V
    target.score([(other, TokenTree())])
    target.score([(sequence, TokenTree())], graph=SubGraph(skip_mlp=frozenset({0})))
    target.commit(kept, [[0]])
    sequence.tokens += [5, 9]
    same_as_fresh(target, sequence, random_tree(4, rng))


@everywhere
def test_one_batch_may_hold_a_sequence_twice(precision: str) -> None:
    target, rng = target_of(SHAPE, precision), random.Random(5)
    sequence = opened(target, random_tokens(21, rng))
    scores = target.score([(sequence, TokenTree.chain([4])), (sequence, TokenTree.chain([8, 9]))])
    target.commit(scores, [[0], None])
    sequence.tokens += [4, 3]
    same_as_fresh(target, sequence, TokenTree())


@everywhere
def test_what_lies_there_is_not_committed_after_the_store_has_changed(precision: str) -> None:
    target, rng = target_of(SHAPE, precision), random.Random(9)
    sequence = opened(target, random_tokens(20, rng))  # the root is the second of a pair of values
    scores = target.score([(sequence, TokenTree())])
    sequence.kv = target.truncate(sequence.kv, 18)
    tokens, sequence.tokens = sequence.tokens, sequence.tokens[:19]
    target.commit(target.score([(sequence, TokenTree())]), [[]])  # clears its neighbor
    sequence.tokens = tokens
    target.commit(scores, [[]])
    sequence.tokens = [*tokens, 5]
    same_as_fresh(target, sequence, random_tree(4, rng))


@everywhere
def test_a_fork_does_not_share_it(precision: str) -> None:
    target, rng = target_of(SHAPE, precision), random.Random(2)
    sequence = opened(target, random_tokens(19, rng))
    scores = target.score([(sequence, TokenTree())])
    twin = target.sequence([*sequence.tokens[:-1], 11], kv=target.fork(sequence.kv))
    target.commit(target.score([(twin, TokenTree())]), [[]])
    target.commit(scores, [[]])
    for one in (sequence, twin):
        one.tokens = [*one.tokens, 3]
        same_as_fresh(target, one, random_tree(4, rng))


@everywhere
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_largest_logit_is_that_of_numpy(precision: str, count: int) -> None:
    target, rng = target_of("heads-of-64-in-threes", precision), random.Random(count)
    sequences = [opened(target, random_tokens(9, rng)) for _ in range(2)]
    with threads(count):
        for _ in range(10):
            scores = target.score([(one, random_tree(12, rng)) for one in sequences])
            for part in scores.parts:
                for node in range(ROOT, len(part.tree)):
                    assert part._best[node + 1] == int(part.logits[node + 1].numpy().argmax())


@pytest.mark.parametrize("count", [1, 2])
def test_of_equal_logits_the_first_counts_and_nan_is_told(count: int) -> None:
    model, half = model_of(config(vocab_size=4096)), 2048
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[half:] = weight[:half].flip(0)  # every logit is there twice, and the two lie in different pieces
    target, rng = DenseTarget(read_decoder_spec(model)), random.Random(3)
    with torch.no_grad():
        weight[7] = float("nan")
    broken = DenseTarget(read_decoder_spec(model))
    with threads(count):
        for _ in range(20):
            tokens = [8 + token for token in random_tokens(6, rng)]
            [part] = target.score([(opened(target, tokens), TokenTree())]).parts
            assert part._best == [int(part.logits[0].numpy().argmax())]
            assert part.argmax(ROOT) < half
            [part] = broken.score([(opened(broken, tokens), TokenTree())]).parts
            assert part._best == [-1]
            assert part.argmax(ROOT) == 7, "as numpy has it"
            assert part.failure(ROOT) is not None
