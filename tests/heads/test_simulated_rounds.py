"""Rounds that are played over a stored text begin where those of decoding begin."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_support import Written, batch_of, head_of, packed_of, table, teacher_for, true_states
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.heads.base import Batch
from outpace.heads.simulated_rounds import answer_spans, leading, played, round_starts
from outpace.methods.registry import build
from outpace.targets.base import Target
from outpace.training.replay import Replaying
from weights_support import with_head

STEPS = 3
PROMPTS = [[3, 1, 4], [7], [5, 3], [9, 2, 6, 5, 3, 5]]


def decoded(target: Target, head: Any, prompt: list[int], length: int = 40) -> tuple[list[int], list[int]]:
    """The tokens of prompt and greedy answer, and before each round how many tokens were committed."""
    method = build("eagle3", with_head(target, head), {"mode": "tree", "topk": 1, "depth": STEPS, "max_nodes": STEPS})
    begun: list[int] = []
    propose = method.drafter.propose_batch

    def noting(states: Sequence[Any], budgets: Sequence[Any]) -> list[TokenTree]:
        begun.extend(len(state.sequence.tokens) for state in states)
        return propose(states, budgets)

    method.drafter.propose_batch = noting  # type: ignore[method-assign]
    decoder = Decoder(target)
    generation = decoder.submit(Request(tuple(prompt), method, max_new_tokens=length))
    decoder.run()
    return list(generation.sequence.tokens), begun


@pytest.mark.parametrize("vocabulary", [12, 9])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("pack", [False, True])
def test_rounds_begin_where_those_of_decoding_begin(vocabulary: int, seed: int, pack: bool) -> None:
    target = table(12, seed)
    head = taught(target, vocabulary)
    runs = [decoded(target, head, prompt) for prompt in PROMPTS]
    rows, sizes = [tokens for tokens, _ in runs], [len(prompt) for prompt in PROMPTS]
    batch = batch_of(target, rows, sizes, head.config.aux_hidden_state_layers)
    batch = packed_of(batch) if pack else batch
    _, accepted = head.own_drafts(batch, teacher_for(target, head))
    starts = {start: begun for (start, _), (_, begun) in zip(batch.conversations(), runs, strict=True)}
    expected = sorted(start + at - 2 for start, begun in starts.items() for at in begun if at >= 2)
    found = played(answer_spans(batch), accepted.tolist())
    last = {stop - 3 for _, stop in batch.conversations()}  # with one token to go a decoder drafts nothing
    assert sorted(set(found) - last) == expected
    assert len(expected) < sum(len(row) for row in rows) - sum(sizes)  # something was accepted
    assert round_starts(batch, accepted).nonzero()[:, 0].tolist() == sorted(found)
    figures = head.losses(batch, teacher_for(target, head))
    hits = [accepted[row] for row in found]
    assert float(figures["round_tokens"]) == pytest.approx(1 + sum(map(int, hits)) / len(hits))
    assert float(figures["accept_1"]) == pytest.approx(sum(int(hit) > 0 for hit in hits) / len(hits))


def taught(target: Target, vocabulary: int = 0, **options: Any) -> Any:
    """A head that has learned a little, so that some of its drafts are accepted."""
    head = head_of("eagle3", target, vocabulary, steps=STEPS, **options)
    rows = [greedy(target, prompt, 24) for prompt in ([1, 2], [8, 4], [10, 6], [0, 11])]
    batch = batch_of(target, rows, [2] * 4, head.config.aux_hidden_state_layers)
    teacher = teacher_for(target, head)
    head.requires_grad_(True)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(25):
        head.losses(batch, teacher)["loss"].backward()
        optimiser.step()
        optimiser.zero_grad()
    return head.requires_grad_(False)


def greedy(target: Target, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(true_states(target, tokens, [target.num_layers])[target.num_layers][-1].argmax()))
    return tokens


def test_leading_counts_up_to_the_first_miss() -> None:
    steps = [
        (torch.tensor([0, 1, 2, 3]), torch.tensor([True, True, False, True])),
        (torch.tensor([0, 1, 2]), torch.tensor([True, False, True])),
        (torch.tensor([0, 1]), torch.tensor([True, True])),
    ]
    assert leading(steps, 5).tolist() == [3, 1, 0, 1, 0]


def test_starts_weigh_in_training_alone() -> None:
    target = table(12)
    head = taught(target, 10, start_weight=5.0, decay=1.0)
    rows, prompts = [greedy(target, [3, 1, 4], 12), greedy(target, [7, 9], 9)], [3, 2]
    batch, teacher = batch_of(target, rows, prompts, head.config.aux_hidden_state_layers), teacher_for(target, head)
    plain = float(head.losses(batch, teacher)["loss"])
    begun = played(answer_spans(batch), chains(head, batch, teacher))
    one_step = [at_each_row(head, batch, teacher, start) for start in begun]
    assert len(one_step) > 2
    head.train()
    weighted = float(head.losses(batch, teacher)["loss"])
    assert weighted != pytest.approx(plain, rel=1e-4)
    heavy = taught(target, 10, start_weight=1000.0, decay=1.0).train()
    heavy.load_state_dict(head.state_dict())
    only = float(heavy.losses(batch, teacher)["loss"])
    starts = [value for value in one_step if value]
    right = [sum(step) / len(step) for step in zip_steps(starts)]
    assert only == pytest.approx(sum(right) / len(right), rel=2e-2)


def chains(head: Any, batch: Batch, teacher: Any) -> list[int]:
    found: list[int] = head.own_drafts(batch, teacher)[1].tolist()
    return found


def at_each_row(head: Any, batch: Batch, teacher: Any, row: int) -> list[float]:
    """Cross entropy of a draft from one row after the text's own tokens, step by step, row by row."""
    width = batch.tokens.shape[1]
    at, first = row // width, row % width
    size = int(batch.real[at].sum())
    text = batch.tokens[at, :size].tolist()
    target = table(12)
    written, words = Written(head, target), set(head.draft_vocabulary.d2t.tolist())
    states = true_states(target, text, sorted({*head.config.aux_hidden_state_layers, target.num_layers}))
    fused, last = written.fused(states), first + 1
    found = []
    for step, one in enumerate(written.rows(text[: last + 1], fused[:last], text[last + 1 : last + STEPS])):
        if last + 1 + step >= size or text[last + 1 + step] not in words:
            break
        said = target.lm_head_rows(head.draft_vocabulary.d2t) @ states[target.num_layers][last + step]
        found.append(float(-(said.softmax(-1) * one.log_softmax(-1)).sum()))
    return found


