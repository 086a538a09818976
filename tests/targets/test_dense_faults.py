"""What the kernels keep between forwards, and share between threads and processes, reaches no result."""

from __future__ import annotations

import copy
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from dense_support import (
    ARITHMETICS,
    CONTEXT,
    KEPT_IN_BLOCKS,
    PRECISIONS,
    SHAPES,
    VOCAB,
    config,
    model_of,
    target_of,
    threads,
)
from outpace.core.auxiliary_token import AuxiliaryToken
from outpace.core.errors import BadInput, OutpaceError
from outpace.core.tree import ROOT, TokenTree
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.forward_plan import ForwardPlan, SequenceRows
from target_suite import near, opened, random_tokens, random_tree, reference

IN_BLOCKS = KEPT_IN_BLOCKS[0]
everywhere = pytest.mark.parametrize("precision", PRECISIONS)


def scores_of(target: DenseTarget, seed: int = 0) -> torch.Tensor:
    rng = random.Random(seed)
    sequence = opened(target, random_tokens(rng.randrange(1, 60), rng))
    return target.score([(sequence, random_tree(rng.randrange(20), rng))])[0].logits


@everywhere
def test_models_of_other_sizes_do_not_disturb_each_other(precision: str) -> None:
    shapes = [shape for shape in SHAPES if precision != "int4" or shape in KEPT_IN_BLOCKS]
    alone = {shape: scores_of(target_of(shape, precision)) for shape in shapes}
    rng = random.Random(0)
    for shape in rng.choices(shapes, k=30):
        with threads(rng.choice([1, 2, 4])):
            assert torch.equal(scores_of(target_of(shape, precision)), alone[shape])


@everywhere
def test_what_is_not_finite_stays_where_it_is(precision: str) -> None:
    shapes = [shape for shape in SHAPES if precision != "int4" or shape in KEPT_IN_BLOCKS]
    before = {shape: scores_of(target_of(shape, precision)) for shape in shapes}
    for shape in shapes:  # the widest model leaves what it has where others have their padding
        target = target_of(shape, precision)
        for value in (1e38, float("inf"), float("nan")):
            poison = torch.full((target.hidden_size,), value)
            sequence = opened(target, [1, 2, 3])
            tree = TokenTree()
            tree.add(ROOT, 4)
            tree.auxiliary_tokens = [AuxiliaryToken(0, 1, (ROOT,), embedding=poison) for _ in range(40)]
            scores = target.score([(sequence, tree)])
            tree.auxiliary_tokens = []
            assert torch.equal(scores[0].logits[:2], target.score([(sequence, tree)])[0].logits)
            assert target.lm_head(poison[None]).shape == (1, VOCAB)
    for shape in shapes:
        assert torch.equal(scores_of(target_of(shape, precision)), before[shape])


@everywhere
def test_a_sequence_that_is_not_finite_does_not_reach_its_neighbours(precision: str) -> None:
    target = target_of(IN_BLOCKS, precision)
    good, bad = opened(target, [5, 6, 7, 8]), opened(target, [5, 6, 7, 8])
    expected = target.score([(good, TokenTree.chain([9]))])[0].logits
    with torch.inference_mode():
        bad.kv.data.fill_(float("nan"))
    scores = target.score([(bad, TokenTree.chain([9])), (good, TokenTree.chain([9]))])
    assert torch.equal(scores[1].logits, expected)


