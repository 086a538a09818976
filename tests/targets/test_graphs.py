"""GraphTarget beyond the suite: buckets, buffers and their pool, captured steps, and who chooses it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from torch.nn import functional

from outpace.core.auxiliary_token import AuxiliaryToken
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT, TokenTree
from outpace.targets import choice, rotary
from outpace.targets.base import Sequence
from outpace.targets.dense import torch_kv
from outpace.targets.dense.architectures import UnsupportedArchitecture
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.graph_target import GraphTarget
from outpace.targets.dense.graphs import BUCKETS, Work
from outpace.targets.dense.kernel_build import NotAvailable
from outpace.targets.dense.torch_kv import Buffer, Pool, TorchKV
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from outpace.targets.hf_support import disagreement
from outpace.targets.sub_graph import SubGraph
from recorder import Recording, record
from target_suite import VOCAB, near, opened, random_tokens, random_tree, reference, tiny_model


@cache
def target_of(architecture: str, buckets: tuple[int, ...]) -> GraphTarget:
    return GraphTarget(read_decoder_spec(tiny_model(architecture)), prefill_chunk=16, buckets=buckets)


def replaying(architecture: str = "llama", **options: Any) -> GraphTarget:
    return GraphTarget(read_decoder_spec(tiny_model(architecture)), **({"capture": record} | options))


def scored(target: GraphTarget, sequence: Sequence, tree: TokenTree | None = None) -> Tensor:
    return target.score([(sequence, tree or TokenTree())])[0].logits


# Buckets


@settings(max_examples=15)
@given(
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.integers(0, 20),
    st.integers(0, 3),
    st.sampled_from(BUCKETS),
    st.sampled_from(["gemma3", "llama", "gemma2"]),
)
@example(0, 1, 2, 0, 8, "gemma2")  # nothing is committed: a padding row that saw nothing would be NaN
def test_any_padding_gives_the_same(seed: int, length: int, nodes: int, side: int, bucket: int, kind: str) -> None:
    rng = random.Random(seed)
    tokens, tree = random_tokens(length, rng), random_tree(nodes, rng)
    tree.auxiliary_tokens = [AuxiliaryToken(rng.randrange(VOCAB), rng.randrange(9), (ROOT,)) for _ in range(side)]
    found = []
    for target in (target_of(kind, ()), target_of(kind, (bucket, 512))):
        sequence = opened(target, tokens)
        before = sequence.kv.buffer.data[..., : length - 1, :].clone() if length > 1 else None
        scores = target.score([(sequence, tree)])
        data = sequence.kv.buffer.data
        assert before is None or torch.equal(data[..., : length - 1, :], before)
        assert bool(data.isfinite().all())
        found.append((scores[0].logits, scores.forward_state.side_kv[0]))
        target.close(sequence.kv)
    (plain, plain_kv), (padded, padded_kv) = found
    assert padded.shape == plain.shape == (1 + len(tree) + side, VOCAB)
    near(padded, plain)
    near(padded_kv, plain_kv)


def test_rows_go_to_the_smallest_bucket_that_holds_them() -> None:
    target = replaying(buckets=(2, 8))
    sequence = opened(target, [1, 2, 3])
    for nodes in (0, 1, 2, 7):
        scored(target, sequence, TokenTree.chain(range(nodes)))
    assert len(target.graphs) == 2
    eager = target.counts.eager
    near(scored(target, sequence, TokenTree.chain(range(8)))[:1], scored(target, sequence))
    assert len(target.graphs) == 2
    assert target.counts.eager == eager + 1  # nine rows: no bucket


# Buffers and their pool


def pool_of(dropped: Callable[[Buffer], None] = lambda _: None, keep: int = 2) -> Pool:
    return Pool((1, 2, 1), 4, torch.zeros(1), dropped, keep)


def test_capacities_are_powers_of_two() -> None:
    pool = pool_of()
    assert [pool.take(rows).capacity for rows in (1, 256, 257, 1000, 1024, 1025)] == [256, 256, 512, 1024, 1024, 2048]


@torch.inference_mode()
def test_buffers_come_back_as_zeros_and_the_oldest_is_dropped() -> None:
    dropped: list[Buffer] = []
    pool = pool_of(dropped.append)
    first, second, third = (pool.take(1) for _ in range(3))
    address = third.data.data_ptr()
    third.data.fill_(float("nan"))
    for buffer in (first, second, third):
        pool.give(buffer)
    assert dropped == [first]
    assert pool.take(300) not in (second, third)  # another size
    again = pool.take(10)
    assert again is third
    assert again.data.data_ptr() == address
    assert not again.data.any()
    assert pool.take(1) is second
    assert pool.free == []


def test_buffers_that_are_not_lent_leave_when_a_bound_is_reached() -> None:
    dropped: list[Buffer] = []
    pool = pool_of(dropped.append)
    first, second = pool.take(1), pool.take(1)
    pool.give(first)
    pool.give(second)
    pool.limit(pool.bytes_of(1))
    assert dropped == [first]
    larger = pool.take(300)
    assert dropped == [first, second]
    pool.give(larger)
    assert pool.free == []  # alone it is larger than the bound
    pool.limit(None)
    pool.give(pool.take(300))
    assert len(pool.free) == 1


@torch.inference_mode()
def test_a_store_moves_what_is_committed_and_gives_the_smaller_buffer_back() -> None:
    pool = pool_of()
    store = TorchKV(pool)
    side = torch.arange(1.0, 1 + 2 * 5 * 4).view(1, 2, 1, 5, 4)
    store.take(side, [0, 1, 4])
    small = store.buffer
    assert small is not None
    small.data[..., 3:, :] = 7.0  # scratch
    large = store.reserve(300)
    assert large.capacity == 512
    assert pool.free == [small]
    assert torch.equal(large.data[..., :3, :], side[..., [0, 1, 4], :])
    assert not large.data[..., 3:, :].any()
    twin = store.fork(2)
    twin.take(side, [2])
    assert torch.equal(large.data[..., 2, :], side[..., 4, :])
    with pytest.raises(ValueError, match="cannot keep"):
        store.fork(4)
    store.clear()
    store.clear()
    assert (store.length, store.buffer, len(pool.free)) == (0, None, 1 if twin.buffer is small else 2)


def test_a_request_that_outgrows_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kv, "SMALLEST", 16)
    monkeypatch.setattr(rotary, "FIRST_POSITIONS", 8)  # the rotation table grows as well
    model = tiny_model("gemma3")
    target = GraphTarget(read_decoder_spec(model), capture=record)
    rng = random.Random(1)
    sequence = opened(target, random_tokens(3, rng))
    capacities = []
    while len(sequence.tokens) < 40:
        tree = random_tree(rng.choice([0, 3]), rng)
        scores = target.score([(sequence, tree)])
        capacities.append(sequence.kv.buffer.capacity)
        node = rng.randrange(-1, len(tree))
        near(scores[0].logits[node + 1], reference(model, sequence.tokens + tree.path_tokens(node)))
        target.commit(scores, [tree.path(node)])
        sequence.tokens += [*tree.path_tokens(node), int(scores[0].logits[node + 1].argmax())]
    assert sorted(set(capacities)) == [16, 32, 64]
    assert capacities == sorted(capacities)
    assert target.counts.replayed > len(capacities) - 10  # each buffer and bucket begins with one that is not


def test_a_prompt_takes_its_buffer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kv, "SMALLEST", 16)
    target = replaying(prefill_chunk=10)
    sequence = opened(target, random_tokens(60, random.Random(0)))
    assert sequence.kv.buffer.capacity == 64
    assert target.pool.free == []  # no smaller one was filled first


# Captured steps


def test_captured_on_the_second_use_and_replayed_from_then_on() -> None:
    target = replaying()
    sequence = opened(target, random_tokens(9, random.Random(0)))
    assert vars_of(target) == (1, 0, 0, 0)
    found = [scored(target, sequence) for _ in range(4)]
    assert vars_of(target) == (2, 1, 3, 0)
    for one in found[1:]:
        near(one, found[0])


def vars_of(target: GraphTarget) -> tuple[int, int, int, int]:
    counts = target.counts
    return counts.eager, counts.captured, counts.replayed, counts.refused


def test_scores_are_not_overwritten_by_what_is_replayed_next() -> None:
    model = tiny_model("llama")
    target = GraphTarget(read_decoder_spec(model), capture=record)
    rng = random.Random(2)
    batch = [opened(target, random_tokens(count, rng)) for count in (7, 12)]
    kept = []
    for _ in range(3):
        for sequence in batch:
            tree = random_tree(3, rng)
            kept.append((sequence, tree, target.score([(sequence, tree)])))
    assert target.counts.captured == 2
    for sequence, tree, scores in kept:
        for node in (ROOT, 0, 1, 2):
            near(scores[0].logits[node + 1], reference(model, sequence.tokens + tree.path_tokens(node)))
    sequence, tree, scores = kept[-4]  # its K/V is its own, too
    target.commit(scores, [tree.path(2)])
    sequence.tokens += [*tree.path_tokens(2), 5]
    near(scored(target, sequence)[0], reference(model, sequence.tokens))


def test_the_next_request_replays_the_graphs_of_the_last() -> None:
    model = tiny_model("mistral")
    target = GraphTarget(read_decoder_spec(model), capture=record)
    rng = random.Random(3)
    for number in range(3):
        sequence = opened(target, random_tokens(20 - 6 * number, rng))
        for _ in range(2):
            near(scored(target, sequence)[0], reference(model, sequence.tokens))
        target.close(sequence.kv)
    assert (target.counts.captured, target.counts.replayed) == (1, 5)


def test_other_forwards_run_eagerly() -> None:
    target = replaying()
    sequence, other = opened(target, [1, 2, 3]), opened(target, [4, 5])
    tree = TokenTree.chain([6])
    embedded = TokenTree(auxiliary_tokens=[AuxiliaryToken(0, 1, (ROOT,), torch.zeros(target.hidden_size))])
    for _ in range(3):
        target.score([(sequence, embedded)])
        target.score([(sequence, embedded), (other, tree)])
        target.score([(sequence, tree)], graph=SubGraph(start=1))
        draft = target.score([(sequence, tree)], graph=SubGraph(stop=2))
        target.score([(sequence, tree)], resume=draft)
        target.score([(sequence, tree)], graph=SubGraph(kv={0: torch.tensor([0])}))
        target.score([(sequence, tree), (other, tree)], graph=SubGraph(kv={1: torch.tensor([0])}))
        target.score([(sequence, tree)], graph=SubGraph(skip_attention=frozenset({1})))
        target.score([(sequence, tree)], graph=SubGraph(skip_mlp=frozenset({1})))
        target.queries([sequence])
    assert len(target.graphs) == 0
    assert target.counts.replayed == 0


def test_the_step_that_was_not_used_for_longest_leaves() -> None:
    target = replaying(graphs=2)
    sequence = opened(target, [1, 2, 3])
    one, two, four = (TokenTree.chain(range(nodes)) for nodes in (0, 1, 3))
    for tree in (one, one, two, two, one, four, four):  # four rows put out two
        scored(target, sequence, tree)
    assert len(target.graphs) == 2
    assert target.counts.captured == 3
    scored(target, sequence, one)
    assert target.counts.captured == 3
    before = target.counts.eager
    scored(target, sequence, two)
    assert target.counts.eager == before + 1  # from the beginning


def test_what_cannot_be_captured_runs_eagerly_and_is_not_tried_again() -> None:
    tried = []

    def refuse(work: Work) -> Recording:
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    target = replaying(capture=refuse)
    sequence = opened(target, [1, 2, 3])
    found = [scored(target, sequence) for _ in range(4)]
    assert len(tried) == 1
    assert vars_of(target) == (5, 0, 0, 1)
    assert torch.equal(found[0], found[3])


def test_a_buffer_that_the_pool_drops_takes_its_graphs_along() -> None:
    target = replaying()
    batch = [opened(target, [1, 2, 3 + index]) for index in range(torch_kv.KEPT + 1)]
    for sequence in batch:
        scored(target, sequence)
    assert len(target.graphs) == torch_kv.KEPT + 1
    for sequence in batch:
        target.close(sequence.kv)
    assert len(target.graphs) == torch_kv.KEPT


def test_masks_are_aligned_as_kernels_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's attention wants rows of a mask that begin at multiples of 16 bytes."""
    seen = []
    attend = functional.scaled_dot_product_attention

    def noted(*given: Any, **options: Any) -> Tensor:
        seen.append(options["attn_mask"].shape[-1])
        return attend(*given, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    target = target_of("llama", (4,))
    for length in (3, 70):
        sequence = opened(target, random_tokens(length, random.Random(0)))
        scored(target, sequence, TokenTree.chain([1, 2]))
        target.score([(sequence, TokenTree())], graph=SubGraph(kv={0: torch.tensor([0, 1])}))
    assert seen
    assert all(extent % 8 == 0 for extent in seen)


def test_the_recorder_refuses_what_a_capture_does_not_allow() -> None:
    with pytest.raises(RuntimeError, match="does not allow"):
        record(lambda: (torch.zeros(int(torch.ones(1).sum())),))


# Precisions, other targets, and the choice


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gemma3"])
def test_reduced_precisions(architecture: str, dtype: torch.dtype, most: float) -> None:
    model = tiny_model(architecture).to(dtype)
    target = GraphTarget(read_decoder_spec(model))
    assert target.dtype == str(dtype).removeprefix("torch.")
    assert opened(target, [1, 2]).kv.buffer.data.dtype == dtype
    states = torch.randn(3, target.hidden_size)  # whoever asks may compute in another precision
    assert torch.equal(target.lm_head(states), target.lm_head(states.to(dtype)))
    assert target.final_norm(states).dtype == dtype
    assert disagreement(target, model) < most


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_agrees_with_the_kernels_of_the_cpu(architecture: str) -> None:
    plan = read_decoder_spec(tiny_model(architecture))
    try:
        dense = DenseTarget(plan)
    except NotAvailable as error:
        pytest.skip(str(error))
    target = GraphTarget(plan)
    rng = random.Random(4)
    tokens, tree = random_tokens(30, rng), random_tree(11, rng)
    near(*(one.score([(opened(one, tokens), tree)])[0].logits for one in (target, dense)))


def test_rotation_passes_further_dimensions() -> None:
    heads = torch.randn(3, 2, 8)
    turns = rotary.RotaryTable(
        [lambda at: (at[:, None].cos().expand(-1, 2), at[:, None].sin().expand(-1, 2))], heads, 5
    )
    found = rotary.rotate(heads, turns.rows(torch.tensor([0, 1, 4]), 4)[0])
    assert torch.equal(found[..., 4:], heads[..., 4:])
    assert torch.equal(found[0], heads[0])
    near(found[1, :, 0], heads[1, :, 0] * torch.tensor(1).cos() - heads[1, :, 2] * torch.tensor(1).sin())


def test_weight_bytes_are_what_a_forward_reads() -> None:
    model = tiny_model("qwen2")
    read = sum(weight.nbytes for name, weight in model.named_parameters() if "norm" not in name)
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert GraphTarget(read_decoder_spec(model)).weight_bytes == read - (
        0 if tied else model.model.embed_tokens.weight.nbytes
    )


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models look as if they were on a GPU to whoever chooses."""
    monkeypatch.setattr(
        choice, "read_decoder_spec", lambda model: replace(read_decoder_spec(model), device=torch.device("cuda"))
    )


def test_models_on_a_gpu_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    target, note = choice.choose_target(tiny_model("llama"))
    assert isinstance(target, GraphTarget)
    assert note == ""
    target, note = choice.choose_target(tiny_model("gpt2"))
    assert isinstance(target, HFTarget)
    assert "gpt2" in note
    assert isinstance(choice.choose_target(tiny_model("llama"), kind="generic")[0], HFTarget)


def test_graphs_are_checked_before_a_model_is_trusted_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    monkeypatch.setattr(choice, "GraphTarget", partial(GraphTarget, capture=record))
    target, _ = choice.choose_target(tiny_model("llama"))
    assert isinstance(target, GraphTarget)
    assert (target.counts.captured, target.counts.replayed) == (1, 2)

    class Idle(Recording):
        def replay(self) -> None:
            pass

    monkeypatch.setattr(choice, "GraphTarget", partial(GraphTarget, capture=lambda work: Idle(record(work).output, [])))
    target, note = choice.choose_target(tiny_model("llama"))
    assert isinstance(target, HFTarget)
    assert "differ" in note


def test_one_that_scores_otherwise_or_has_no_room_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    monkeypatch.setattr(choice, "disagreement", lambda target, model: 0.5)
    target, note = choice.choose_target(tiny_model("llama"))
    assert isinstance(target, HFTarget)
    assert "differ" in note

    def full(*_: Any) -> GraphTarget:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(choice, "GraphTarget", full)
    target, note = choice.choose_target(tiny_model("llama"))
    assert isinstance(target, HFTarget)
    assert "no room" in note
    assert "\n" not in note
    target, note = choice.choose_target(tiny_model("llama"), precision="int8")
    assert "int8 falls back to float32" in note


def test_the_cpu_s_target_refuses_weights_that_are_elsewhere() -> None:
    model = tiny_model("llama").to("meta")
    with pytest.raises(BadInput, match="on meta"):
        DenseTarget(read_decoder_spec(model))
    split = tiny_model("llama")
    split.model.layers[1].to("meta")
    with pytest.raises(UnsupportedArchitecture, match="cpu and meta"):
        read_decoder_spec(split)
