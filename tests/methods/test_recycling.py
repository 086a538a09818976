"""Token recycling: what was scored is kept, asked by context, forgotten by age, and never crosses namespaces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from outpace.acceptance.base import Verdict
from outpace.acceptance.greedy import Greedy
from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.calibration import Calibration
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods.lookup.recycling import Recycling
from outpace.targets.dense import binding
from outpace.targets.table import Table, TableTarget, random_table
from outpace.targets.top import _top, top
from support import greedy_is_plain

PRICED = Budget(8, 8, 8, relative_costs=(1.0, *(1.0 + 0.25 * n for n in range(1, 9))))


def table_of(next_token: dict[tuple[int, ...], int], vocab: int) -> Table:
    """Sure of the successors given, by the longest context that is known; indifferent elsewhere."""

    def logits(path: tuple[int, ...]) -> torch.Tensor:
        row = torch.zeros(vocab)
        for order in (2, 1):
            if (token := next_token.get(path[-order:])) is not None:
                row[token] = 9.0
                break
        return row

    return logits


def run(target: TableTarget, drafter: Recycling, prompt: tuple[int, ...], n: int, namespace: str = "") -> Generation:
    decoder = Decoder(target)
    method = Method("recycling", drafter, RecursiveRejection(), Fixed(6, max_nodes=12))
    generation = decoder.submit(Request(prompt, method, max_new_tokens=n, namespace=namespace, trace=True))
    decoder.run()
    return generation


@given(rows=st.integers(1, 4), vocab=st.sampled_from([5, 300, 1000, 4097]), k=st.integers(1, 8), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_the_top_is_the_top(rows: int, vocab: int, k: int, seed: int) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    best = logits.topk(min(k, vocab), dim=-1)
    expected = list(zip(best.values.tolist(), best.indices.tolist(), strict=True))
    assert list(_top(logits, k)) == expected
    assert list(top(logits, k)) == expected
    if binding.loaded():
        assert list(zip(*binding.top(logits, min(k, vocab)), strict=True)) == expected


def test_a_loop_is_drafted_whole_once_the_target_has_been_round_it() -> None:
    target = TableTarget(8, table_of({(i,): (i + 1) % 6 for i in range(6)}, 8))
    generation = run(target, Recycling(), (0, 7, 0), 36)
    assert generation.tokens == [(i + 1) % 6 for i in range(36)]
    lengths = [len(one.committed) for one in generation.rounds]
    assert lengths[0] == 1 and max(lengths) == 7  # nothing known at first; later as deep as the budget
    assert generation.metrics.rounds < 15


def test_rejected_draft_tokens_teach_as_well() -> None:
    """The target ranks what follows every node of the tree, also of those that it did not take."""
    target = TableTarget(9, table_of({(0,): 1, (1,): 2, (5,): 6}, 9))
    drafter = Recycling(topk=2, context=1)
    sequence = target.sequence([0, 3, 0])
    target.prefill([sequence])
    state = drafter.begin(sequence)
    tree = TokenTree()
    tree.add(tree.add(ROOT, 1), 2)
    tree.add(ROOT, 5)  # will be rejected
    scores = target.score([(sequence, tree)])
    sequence.tokens += [1, 2, 4]
    drafter.observe(state, Verdict((0, 1), 4, scores[0], (1, 2, 4)))
    sequence.tokens += [5]
    assert drafter.propose(state, Budget(1, 1)).tokens == [6]


def test_two_tokens_of_context_tell_more_than_one() -> None:
    """After 1 comes 2 or 3, by what was before: a key of one token has always just heard the other answer."""
    successors = {(0, 1): 2, (4, 1): 3, (2,): 4, (3,): 0, (4,): 1, (0,): 1}
    target = TableTarget(5, table_of(successors, 5))

    def rounds(context: int) -> int:
        generation = run(target, Recycling(context=context, topk=1), (4, 0), 60)
        assert generation.tokens == run(target, Recycling(entries=1), (4, 0), 60).tokens
        return generation.metrics.rounds

    assert rounds(2) < 0.6 * rounds(1)


def test_what_was_not_used_longest_leaves_first() -> None:
    target = TableTarget(50, random_table(50, 3))
    drafter = Recycling(context=1, entries=10)
    sequence = target.sequence(list(range(30)))
    state = drafter.begin(sequence)
    use = drafter.caches(state)[0]
    assert (use.entries, use.bound, use.evicted) == (10, 10, 19)
    for token in range(29):
        sequence.tokens.append(token)
        drafted = drafter.propose(state, Budget(1, 1)).tokens
        assert drafted == ([token + 1] if token >= 19 else [])


@pytest.mark.parametrize("context", [1, 2])
def test_names_keep_apart_and_no_name_forgets(context: int) -> None:
    target = TableTarget(40, random_table(40, 5))
    drafter = Recycling(context=context)
    prompt = (3, 9)

    def first_rounds(namespace: str) -> tuple[int, int]:
        generation = run(target, drafter, prompt, 20, namespace)
        return generation.metrics.drafted, generation.metrics.rounds

    alone = first_rounds("")
    assert first_rounds("") == alone, "nothing outlives a request without a name"
    assert first_rounds("mine") == alone
    again = first_rounds("mine")
    assert again[1] < alone[1], "what was learned is used"
    assert first_rounds("yours") == alone, "and nowhere else, how fast it went included"


def drafted_late(table: Table, monkeypatch: pytest.MonkeyPatch | None = None) -> float:
    """Draft tokens a round after the first 20 rounds, under prices."""
    if monkeypatch is not None:
        monkeypatch.setattr(Calibration, "learn", lambda *_: None)
    target = TableTarget(8, table)
    drafter, sequence = Recycling(context=1, topk=1), target.sequence([4, 0])
    target.prefill([sequence])
    state = drafter.begin(sequence)
    drafted = 0
    for number in range(40):
        tree = drafter.propose(state, PRICED)
        drafted += len(tree) if number >= 20 else 0
        scores = target.score([(sequence, tree)])
        verdict = Greedy().decide(scores[0], sequence.chance.at(0, ""))
        target.commit(scores, [verdict.path])
        committed = (*(tree.tokens[node] for node in verdict.path), verdict.token)
        sequence.tokens += committed
        drafter.observe(state, replace(verdict, scores=scores[0], committed=committed))
    return drafted / 20


def test_drafts_that_prove_wrong_are_not_made_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is as sure of a successor that is another one every time as of one that always comes."""
    loop = table_of({(i,): (i + 1) % 4 for i in range(4)}, 8)

    def fickle(path: tuple[int, ...]) -> torch.Tensor:
        return 9.0 * torch.nn.functional.one_hot(torch.tensor((path[-1] + 1 + len(path) // 3) % 8), 8).float()

    assert drafted_late(loop) > 6
    assert drafted_late(fickle) < 0.4
    assert drafted_late(fickle, monkeypatch) > 0.8, "without learning they go on"


def test_nothing_is_kept_of_requests_that_left() -> None:
    drafter = Recycling()
    run(TableTarget(6, random_table(6, 1)), drafter, (1, 2), 12)
    assert len(drafter._tables) == 0


def test_greedy_answers_are_plain_decodings() -> None:
    greedy_is_plain("recycling", {"max_nodes": 8})
