"""Trees of parallel heads from measured accuracies."""

import itertools
from math import prod
from typing import Any

import pytest
import torch

from eagle_support import batch_of, head_of, packed_of, table, teacher_for
from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.heads.typical_tree import falling, typical_tree
from outpace.methods.registry import build
from weights_support import with_head

ACCURACIES = [[0.6, 0.2, 0.1], [0.4, 0.3, 0.05], [0.3, 0.1, 0.1]]


@pytest.mark.parametrize("nodes", [1, 5, 12, 39])
def test_it_has_the_paths_that_are_worth_most(nodes: int) -> None:
    paths = [path for depth in range(1, 4) for path in itertools.product(range(3), repeat=depth)]
    worth = {path: prod(ACCURACIES[level][rank] for level, rank in enumerate(path)) for path in paths}
    found = [tuple(path) for path in typical_tree(ACCURACIES, nodes)]
    assert len(set(found)) == len(found) == min(nodes, len(paths))
    best = sorted(worth.values(), reverse=True)[: len(found)]
    assert [worth[path] for path in found] == pytest.approx(best)
    assert all(path[:-1] in found[:at] or len(path) == 1 for at, path in enumerate(found))


def test_choices_that_were_never_right_are_left_out() -> None:
    assert typical_tree([[0.5, 0.0], [0.0]], 9) == [[0]]
    assert typical_tree([], 9) == []
    assert falling([0.5, 0.1, 0.2, 0.05]) == (0.5, 0.1, 0.1, 0.05)


@pytest.mark.parametrize("pack", [False, True])
def test_accuracies_are_counted_over_the_text(pack: bool) -> None:
    target = table(12)
    head = head_of("medusa", target, 10, heads=2)
    rows, prompts = [[3, 1, 4, 11, 5, 9, 2, 6], [5, 3, 5, 8, 9, 1]], [3, 2]
    batch = batch_of(target, rows, prompts, head.config.aux_hidden_state_layers)
    teacher = teacher_for(target, head)
    ids = head.draft_vocabulary.d2t.tolist()
    counts = torch.zeros(2, 10)
    asked = torch.zeros(2)
    for at, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        for place in range(prompt - 2, len(row) - 2):
            state = teacher.norm(batch.states[teacher.final][at, place][None])
            logits = head.draft_vocabulary(head.predicted(state))[0]
            for index in range(2):
                if place + 2 + index >= len(row):
                    continue
                asked[index] += 1
                order = [ids[one] for one in logits[index].argsort(descending=True).tolist()]
                token = row[place + 2 + index]
                if token in order:
                    counts[index, order.index(token)] += 1
    found = head.measured([packed_of(batch) if pack else batch], teacher)
    for index in range(2):
        right = falling((counts[index] / asked[index]).tolist())
        assert found.rank_accuracies[index] == pytest.approx(right, abs=1e-4)
    assert head.measured([], teacher) == head.config


def test_a_typical_tree_is_the_same_in_every_round() -> None:
    target = table(12)
    head = head_of("medusa", target)
    with pytest.raises(BadInput, match="needs a head whose accuracies"):
        build("medusa", with_head(target, head), {"tree": "typical"})
    head.config = head.config.model_copy(update={"rank_accuracies": tuple(map(tuple, ACCURACIES))})
    method = build("medusa", with_head(target, head), {"tree": "typical", "max_nodes": 7, "topk": 3})
    shapes = set()
    for prompt in ([1, 2, 3], [4, 5, 6, 7], [8, 9]):
        sequence = target.sequence(prompt)
        drafter: Any = method.drafter
        state = drafter.begin(sequence)
        shown: list[Any] = []
        target.prefill([sequence], drafter.aux_hidden_state_layers, lambda _, *some, kept=shown: kept.append(some))
        for chunk in shown:
            drafter.on_prefill(state, *chunk)
        [tree] = drafter.propose_batch([state], [Budget(3, topk=3, max_nodes=7)])
        shapes.add(tuple(tree.parents))
    assert len(shapes) == 1
    assert len(next(iter(shapes))) == 7
