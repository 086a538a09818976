"""Whether a replayed graph computes the very bits that the same padded forward computes when it runs as it is.

Both read the same weights and the same K/V buffers, so cuBLAS sees operands of one shape and one alignment; the
workspaces of both streams have one size (CUBLAS_WORKSPACE_CONFIG, which benchmarks/gpu.py sets), so that it chooses the
same algorithm for both. Logits, hidden states and the K/V of all rows are compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from gpu_stages.subject import Subject
from outpace.core.tree import TokenTree
from outpace.targets.base import Scores, Sequence
from outpace.targets.dense.torch_kv import KEPT

_ROUNDS = 4
_SHOWN = 5
CASES = ((1, 1), (1, 200), (1, 700), (2, 30), (4, 250), (16, 60))
"""(sequences, tokens of the first): at 250 the buffers of 256 grow on the way."""


def bits(subject: Subject, seeds: int = 3) -> dict[str, Any]:
    """``passed``: no case differs. ``compared``: forwards; ``differences``: the cases that differ, and where."""
    compared, differences = 0, []
    for seed in range(seeds):
        for batch, length in CASES:
            found, wrong = _case(subject, random.Random(1000 * seed + batch + length), batch, length)
            compared += found
            differences += [f"seed {seed}, {batch} sequences from {length} tokens, {what}" for what in wrong]
            print(f"seed {seed}, {batch:>2} x {length:>3} tokens: {'DIFFERENT' if wrong else 'identical'}", flush=True)
    found, wrong = _after_graphs_were_dropped(subject)
    compared += found
    differences += [f"after graphs were dropped, {what}" for what in wrong]
    for line in differences[:_SHOWN]:
        print(f"DIFFERENT: {line}")
    summary = f"{compared} forwards compared, {len(differences)} differences"
    return {"passed": not differences, "summary": summary, "compared": compared, "differences": differences}


def _case(subject: Subject, rng: random.Random, batch: int, length: int) -> tuple[int, list[str]]:
    """Rounds of decoding, with commits and a fork on the way."""
    target, wrong = subject.target, []
    room = target.context_length - 80
    sequences = subject.opened([max(1, min(length + 7 * index, room)) for index in range(batch)], rng.randrange(2**31))
    for number in range(_ROUNDS):
        most = rng.choice([0, 3, 7, 20])
        trees = [_tree(rng, rng.randint(0, most), target.vocab_size) for _ in sequences]
        layers = (target.num_layers // 2,) if number % 2 else ()
        scores, what = compare(subject, sequences, trees, layers)
        wrong += [f"round {number}, {one}" for one in what]
        paths = [tree.path(rng.randrange(-1, len(tree))) for tree in trees]
        target.commit(scores, paths)
        for sequence, tree, path in zip(sequences, trees, paths, strict=True):
            sequence.tokens += [*(tree.tokens[node] for node in path), rng.randrange(target.vocab_size)]
        first = sequences[0]
        if number == 1:  # goes on with a copy, in another buffer
            kept, first.kv = first.kv, target.fork(first.kv)
            target.close(kept)
    subject.close(sequences)
    return _ROUNDS, wrong


def _after_graphs_were_dropped(subject: Subject) -> tuple[int, list[str]]:
    """More sequences than the pool keeps buffers for: when all have left, graphs have to be captured again."""
    compared, wrong = 0, []
    for _ in range(2):
        sequences = subject.opened([20] * (KEPT + 2))
        for sequence in sequences:
            _, what = compare(subject, [sequence], [subject.chain(4)], ())
            compared += 1
            wrong += what
        subject.close(sequences)
    return compared, wrong


def compare(
    subject: Subject, sequences: Seq[Sequence], trees: Seq[TokenTree], layers: Seq[int]
) -> tuple[Scores, list[str]]:
    """Scores by a replayed graph, and each of their parts that differs from the forward as it runs without one."""
    target, batch = subject.target, list(zip(sequences, trees, strict=True))
    before = target.counts.replayed
    for _ in range(3):  # of a new shape: as it is, then captured and replayed
        replayed = target.score(batch, aux_hidden_state_layers=layers)
        if target.counts.replayed > before:
            break
    else:
        return replayed, [f"not replayed: {target.counts.why or 'the forward has no fixed shape'}"]
    with subject.without_capture():
        eager = target.score(batch, aux_hidden_state_layers=layers)
    wrong = []
    for index, (one, other) in enumerate(zip(replayed.parts, eager.parts, strict=True)):
        pairs = {"logits": (one.logits, other.logits)}
        pairs["K/V"] = (replayed.forward_state.side_kv[index], eager.forward_state.side_kv[index])
        pairs |= {f"states of layer {at}": (one.hidden_states[at], other.hidden_states[at]) for at in layers}
        wrong += [f"sequence {index}, {name}: {_how(*pair)}" for name, pair in pairs.items() if not same_bits(*pair)]
    return replayed, wrong


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same bit for bit: NaN equals itself, 0 and -0 differ."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_raw(one), _raw(other))


def _raw(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16 if values.element_size() == 2 else torch.int32)


def _how(one: Tensor, other: Tensor) -> str:
    different = int((one != other).sum())
    return f"{different} of {one.numel()} values, by {float((one.float() - other.float()).abs().max()):.3g} at most"


def _tree(rng: random.Random, nodes: int, vocabulary: int) -> TokenTree:
    """A chain, or a tree of random shape."""
    tree, chain = TokenTree(), rng.random() < 0.5
    for _ in range(nodes):  # a token that is drawn twice after one node is one node
        tree.add(len(tree) - 1 if chain else rng.randrange(-1, len(tree)), rng.randrange(vocabulary))
    return tree