@pytest.mark.parametrize("precision", ARITHMETICS)
def test_memory_that_was_never_written_is_never_read(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = "window-of-6"
    target = target_of(shape, precision, 5)
    expected = scores_of(target, 4)
    honest = torch.empty

    def dirty(*sizes: object, **options: object) -> torch.Tensor:
        made: torch.Tensor = honest(*sizes, **options)  # type: ignore[call-overload]
        return made.fill_(float("nan") if made.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", dirty)
    assert torch.equal(scores_of(target, 4), expected)


@everywhere
def test_a_wide_and_a_deep_tree_of_300_nodes(precision: str) -> None:
    target = target_of(IN_BLOCKS, precision)
    rng = random.Random(3)
    sequence = opened(target, random_tokens(30, rng))
    wide, deep = TokenTree(), TokenTree.chain(random_tokens(300, rng))
    for token in range(VOCAB):
        for child in range(3):
            wide.add(wide.add(ROOT, token), child)
    scores = target.score([(sequence, wide), (sequence, deep)])
    last = len(wide) - 1
    short = target.score([(sequence, TokenTree.chain(wide.path_tokens(last)))])[0].logits
    assert torch.equal(scores[0].logits[last + 1], short[-1])
    target.commit(scores, [None, list(range(300))])
    sequence.tokens += [*deep.tokens, 1]
    fresh = opened(target, sequence.tokens)
    assert torch.equal(*(target.score([(one, TokenTree())])[0].logits for one in (sequence, fresh)))


def test_nothing_to_do() -> None:
    target = target_of("biases", "float32")
    target.prefill([])
    scores = target.score([])
    assert len(scores) == 0
    target.commit(scores, [])
    assert target.lm_head(torch.empty(0, target.hidden_size)).shape == (0, VOCAB)
    assert target.embed(torch.empty(0, dtype=torch.long)).shape == (0, target.hidden_size)
    target.prefill([target.sequence([1])])


def test_a_prompt_that_fills_the_context() -> None:
    model = model_of(config(max_position_embeddings=64, num_hidden_layers=1))
    target = DenseTarget(read_decoder_spec(copy.deepcopy(model)))
    tokens = random_tokens(63, random.Random(0))
    near(target.score([(opened(target, tokens), TokenTree())])[0].logits[0], reference(model, tokens))
    with pytest.raises(BadInput, match="context holds 64"):
        target.sequence([1] * 64)


@everywhere
def test_taps_change_nothing_and_the_last_one_gives_the_scores(precision: str) -> None:
    target = target_of(IN_BLOCKS, precision)
    rng = random.Random(1)
    sequence, tree = opened(target, random_tokens(20, rng)), random_tree(9, rng)
    plain = target.score([(sequence, tree)])[0].logits
    layers = range(target.num_layers + 1)
    tapped = target.score([(sequence, tree)], aux_hidden_state_layers=layers)[0]
    assert torch.equal(tapped.logits, plain)
    assert torch.equal(target.lm_head(tapped.hidden_states[target.num_layers]), plain)
    first = target.embed(torch.tensor([sequence.tokens[-1], *tree.tokens]))
    assert torch.equal(tapped.hidden_states[0], first)
    assert torch.equal(target.lm_head(first)[3], target.lm_head(first[3:4])[0])


@pytest.mark.parametrize("token", [-1, VOCAB, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    target = target_of("biases", "bfloat16")
    sequence = opened(target, [1, 2])
    with pytest.raises(OutpaceError, match=f"token {token} is not in the vocabulary of {VOCAB}"):
        target.score([(sequence, TokenTree.chain([token]))])
    with pytest.raises(OutpaceError, match="not in the vocabulary"):
        target.embed(torch.tensor([token]))
    assert target.score([(sequence, TokenTree())])[0].logits.isfinite().all()


@everywhere
def test_a_resumed_pass_without_new_rows_is_committed(precision: str) -> None:
    target = target_of(IN_BLOCKS, precision)
    rng = random.Random(2)
    prompt = random_tokens(20, rng)
    one, other = opened(target, prompt), opened(target, prompt)
    tree = TokenTree.chain([3, 4, 5])
    tree.auxiliary_tokens = [AuxiliaryToken(7, 2, (ROOT,)), AuxiliaryToken(8, 3, (ROOT,))]
    without = TokenTree.chain([3, 4, 5])
    target.commit(target.score([(one, without)], resume=target.score([(one, tree)])), [[0, 1, 2]])
    target.commit(target.score([(other, without)]), [[0, 1, 2]])
    for sequence in (one, other):
        sequence.tokens += [3, 4, 5, 6]
    assert torch.equal(*(target.score([(sequence, TokenTree())])[0].logits for sequence in (one, other)))


def test_threads_of_python_may_share_the_kernels() -> None:
    targets = [target_of(shape, precision) for shape in list(SHAPES)[:3] for precision in PRECISIONS[:3]]
    expected = [scores_of(target, index) for index, target in enumerate(targets)]

    def again(index: int) -> bool:
        torch.set_num_threads(1 + index % 3)  # the pool changes its size between others' forwards
        return all(torch.equal(scores_of(targets[index], index), expected[index]) for _ in range(5))

    with threads(1), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(again, range(len(targets))))


def test_a_model_is_freed_while_another_works() -> None:
    model = model_of(config())
    kept = DenseTarget(read_decoder_spec(model))
    expected = scores_of(kept)
    for _ in range(5):
        other = DenseTarget(read_decoder_spec(model), "int8")
        scores_of(other)
        del other
        assert torch.equal(scores_of(kept), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("inside", [1, 2])
def test_a_forked_process_computes_on_threads_of_its_own(inside: int) -> None:
    target = target_of("biases", "float32")
    with threads(2):
        expected = scores_of(target)
        child = os.fork()
        if child == 0:  # no pytest from here on; whoever waits for ever is ended
            signal.alarm(60)
            torch.set_num_threads(inside)
            os._exit(0 if torch.equal(scores_of(target), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(scores_of(target), expected)


def test_forks_of_kv_grow_apart_across_the_granule_of_memory() -> None:
    target = target_of("heads-of-8-in-threes", "bfloat16")
    rng = random.Random(0)
    tokens = random_tokens(CONTEXT - 20, rng)
    whole = opened(target, tokens[:250])
    for size in (3, 5, 255, 250, 220):  # over 256, 512 and on, from trees
        chain = TokenTree.chain(tokens[len(whole.tokens) : len(whole.tokens) + size])
        target.commit(target.score([(whole, chain)]), [list(range(size))])
        whole.tokens = tokens[: len(whole.tokens) + size + 1]
    for length in (0, 1, 15, 16, 17, 255, 256, 257, 600):
        other = target.sequence([*tokens[:length], 5, 6], kv=target.fork(whole.kv, length))
        target.prefill([other])
        fresh = opened(target, other.tokens)
        assert torch.equal(*(target.score([(one, TokenTree.chain([7]))])[0].logits for one in (other, fresh)))
    fresh = opened(target, whole.tokens)
    assert torch.equal(*(target.score([(one, TokenTree())])[0].logits for one in (whole, fresh)))
    with pytest.raises(ValueError, match="cannot keep"):
        target.fork(whole.kv, target.length(whole.kv) + 1)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torch_s_default_type_is_not_read(precision: str, dtype: torch.dtype) -> None:
    """It is the process's: loading a model in another thread changes it for a while."""
    target = target_of(next(iter(SHAPES)) if precision != "int4" else IN_BLOCKS, precision)
    expected, before = scores_of(target), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(scores_of(target), expected)
        sequence = opened(target, [1, 2, 3, 4])
        assert target.keys(sequence.kv, 0, 3).dtype == torch.float32
        assert target.embed(torch.tensor([1, 2])).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_rotations_that_were_interrupted_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target = fresh_target()
    known = target._positions

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(target.native, "set_rotation", interrupted)
        with pytest.raises(KeyboardInterrupt):
            target._rotate_up_to(known + 1)
    assert target._positions == known
    target._rotate_up_to(known + 1)
    assert target._positions > known


def test_positions_beyond_the_rotations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = fresh_target()
    sequence = opened(target, [1, 2, 3])
    monkeypatch.setattr(target, "_rotate_up_to", lambda positions: None)
    plan = ForwardPlan([SequenceRows(sequence.kv, 0, 1, [target._positions], None)], 0, target.num_layers)
    with pytest.raises(OutpaceError, match="beyond the rotations"):
        target.run(plan, [1], logits=True)


def fresh_target() -> DenseTarget:
    """One whose rotations are shorter than its context."""
    target = DenseTarget(replace(read_decoder_spec(model_of(next(iter(SHAPES.values()))())), context_length=5_000))
    assert target._positions < 5_000
    return target
