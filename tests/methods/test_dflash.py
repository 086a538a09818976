"""DFlash and DDTree: what blocks see and learn, the network beside a target, exactness, and a request's life."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_support import target_of
from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.heads.base import Batch, Teacher
from outpace.heads.head_config import TargetFacts
from outpace.heads.kinds import find_kind, plan
from outpace.heads.untrained import as_training_begins, random_head
from outpace.methods.learned.dflash.drafter import DFlashDrafter, DFlashState
from outpace.methods.learned.dflash.network import DFlash
from outpace.methods.registry import build
from outpace.targets.base import Sequence, Target
from outpace.targets.table import TableTarget, random_table
from support import round_error
from weights_support import with_head

VOCAB = 12
HEADS: dict[str, dict[str, Any]] = {
    "whole blocks": {"options": {"block": 4}},
    "causal": {"options": {"block": 4, "causal": True}},
    "three layers, few words": {"options": {"block": 3, "layers": 3}, "vocabulary": 7},
    "low rank": {"options": {"block": 4}, "rank": 5},
}
"""Keywords of ``random_head``."""


def toy(vocab: int = VOCAB) -> TableTarget:
    return TableTarget(vocab, random_table(vocab, 8, order=1))


def head_of(target: Target, shape: str = "whole blocks") -> DFlash:
    head = random_head(["dflash"], target, seed=3, **HEADS[shape])
    assert isinstance(head, DFlash)
    return head


def made(name: str, target: Target, head: DFlash, **settings: Any) -> Method:
    return build(name, with_head(target, head), settings)


def states_of(target: Target, tokens: Seq[int], layers: Seq[int]) -> dict[int, Tensor]:
    """States of all tokens but the last, (n, hidden) by layer."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def take(_: Sequence, position: int, hidden_states: Any) -> None:
        for layer in layers:
            found[layer].append(hidden_states[layer].clone())

    target.prefill([target.sequence(tokens)], layers, take)
    return {layer: torch.cat(pieces) for layer, pieces in found.items()}


def said(head: DFlash, target: Target, tokens: Seq[int], depth: int | None = None) -> Tensor:
    """What the module says after ``tokens``, (drafted, Vd), from the target's own states."""
    states = states_of(target, tokens, head.config.aux_hidden_state_layers)
    context = head.context([states[tap][None] for tap in head.config.aux_hidden_state_layers])
    embedded = target.embed(torch.tensor(tokens[-1:])).float()[None]
    found = head.blocks(context, embedded, torch.tensor([[len(tokens) - 1]]))[0, 0, 1:]
    logits: Tensor = head.draft_vocabulary(found)[:depth]
    return logits


def begun(drafter: DFlashDrafter, target: Target, tokens: Seq[int]) -> DFlashState:
    state = drafter.begin(target.sequence(tokens))
    layers = drafter.aux_hidden_state_layers
    target.prefill([state.sequence], layers, lambda _, *shown: drafter.on_prefill(state, *shown))
    return state


def commit(
    drafter: DFlashDrafter, target: Target, state: DFlashState, tree: TokenTree, path: list[int], token: int
) -> None:
    """A round in which ``path`` was accepted."""
    scores = target.score([(state.sequence, tree)], drafter.aux_hidden_state_layers)
    target.commit(scores, [path])
    committed = (*(tree.tokens[node] for node in path), token)
    state.sequence.tokens += committed
    drafter.observe_batch([state], [Verdict(tuple(path), token, scores[0], committed)])


def close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("where", ["table", "kernels"])
def test_beside_a_target_the_network_says_what_the_module_says(where: str, shape: str) -> None:
    """After the prompt, after a round of its own, one that it did not draft, and an autoregressive step."""
    target = toy() if where == "table" else target_of("heads-of-64-in-threes", "float32")
    head = head_of(target, shape)
    drafter = DFlashDrafter(head, target, 2)
    state = begun(drafter, target, [5, 3, 8, 8, 1, 0])
    close(drafter.rows([state], [3])[0], said(head, target, state.sequence.tokens))
    commit(drafter, target, state, drafter.propose_batch([state], [Budget(3, 6, 2)])[0], [0], 4)
    close(drafter.rows([state], [3])[0], said(head, target, state.sequence.tokens))
    other = TokenTree()
    for parent, token in ((-1, 2), (-1, 7), (1, 6), (2, 9)):
        other.add(parent, token)
    commit(drafter, target, state, other, [1, 2], 11)
    close(drafter.rows([state], [3])[0], said(head, target, state.sequence.tokens))
    commit(drafter, target, state, TokenTree(), [], 3)
    close(drafter.rows([state], [3])[0], said(head, target, state.sequence.tokens))


