"""In every precision a tree scores, bit for bit, as autoregressive decoding along each path, whatever runs beside
it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dense_support import ARITHMETICS, KEPT_IN_BLOCKS, SHAPES, VOCAB, Plain, target_of, threads
from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.fixed import Fixed
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods import registry
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context
from outpace.targets.base import Scores
from outpace.targets.dense.dense_target import DenseTarget
from support import Toy, certain_tree
from target_suite import random_tokens

CASES = [
    pytest.param(shape, precision, id=f"{shape}-{precision}")
    for shape in SHAPES
    for precision in ARITHMETICS
    if precision != "int4" or shape in KEPT_IN_BLOCKS
]


def grown_tree(nodes: int, narrow: float, rng: random.Random) -> TokenTree:
    """Of random shape; the narrower, the deeper."""
    tree = TokenTree()
    for _ in range(nodes):
        last = len(tree) - 1
        tree.add(last if rng.random() < narrow else rng.randrange(-1, len(tree)), rng.randrange(VOCAB))
    return tree


def first_nodes(tree: TokenTree, count: int) -> TokenTree:
    part = TokenTree()
    for parent, token in zip(tree.parents[:count], tree.tokens[:count], strict=True):
        part.add(parent, token)
    return part


def scored(target: DenseTarget, pairs: list[tuple[Any, TokenTree]], split: float | None) -> Scores:
    """At once, or in two passes of which the second resumes the first."""
    if split is None:
        return target.score(pairs)
    first = [(sequence, first_nodes(tree, int(split * len(tree)))) for sequence, tree in pairs]
    return target.score(pairs, resume=target.score(first))


@pytest.mark.parametrize(("shape", "precision"), CASES)
@settings(max_examples=4)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 40)), min_size=1, max_size=3),
    narrow=st.sampled_from([0.0, 0.7, 0.95]),
    chunk=st.sampled_from([1, 5, 16, 17, 512]),
    count=st.sampled_from([1, 2, 3, 8]),
    split=st.none() | st.floats(0, 1),
)
def test_trees_score_as_plain_decoding(
    shape: str,
    precision: str,
    seed: int,
    sizes: list[tuple[int, int]],
    narrow: float,
    chunk: int,
    count: int,
    split: float | None,
) -> None:
    rng = random.Random(seed)
    target = target_of(shape, precision, chunk)
    prompts = [random_tokens(length, rng) for length, _ in sizes]
    trees = [grown_tree(nodes, narrow, rng) for _, nodes in sizes]
    sequences = [target.sequence(prompt) for prompt in prompts]
    with threads(count):
        target.prefill(sequences)
        scores = scored(target, list(zip(sequences, trees, strict=True)), split)
    for part, prompt, tree in zip(scores.parts, prompts, trees, strict=True):
        assert torch.equal(part.logits, Plain(target, prompt).tree(tree))


@pytest.mark.parametrize(("shape", "precision"), CASES)
def test_decoding_with_a_drafter_is_plain_decoding(shape: str, precision: str) -> None:
    target = target_of(shape, precision)
    context = Context(target)
    rng = random.Random(2)
    prompts = [tuple(random_tokens(count, rng)) for count in (30, 4, 11)]
    plain = Method("none", NoDraft(), RecursiveRejection(), Fixed(0))

    def decode(method: Method, references: list[tuple[int, ...]]) -> list[Generation]:
        decoder = Decoder(target)
        running = [
            decoder.submit(Request(prompt, method, max_new_tokens=40, references=(reference,)))
            for prompt, reference in zip(prompts, references, strict=True)
        ]
        decoder.run()
        return running

    expected = [tuple(one.tokens) for one in decode(plain, [(), (), ()])]
    # A reference that is right but for a few tokens, so that drafts are taken, cut short and refused.
    nearly = [tuple(token if rng.random() < 0.8 else 0 for token in tokens) for tokens in expected]
    accepted = 0
    for drafter in ("sam", "pld"):
        # A fixed length: left to measured costs, a target this small would draft or not as the clock says.
        drafted = decode(registry.build(drafter, context, {"length": 6}), nearly)
        assert [tuple(one.tokens) for one in drafted] == expected
        accepted += sum(one.metrics.accepted for one in drafted)
    grown = Method("trees", Toy(certain_tree(1, VOCAB, 12), Proposal(tree=True)), RecursiveRejection(), Fixed(4, 12))
    assert [tuple(one.tokens) for one in decode(grown, nearly)] == expected
    assert accepted > 40


@pytest.mark.parametrize("precision", ARITHMETICS)
def test_long_contexts_and_full_blocks(precision: str) -> None:
    target = target_of(KEPT_IN_BLOCKS[0], precision)
    rng = random.Random(8)
    tokens = random_tokens(530, rng)  # the store grows twice on the way
    plain = Plain(target, tokens)
    for length in (15, 16, 17, 31, 255, 256, 257, 511, 512, 513):
        for chunk in (3, 64, 512):
            target.prefill_chunk = chunk
            sequence = target.sequence(tokens[:length])
            target.prefill([sequence])
            chain = target.score([(sequence, TokenTree.chain(tokens[length : length + 17]))])[0].logits
            assert torch.equal(chain, torch.stack(plain.rows[length - 1 : length + 17]))
