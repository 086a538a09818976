"""Batches of sequences and hidden states in captured steps, beside the same forwards that run as they are."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import Tensor

from outpace.core.tree import TokenTree
from outpace.targets import rotary
from outpace.targets.base import Sequence
from outpace.targets.dense import torch_kv
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from recorder import record
from target_suite import VOCAB, near, opened, random_tokens, random_tree, reference, tiny_model


def replaying(**options: Any) -> GraphTarget:
    return GraphTarget(read_decoder_spec(tiny_model("llama")), **({"capture": record} | options))


def scored(target: GraphTarget, sequence: Sequence, tree: TokenTree | None = None) -> Tensor:
    return target.score([(sequence, tree or TokenTree())])[0].logits


def test_batches_of_unequal_lengths_and_trees_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kv, "SMALLEST", 16)
    monkeypatch.setattr(rotary, "FIRST_POSITIONS", 8)  # the rotation table grows for the longest
    model = tiny_model("gemma3")  # with windows, so that masks differ between layers
    target = GraphTarget(read_decoder_spec(model), capture=record)
    rng = random.Random(5)
    batch = [opened(target, random_tokens(length, rng)) for length in (1, 9, 30)]
    for _ in range(5):
        trees = [random_tree(rng.choice([0, 2, 3]), rng) for _ in batch]
        scores = target.score(list(zip(batch, trees, strict=True)))
        paths = []
        for sequence, tree, part in zip(batch, trees, scores.parts, strict=True):
            assert len(part.logits) == 1 + len(tree)
            node = rng.randrange(-1, len(tree))
            near(part.logits[node + 1], reference(model, sequence.tokens + tree.path_tokens(node)))
            paths.append(tree.path(node))
        target.commit(scores, paths)
        for sequence, tree, path in zip(batch, trees, paths, strict=True):
            sequence.tokens += [*(tree.tokens[node] for node in path), rng.randrange(VOCAB)]
    assert {sequence.kv.buffer.capacity for sequence in batch} > {32}
    assert target.counts.replayed >= 2


def test_a_batch_has_a_graph_for_each_set_of_sequences() -> None:
    target = replaying()
    batch = [opened(target, [1, 2, 3 + index]) for index in range(3)]
    tree = TokenTree.chain([7])
    alone = [scored(target, sequence, tree) for sequence in batch]
    before = target.counts.captured
    for chosen in ([0, 1, 2], [2, 0], [0, 1, 2], [2, 0], [0, 1, 2]):
        scores = target.score([(batch[index], tree) for index in chosen])
        for part, index in zip(scores.parts, chosen, strict=True):
            near(part.logits, alone[index])
    assert target.counts.captured - before == 2
    held = len(target.graphs)
    target.graphs.forget(batch[1].kv.buffer)
    assert len(target.graphs) == held - 2  # its own, and that of the three


def test_a_batch_with_more_rows_than_the_largest_bucket_runs_eagerly() -> None:
    target = replaying(buckets=(1, 2, 4))
    batch = [opened(target, [1, 2, 3 + index]) for index in range(3)]
    before = target.counts.eager
    for _ in range(3):
        target.score([(sequence, TokenTree.chain([7])) for sequence in batch])  # three times two rows
    assert (len(target.graphs), target.counts.eager - before) == (0, 3)
    target.score([(sequence, TokenTree.chain([7])) for sequence in batch[:2]])
    assert len(target.graphs) == 1


def test_hidden_states_are_replayed_too() -> None:
    eager, target = replaying(buckets=()), replaying()
    rng = random.Random(6)
    prompts = [random_tokens(5, rng), random_tokens(8, rng)]
    both = [[opened(one, prompt) for prompt in prompts] for one in (eager, target)]
    layers = (0, 2, target.num_layers)
    before = target.counts.replayed
    for _ in range(3):
        trees = [random_tree(3, rng), random_tree(1, rng)]
        found = [
            one.score(list(zip(sequences, trees, strict=True)), aux_hidden_state_layers=layers)
            for one, sequences in zip((eager, target), both, strict=True)
        ]
        for left, right in zip(found[0].parts, found[1].parts, strict=True):
            near(left.logits, right.logits)
            assert left.hidden_states.keys() == right.hidden_states.keys() == set(layers)
            for layer in layers:
                near(left.hidden_states[layer], right.hidden_states[layer])
    assert target.counts.replayed - before == 2
    scored(target, both[1][0], TokenTree.chain([1, 2, 3]))  # other results: another graph
    assert target.counts.replayed - before == 2