def test_of_a_causal_block_no_more_rows_run_than_are_asked_for() -> None:
    target = toy()
    head = head_of(target, "causal")
    drafter = DFlashDrafter(head, target)
    state = begun(drafter, target, [5, 3, 8])
    for depth in (1, 2, 3):
        found = drafter.rows([state], [depth])[0]
        assert found is not None and len(found) == depth
        close(found, said(head, target, state.sequence.tokens, depth))


def test_requests_are_drafted_for_together_as_alone() -> None:
    target = toy()
    head = head_of(target)
    prompts = [(5, 3, 8), (1,), (2, 2, 9, 4, 0, 7)]
    drafter = DFlashDrafter(head, target, 3)
    batch = [begun(drafter, target, prompt) for prompt in prompts]
    together = drafter.rows(batch, [3, 2, 3])
    for state, found in zip(batch, together, strict=True):
        alone = DFlashDrafter(head, target, 3)
        close(found, alone.rows([begun(alone, target, state.sequence.tokens)], [3])[0])  # type: ignore[arg-type]
    for name in ("dflash", "ddtree"):
        method = made(name, target, head, **({"num_draft_tokens": 3} if name == "dflash" else {"max_nodes": 5}))
        requests = [Request(prompt, method, max_new_tokens=20) for prompt in prompts]
        apart = [decoded(target, [request])[0].tokens for request in requests]
        assert [one.tokens for one in decoded(target, requests)] == apart


# --------------------------------------------------------------------------------------------------- training


def texts(target: TableTarget, rows: int, length: int, prompt: int = 2) -> Batch:
    """What the target says at temperature 0 after every token, with its states."""
    every: list[list[int]] = []
    for row in range(rows):
        text = [(5 * row + 1) % VOCAB, row % VOCAB]
        while len(text) < length:
            text.append(int(target.table(tuple(text)).argmax()))
        every.append(text)
    layers = (*sorted({1, 2, target.num_layers}),)
    states = {layer: torch.zeros(rows, length, target.vocab_size) for layer in layers}
    for row, one in enumerate(every):
        for layer, found in states_of(target, [*one, 0], layers).items():
            states[layer][row] = found
    answer = torch.zeros(rows, length, dtype=torch.bool)
    answer[:, prompt:] = True
    return Batch(torch.tensor(every), states, torch.ones_like(answer), answer)


def teacher_for(target: TableTarget, head: DFlash) -> Teacher:
    every = torch.eye(target.vocab_size)
    return Teacher(every, every[head.draft_vocabulary.d2t], lambda states: states, target.num_layers)


@cache
def trained() -> tuple[DFlash, list[float]]:
    """A tiny head that has learned a table, and its losses."""
    target = toy()
    head = as_training_begins(random_head(["dflash"], target, options={"block": 4, "every": 1}), target)
    assert isinstance(head, DFlash)
    head.train().requires_grad_(True)
    batch, teacher = texts(target, 24, 12), teacher_for(target, head)
    batch.states = {**batch.states, 4: 6.0 * batch.states[4]}  # a sure teacher
    optimiser, losses = torch.optim.AdamW(head.parameters(), lr=2e-2, weight_decay=0.0), []
    torch.manual_seed(0)  # blocks begin at random places
    for _ in range(160):
        loss = head.losses(batch, teacher)["loss"]
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(loss.detach()))
    return head.eval().requires_grad_(False), losses


def test_training_learns_what_comes_and_decoding_profits() -> None:
    head, losses = trained()
    assert losses[-1] < 0.3 * losses[0]
    target = toy()
    figures = head.losses(texts(target, 24, 12), teacher_for(target, head))
    assert min(float(figures[f"agree_{step}"]) for step in (1, 2, 3)) > 0.9
    for name, settings in (("dflash", {"num_draft_tokens": 3}), ("ddtree", {"max_nodes": 6, "topk": 2})):
        generation = decoded(target, [Request((3, 4), made(name, target, head, **settings), max_new_tokens=40)])[0]
        assert generation.metrics.rounds <= 20  # texts are longer than those that it has learned from


