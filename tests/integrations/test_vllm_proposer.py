"""The plug-in inside vLLM, without vLLM: which tokens it drafts for which row, whatever happens to rows."""

from __future__ import annotations

import json
import random
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from outpace.controllers.base import Budget
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.datastore.build import build_datastore
from outpace.datastore.corpus import TokenPiece
from outpace.drafting.merged import MergedTrees
from outpace.integrations.vllm.proposer import best_path
from outpace.integrations.vllm.proposer_options import ProposerOptions
from outpace.integrations.vllm.running_requests import Running, RunningRequests, known_tokens
from outpace.integrations.vllm.step_costs import StepCosts
from outpace.integrations.vllm.token_methods import TOKEN_METHODS, build_drafter
from vllm_double import Engine, Row, config, proposer

WITHOUT_DATASTORE = [name for name in TOKEN_METHODS if name != "rest"]


def text(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 7919 + index).randrange(1, 1000) for index in range(count)]


@pytest.mark.parametrize("named", [True, False], ids=["ids", "tokens alone"])
@pytest.mark.parametrize("method", WITHOUT_DATASTORE)
def test_copied_text_is_drafted(method: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one = proposer(monkeypatch, {"method": method})
    engine = Engine(one, named=named)
    passage = text(1, 60)
    row = Row("a", passage, passage[10:50])
    engine.add(row)
    engine.run()
    assert row.done == 40
    assert row.rounds < 25  # without drafts: 40


@pytest.mark.parametrize("named", [True, False], ids=["ids", "tokens alone"])
@pytest.mark.parametrize("method", WITHOUT_DATASTORE)
def test_requests_come_go_and_move(method: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(proposer(monkeypatch, {"method": method}), named=named, chunk=16)
    rows = [Row(f"r{at}", text(at, 30), text(at, 30)[at : at + 8 + 3 * at]) for at in range(6)]
    alone = []
    for row in rows:  # each alone, in a proposer of its own
        single = Row(row.name, row.prompt, row.answer)
        other = Engine(proposer(monkeypatch, {"method": method}), named=named, chunk=16)
        other.add(single)
        other.run()
        alone.append(single.rounds)
    for row in rows:
        engine.add(row)
        engine.step()
    engine.run()
    assert [row.done for row in rows] == [len(row.answer) for row in rows]
    assert sum(row.rounds for row in rows) < sum(len(row.answer) for row in rows) * 0.75
    assert sum(row.rounds for row in rows) <= sum(alone) * 1.5  # each row has kept its own state


def test_a_preempted_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(proposer(monkeypatch))
    passage = text(3, 40)
    one, other = Row("one", passage, passage[5:35]), Row("other", text(4, 20), text(5, 40))
    engine.add(one)
    engine.add(other)
    for _ in range(3):
        engine.step()
    engine.rows.remove(one)
    one.drafted = []
    engine.step()
    engine.rows.append(one)
    engine.run()
    assert one.done == 30
    assert one.rounds < 15


def test_half_an_answer_of_a_preempted_request_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same request when it comes back: its prompt has not grown, and its namespace gets the whole answer."""
    one = proposer(monkeypatch)
    engine = Engine(one)
    row, other = Row("one", text(3, 40), text(7, 20), namespace="team"), Row("other", text(4, 20), text(5, 40))
    engine.add(row)
    engine.add(other)
    for _ in range(12):
        engine.step()
    known = one.requests.find("one", 0, engine.token_ids[0], len(row.tokens))
    engine.rows.remove(row)
    row.drafted = []
    engine.step()
    assert not one.earlier.texts("team", greedy=True)
    engine.rows.append(row)
    engine.step()
    now = one.requests.find("one", 1, engine.token_ids[1], len(row.tokens))
    assert now is known and now is not None and now.sequence.prompt_length == 40
    engine.run()
    engine.add(Row("last", text(8, 20), text(9, 3)))
    engine.run()
    assert [list(answer) for answer in one.earlier.texts("team", greedy=True)] == [row.prompt[-16:] + row.answer]


def test_calls_that_are_left_out_do_not_confuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(proposer(monkeypatch), named=False)
    passage = text(6, 40)
    row = Row("a", passage, passage[5:39])
    engine.add(row)
    for number in range(8):
        if engine.rows:
            engine.step(call=number % 3 != 1)
    engine.run()
    assert row.done == 34
    assert row.rounds < 24


def test_nothing_is_drafted_past_the_end_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(proposer(monkeypatch, context=64), context=64)
    passage = [5, 6, 7, 8] * 10
    engine.add(Row("a", passage, passage[:23]))  # the double asserts the bound
    engine.run()


def test_text_that_repeats_nothing_is_not_drafted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(proposer(monkeypatch))
    row = Row("a", list(range(1, 40)), list(range(100, 200)))
    engine.add(row)
    drafted = 0
    while engine.rows:
        engine.step()
        drafted += len(row.drafted)
    assert drafted == 0
    assert row.rounds == 100


def test_a_copying_request_that_is_always_wrong_stops_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    one = proposer(monkeypatch)
    engine = Engine(one)
    words = random.Random(1)
    row = Row("a", [words.randrange(1, 90) for _ in range(80)], [words.randrange(1, 90) for _ in range(300)])
    engine.add(row)
    drafted = []
    while engine.rows:
        engine.step()
        drafted.append(len(row.drafted))
    assert sum(drafted[:30]) > 0
    assert sum(drafted[-100:]) < 10


def test_namespaces_keep_answers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = text(9, 60)

    def rounds(first: str | None, second: str | None) -> int:
        engine = Engine(proposer(monkeypatch))
        engine.add(Row("1", text(10, 20), answer, namespace=first))
        engine.run()
        row = Row("2", text(11, 20), answer, namespace=second)
        engine.add(row)
        engine.run()
        return row.rounds

    assert rounds("team", "team") < 20
    assert rounds("team", "others") == rounds(None, None) == rounds("team", None) == 60


def test_sampled_requests_do_not_copy_from_greedy_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(proposer(monkeypatch))
    answer = text(9, 60)
    engine.add(Row("1", text(10, 20), answer, namespace="team"))
    engine.run()
    row = Row("2", text(11, 20), answer, namespace="team", temperature=1.0)
    engine.add(row)
    engine.run()
    assert row.rounds == 60


def test_a_datastore_is_copied_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    corpus = text(12, 500)
    build_datastore(tmp_path / "store", (TokenPiece(corpus, True) for _ in range(1)), "toy")
    for method in ("rest", "sam"):
        engine = Engine(proposer(monkeypatch, {"method": method, "datastore": str(tmp_path / "store")}))
        row = Row("a", [*text(13, 5), *corpus[100:110]], corpus[110:150])
        engine.add(row)
        engine.run()
        assert row.rounds < 25


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "eagle3"}, "does not draft from tokens alone"),
        ({"method": "no such"}, "unknown method"),
        ({"method": "sam", "settings": {"no_such": 1}}, "no setting 'no_such'"),
        ({"method": "cascade", "settings": {"parts": ["sam", "lookahead"]}}, "needs more of the model"),
        ({"method": "rest"}, "datastore"),
        ({"wrong": 1}, "additional_config, outpace.wrong"),
        ({"remember": -1}, "outpace.remember"),
    ],
)
def test_what_cannot_draft_here_is_refused(
    options: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match=said):
        proposer(monkeypatch, options)


def test_options_are_read_where_vllm_carries_them() -> None:
    assert ProposerOptions.of(config({"method": "pld"}).additional_config).method == "pld"
    assert ProposerOptions.of({"other": 1}).method == ProposerOptions.of(None).method == "sam"


def test_the_best_path_of_a_tree() -> None:
    tree = TokenTree()
    left = tree.add(-1, 1, path_acceptance_prob=0.5)
    right = tree.add(-1, 2, path_acceptance_prob=0.4)
    tree.add(left, 3, path_acceptance_prob=0.1)
    deep = tree.add(right, 4, path_acceptance_prob=0.35)
    tree.add(deep, 5, path_acceptance_prob=0.3)
    assert best_path(tree, Budget(8)) == [2, 4, 5]
    assert best_path(tree, Budget(8, relative_costs=(1.0, 1.32, 1.64, 1.96))) == [2, 4]
    assert best_path(tree, Budget(8, relative_costs=(1.0, 1.5, 2.0, 2.5))) == []
    assert best_path(TokenTree(), Budget(8)) == []


def test_of_merged_drafters_the_better_path_is_drafted() -> None:
    merge = build_drafter(ProposerOptions(method="merge"), 1000)
    assert isinstance(merge, MergedTrees)
    long = TokenTree.chain([1, 2, 3], path_acceptance_probs=[0.3, 0.2, 0.1])
    sure = TokenTree.chain([1, 9], path_acceptance_probs=[0.8, 0.7])
    budget = Budget(8, max_nodes=8)
    assert merge.unite((long, sure), budget, greedy=True).tokens == [1, 9]
    assert merge.unite((TokenTree(), long), budget, greedy=True).tokens == [1, 2, 3]


def test_costs_follow_the_engine_s_steps() -> None:
    costs = StepCosts()
    rng = random.Random(0)
    for _ in range(300):
        rows = rng.randrange(1, 12)
        costs.saw(rows, 0.010 + 0.002 * rows + rng.random() * 0.001)
        if rng.random() < 0.05:
            costs.saw(rows, 3.0)  # the server had nothing to do
    costs.renew()
    found = costs.relative(1, 4)
    assert found[0] == 1.0
    assert found[4] == pytest.approx((0.0105 + 0.002 * 5) / (0.0105 + 0.002), rel=0.05)
    cheap = StepCosts()
    for _ in range(100):
        cheap.saw(rng.randrange(1, 12), 0.01)
    cheap.renew()
    assert cheap.relative(1, 4)[4] < 1.1


def test_costs_that_have_changed_are_learned_again() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.saw(1, 0.001)
    for rows in [1, 5] * 200:
        costs.saw(rows, 0.1 + 0.05 * rows)
    costs.renew()
    assert costs.relative(1, 4)[4] > 1.5


def test_rows_are_told_by_their_tokens() -> None:
    requests = RunningRequests(4)

    def began(tokens: list[int], row: int) -> Running:
        array = np.array(tokens, np.int32)
        one = Running(None, None, known_tokens(array, len(tokens)), len(tokens), row)  # type: ignore[arg-type]
        requests.add(None, one)
        return one

    requests.began_call()
    first, second = began([1, 2, 3], 0), began([1, 2, 3, 4], 1)
    requests.began_call()
    longer = np.array([1, 2, 3, 4, 5], np.int32)
    assert requests.find(None, 0, longer, 5) is second  # the longest beginning
    assert requests.find(None, 1, longer, 5) is first  # each once in a call
    assert requests.find(None, 2, longer, 5) is None
    requests.began_call()
    assert requests.find(None, 0, np.array([9, 2, 3, 7], np.int32), 4) is None
    assert len(requests) == 2


def test_rows_of_wider_numbers_are_told_as_well() -> None:
    requests = RunningRequests(4)
    requests.began_call()
    tokens: npt.NDArray[Any] = np.array([1, 2, 3, 4], np.int64)
    one = Running(None, None, known_tokens(tokens, 3), 3, 0)  # type: ignore[arg-type]
    requests.add("a", one)
    for count in (3, 4, 200):
        tokens = np.resize(tokens, max(count, 4))
        assert requests.find("a", 0, tokens, count) is one
        one.take(tokens, count)


def test_an_id_that_is_used_again_for_another_prompt() -> None:
    requests = RunningRequests(4)
    requests.began_call()
    tokens = np.array([1, 2, 3], np.int32)
    requests.add("a", Running(None, None, known_tokens(tokens, 3), 3, 0))  # type: ignore[arg-type]
    requests.began_call()
    assert requests.find("a", 0, np.array([7, 8, 9, 1], np.int32), 4) is None
    assert len(requests) == 0


def test_requests_that_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for named in (True, False):
        one = proposer(monkeypatch)
        engine = Engine(one, named=named)
        for number in range(120):
            engine.add(Row(f"r{number}", text(number, 10), text(number + 500, 3)))
            engine.run()
        assert len(one.requests) <= 80  # of the unnamed ones, those of the last calls


RECORDED = json.loads((Path(__file__).parent / "vllm_calls.json").read_text())
"""Calls of vLLM 0.32: five requests, at most three at a time, prompts in chunks of 64, a context of 128 tokens, whose
end the last one reaches. Recorded by a Proposer that writes what it is given and what it answers."""


@pytest.mark.parametrize("named", [True, False], ids=["ids", "tokens alone"])
@pytest.mark.parametrize("method", WITHOUT_DATASTORE)
def test_calls_that_were_recorded(method: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one = proposer(monkeypatch, {"method": method}, context=128, requests=3)
    one.vocab_size = 49152
    whole = {name: row for call in RECORDED for name, row in zip(call["ids"], call["rows"], strict=True)}
    right = drafted = 0
    for call in RECORDED:
        rows = np.zeros((3, 128), np.int32)
        for index, row in enumerate(call["rows"]):
            rows[index, : len(row)] = row
        if named:
            one.runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=call["ids"]), requests={})
        drafts = one.propose(call["sampled"], np.array([*map(len, call["rows"])], np.int32), rows)
        for name, row, sampled, draft in zip(call["ids"], call["rows"], call["sampled"], drafts, strict=True):
            assert not draft or sampled  # nothing for a prompt that is being read
            assert len(row) + len(draft) < 128
            after = whole[name][len(row) :]
            drafted += len(draft)
            right += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, after, strict=False)))
    assert right >= 40  # of 69 that were accepted in vLLM; what came after the last call is not known
    assert drafted <= 2.5 * right
    assert len(one.requests) <= (1 if named else 5)