def zip_steps(rows: list[list[float]]) -> list[list[float]]:
    return [[row[step] for row in rows if len(row) > step] for step in range(STEPS)]


def test_replayed_chains_are_judged_by_the_target_after_them() -> None:
    target = table(12)
    head = taught(target, 10, replay=1.0, decay=1.0)
    rows, prompts = [greedy(target, [3, 1, 4], 14), greedy(target, [7, 9], 9)], [3, 2]
    batch, teacher = batch_of(target, rows, prompts, head.config.aux_hidden_state_layers), teacher_for(target, head)
    data: Any = None
    replaying = Replaying(data, head, teacher, target, share=1.0)
    drafted, accepted = head.own_drafts(batch, teacher)
    failed = replaying.failed(batch, accepted, STEPS)
    assert failed
    with_chains = replaying.replayed(batch, random.Random(0))
    assert with_chains.replay is not None
    own = with_chains.replay.tokens
    assert (own[0] >= 0).nonzero()[:, 0].tolist() == failed
    assert own[:, failed].T.tolist() == drafted[failed, :-1].tolist()
    expected: list[list[float]] = [[] for _ in range(STEPS)]
    words = set(head.draft_vocabulary.d2t.tolist())
    written, width = Written(head, target), batch.tokens.shape[1]
    matrix = target.lm_head_rows(head.draft_vocabulary.d2t)
    layers = sorted({*head.config.aux_hidden_state_layers, target.num_layers})
    for row in batch.ahead(batch.answer, 2).flatten().nonzero()[:, 0].tolist():
        text = rows[row // width]
        last = row % width + 1
        chain = drafted[row].tolist() if row in failed else text[last + 1 :]
        if text[last + 1] not in words:
            continue
        whole = [*text[: last + 1], *chain[: STEPS - 1]]
        states, fused = true_states(target, whole, layers), written.fused(true_states(target, text, layers))
        for step, one in enumerate(written.rows(text[: last + 1], fused[:last], chain[: STEPS - 1])):
            if row not in failed and (last + 1 + step >= len(text) or text[last + 1 + step] not in words):
                break
            said: Tensor = matrix @ states[target.num_layers][last + step]
            expected[step].append(float(-(said.softmax(-1) * one.log_softmax(-1)).sum()))
    right = sum(sum(one) / len(one) for one in expected) / STEPS
    assert float(head.losses(with_chains, teacher)["loss"]) == pytest.approx(right, rel=2e-3)


def test_rows_that_are_not_unrolled_leave_the_first_step_as_it_is() -> None:
    target = table(12)
    head = taught(target, later_rows=0.5)
    rows = [greedy(target, [one, 3], 16) for one in range(8)]
    batch, teacher = batch_of(target, rows, [2] * 8, head.config.aux_hidden_state_layers), teacher_for(target, head)
    whole = head.losses(batch, teacher)
    head.train()
    torch.manual_seed(1)
    some = head.losses(batch, teacher)
    assert some["agree_1"] == whole["agree_1"]
    assert some["loss"] != whole["loss"]
    torch.manual_seed(1)
    assert head.losses(batch, teacher)["loss"] == some["loss"]
    assert float(some["loss"]) == pytest.approx(float(whole["loss"]), rel=0.2)