def test_a_block_sees_states_before_its_beginning_alone() -> None:
    target = toy()
    for shape in ("whole blocks", "causal"):
        head = head_of(target, shape)
        generator = torch.Generator().manual_seed(0)
        context = torch.randn(1, 9, VOCAB, generator=generator)
        embedded, anchors = torch.randn(1, 2, VOCAB, generator=generator), torch.tensor([[2, 6]])
        before = head.blocks(context, embedded, anchors)
        for at in range(9):
            moved = context.clone()
            moved[:, at] += 1.0
            changed = (head.blocks(moved, embedded, anchors) - before).abs().amax((0, 3))  # (blocks, rows)
            assert [bool((one > 1e-4).any()) for one in changed] == [at < 2, at < 6]
        embedded[:, 0] += 1.0  # blocks do not see each other either
        changed = (head.blocks(context, embedded, anchors) - before).abs().amax((0, 3))
        assert (changed[0] > 1e-4).all() and not changed[1].any()


def test_rows_of_a_causal_block_see_none_of_the_later_ones() -> None:
    target = toy()
    one, other = (head_of(target, shape) for shape in ("causal", "whole blocks"))
    assert one.seen().tolist() == torch.ones(4, 4).tril().bool().tolist()
    assert other.seen().all()
    other.load_state_dict(one.state_dict())
    arguments = torch.ones(1, 3, VOCAB), torch.ones(1, 1, VOCAB), torch.tensor([[3]])
    assert (one.blocks(*arguments) - other.blocks(*arguments)).abs().amax((0, 1, 3))[:3].min() > 1e-4


def test_the_loss_asks_for_the_target_s_words_at_their_places() -> None:
    """Written out block by block, from the definition."""
    target = toy()
    head = random_head(["dflash"], target, vocabulary=10, options={"block": 3, "every": 1})
    assert isinstance(head, DFlash)
    batch, teacher = texts(target, 8, 8), teacher_for(target, head.eval())
    batch.answer[1, 5:] = batch.real[1, 5:] = False
    found = head.losses(batch, teacher)
    anchors, alive = head.anchors(batch.answer)
    words = set(head.draft_vocabulary.d2t.tolist())
    losses: dict[int, list[float]] = {1: [], 2: []}
    for row in range(8):
        for anchor in anchors[row][alive[row]].tolist():
            tokens = batch.tokens[row].tolist()
            logits = said(head, target, tokens[: anchor + 1])
            for step in (1, 2):
                at = anchor + step
                if at >= 8 or not batch.answer[row, at] or tokens[at] not in words:
                    break
                p = target.table(tuple(tokens[:at]))[head.draft_vocabulary.d2t].softmax(-1)
                losses[step].append(float(-(p * logits[step - 1].log_softmax(-1)).sum()))
    means = [sum(losses[step]) / len(losses[step]) for step in (1, 2)]
    assert len(losses[2]) < len(losses[1]) < 8 * 6  # some tokens are not among the words, and end their blocks
    weight = float(torch.tensor(-1.0 / head.options.gamma).exp())
    assert float(found["loss"]) == pytest.approx((means[0] + weight * means[1]) / (1.0 + weight), rel=0.02)


def test_blocks_begin_before_tokens_of_answers_and_while_evaluated_always_at_the_same() -> None:
    head = random_head(["dflash"], toy(), options={"every": 2})
    assert isinstance(head, DFlash)
    answer = torch.zeros(2, 12, dtype=torch.bool)
    answer[0, 4:10], answer[1, 2:] = True, True
    anchors, alive = head.anchors(answer)
    assert alive.sum(1).tolist() == [3, 5]
    for row in range(2):
        chosen = anchors[row][alive[row]]
        assert answer[row][chosen + 1].all() and len(set(chosen.tolist())) == len(chosen)
    assert head.anchors(answer)[0].equal(anchors)
    head.train()
    assert any(not head.anchors(answer)[0].equal(anchors) for _ in range(10))


def test_layers_share_the_width_that_a_size_stands_for() -> None:
    facts = TargetFacts(name="any", hidden_size=576, vocab_size=1000, num_layers=30, fingerprint=[])
    counts = []
    for layers in (1, 2, 3):
        config = plan(find_kind("dflash"), facts, vocabulary=1000, options={"layers": layers})
        assert config.layers == layers
        counts.append(config.layers * config.intermediate)
    assert max(counts) - min(counts) <= 64 * 3
    with pytest.raises(BadInput, match="block"):
        plan(find_kind("dflash"), facts, options={"block": 1})


# ---------------------------------------------------------------------------------------------------- decoding


def decoded(target: Target, requests: Seq[Request]) -> list[Generation]:
    decoder = Decoder(target)
    running = [decoder.submit(request) for request in requests]
    decoder.run()
    return running


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize(
    "name, settings", [("dflash", {"num_draft_tokens": 3}), ("ddtree", {"max_nodes": 6, "topk": 3})]
)
def test_greedy_answers_are_plain_decoding_s(name: str, settings: dict[str, Any], shape: str) -> None:
    target = toy()
    method = made(name, target, head_of(target, shape), **settings)
    for prompt in ((1, 2), (7,), (3, 3, 3)):
        plain = decoded(target, [Request(prompt, made("none", target, head_of(target)), max_new_tokens=25)])[0]
        found = decoded(target, [Request(prompt, method, max_new_tokens=25)])[0]
        assert found.tokens == plain.tokens
        assert found.metrics.drafted > 20


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0), SamplingParams(0.8, repetition_penalty=1.5)])
@pytest.mark.parametrize(
    "name, settings",
    [
        ("dflash", {"num_draft_tokens": 2}),
        ("dflash", {"num_draft_tokens": 2, "sampled": False}),
        ("ddtree", {"max_nodes": 3, "topk": 2}),
    ],
)
@pytest.mark.parametrize("shape", ["whole blocks", "causal"])
def test_a_sampled_round_keeps_the_law(name: str, settings: dict[str, Any], params: SamplingParams, shape: str) -> None:
    table = random_table(3, 4)
    target = TableTarget(3, table)
    head = random_head(["dflash"], target, seed=1, **HEADS[shape])
    assert isinstance(head, DFlash)
    assert round_error(made(name, target, head, **settings), params, table=table) < 1e-6


def test_tokens_that_are_taken_back_leave_nothing() -> None:
    target = toy()
    drafter = DFlashDrafter(head_of(target), target, 2)
    method = Method("dflash", drafter, made("ddtree", target, head_of(target)).rule, Fixed(3, 2, 4))
    decoder = Decoder(target)
    generation = decoder.submit(Request((5, 3, 8), method, max_new_tokens=40))
    for _ in range(3):
        decoder.step()
    tokens = generation.sequence.tokens
    for moved in ([*tokens[:5], 9, 9, 2], tokens[:4]):
        decoder.rewind([(generation, list(moved))])
        close(drafter.rows([generation.draft_state], [3])[0], said(head_of(target), target, list(moved)))
        decoder.step()
        close(drafter.rows([generation.draft_state], [3])[0], said(head_of(target), target, generation.sequence.tokens))


def test_nothing_is_drafted_from_states_that_are_behind() -> None:
    """Where states were left out a request goes on without a draft, and later from what it has seen since."""
    target = toy()
    drafter = DFlashDrafter(head_of(target), target)
    state = drafter.begin(target.sequence([5, 3, 8, 1]))
    target.prefill([state.sequence])
    assert drafter.rows([state], [3]) == [None]
    assert len(drafter.propose_batch([state], [Budget(3, 3)])[0]) == 0
    commit(drafter, target, state, TokenTree(), [], 6)
    assert drafter.rows([state], [3])[0] is not None


def test_keys_and_values_are_released_with_their_request() -> None:
    target = toy()
    drafter: Any = DFlashDrafter(head_of(target), target, 2)
    opened, closed, held = drafter._runner.open, drafter._runner.close, list[int]()
    drafter._runner.open = lambda: held.append(1) or opened()  # type: ignore[func-returns-value]
    drafter._runner.close = lambda kv: held.pop() and closed(kv)
    method = Method("dflash", drafter, made("ddtree", target, head_of(target)).rule, Fixed(3, 2, 4))
    decoded(target, [Request(prompt, method, max_new_tokens=9) for prompt in ((1, 2), (4,))])
    assert not held
