import json
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from outpace.acceptance.base import AcceptanceRule, Verdict
from outpace.acceptance.rejection import RecursiveRejection
from outpace.bench import runner, slices
from outpace.bench.bench_report import BenchReport, notes
from outpace.bench.method_records import Measured, MethodRecords
from outpace.bench.page import render
from outpace.bench.records import Answer, Record
from outpace.bench.runner import run
from outpace.bench.settings import BenchSettings, Progress
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.metrics import PHASES, CacheUse, RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.namespaces import Namespaces
from outpace.engine.method import Method
from outpace.model import Model
from outpace.models.base import Message
from outpace.prompts.prompt import Prompt
from outpace.targets.base import Sequence, TreeScores
from outpace.targets.costs import FixedCosts
from outpace.targets.table import Table, TableTarget, random_table

VOCAB, EOS = 32, 0
ROW = """
method lossless prompts tokens seconds tokens_per_second decode_tokens_per_second ttft_ms speedup speedup_ci95
mean_acceptance_length acceptance_rate per_position_acceptance identical time_split peak_memory_mb error
""".split()  # noqa: SIM905


class Letters:
    """A tokenizer of characters, with a mark before every message."""

    fingerprint = "letters of the bench"

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [2 + ord(character) % (VOCAB - 2) for character in text]

    def decode(self, ids: Seq[int]) -> str:
        return "".join(chr(64 + token) for token in ids)

    def token_text(self, token: int) -> str:
        return chr(64 + token)

    def token_bytes(self, token: int) -> bytes | None:
        return self.token_text(token).encode()

    def __len__(self) -> int:
        return VOCAB

    def chat(self, messages: Seq[Message]) -> list[int]:
        return [token for message in messages for token in (1, *self.encode(message["content"]))]


class Oracle(Drafter[DraftState]):
    """Drafts what the target will say, every third token wrong. ``fail_at`` proposals it raises ``error``."""

    def __init__(
        self,
        target: TableTarget,
        error: BaseException | None = None,
        fail_at: int = 0,
        log: list[tuple[int, ...]] | None = None,
    ) -> None:
        self.target, self.error, self.fail_at, self.log = target, error, fail_at, log
        self.calls = self.open = 0

    def begin(self, sequence: Sequence) -> DraftState:
        self.open += 1
        if self.log is not None:
            self.log.append(tuple(sequence.tokens))
        return DraftState(sequence)

    def end(self, state: DraftState) -> None:
        self.open -= 1

    def propose_batch(self, states: Seq[DraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        self.calls += 1
        if self.error is not None and self.calls >= self.fail_at:
            raise self.error
        return [self._chain(state.sequence, budget.depth) for state, budget in zip(states, budgets, strict=True)]

    def _chain(self, sequence: Sequence, depth: int) -> TokenTree:
        tokens = list(sequence.tokens)
        for i in range(depth):
            best = int(self.target.table(tuple(tokens)).argmax())
            tokens.append((best + 1) % VOCAB if i % 3 == 2 else best)
        return TokenTree.chain(tokens[len(tokens) - depth :] if depth else [])


class Second(RecursiveRejection):
    """Says the second best token at every position divisible by seven: wrong, whatever it claims."""

    name = "test-second"

    def accept(self, scores: Seq[TreeScores], states: Seq[Any], chances: Seq[Chance]) -> list[Verdict]:
        found = []
        for one in scores:
            best = one.distribution.processed([ROOT])[0].topk(2).indices.tolist()
            found.append(Verdict((), best[len(one.sequence.tokens) % 7 == 0]))
        return found


class Lossy(Second):
    name = "test-lossy"
    lossless = False


@pytest.fixture(autouse=True)
def _a_round_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy answers end within one slice otherwise, one method after the other."""
    monkeypatch.setattr(slices, "SLICE", 0.0)


def make(table: Table | None = None, context: int = 400) -> Model:
    target = TableTarget(VOCAB, table or random_table(VOCAB, seed=3), context_length=context)
    return Model("toy", target, Letters(), frozenset({EOS}), {"dtype": torch.float32, "odd": math.nan})


def method(
    model: Model, name: str = "oracle", rule: AcceptanceRule | None = None, length: int = 4, **options: Any
) -> Method:
    return Method(name, Oracle(table_of(model), **options), rule or RecursiveRejection(), Fixed(length))


def table_of(model: Model) -> TableTarget:
    assert isinstance(model.target, TableTarget)
    return model.target


def oracle_of(one: Method) -> Oracle:
    assert isinstance(one.drafter, Oracle)
    return one.drafter


PROMPTS = [
    Prompt("a1", "chat", ("good morning", "and again", "once more")),
    Prompt("a2", "chat", ("hello there",)),
    Prompt("b1", "qa", ("what is it",)),
    Prompt("b2", "qa", ("who was she", "when")),
    Prompt("c1", "math", ("one and two",)),
]
SHORT = BenchSettings(max_new_tokens=12, ignore_eos=True)


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} in JSON")


def check_row(row: dict[str, Any]) -> None:
    for figure in ("tokens_per_second", "decode_tokens_per_second", "ttft_ms", "speedup", "mean_acceptance_length"):
        assert row[figure] is None or row[figure] > 0 or not row["tokens"], "an answer may end at once"
    if row["speedup_ci95"] is not None:
        assert row["speedup_ci95"][0] <= row["speedup"] + 1e-9 <= row["speedup_ci95"][1] + 2e-9
    shares = list(row["time_split"].values())
    assert list(row["time_split"]) == list(PHASES)
    assert shares == [None] * 4 or sum(shares) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in row["per_position_acceptance"])


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_result_follows_the_contract(batch_size: int, temperature: float) -> None:
    model = make()
    settings = BenchSettings(
        max_new_tokens=12, params=SamplingParams(temperature=temperature, top_p=0.9), batch_size=batch_size
    )
    found = json.loads(
        json.dumps(run(model, [method(model)], PROMPTS, settings), allow_nan=False), parse_constant=no_constants
    )
    assert {"version", "complete", "machine", "model", "settings", "methods"} <= set(found)
    assert found["complete"] is True
    assert found["model"]["odd"] is None
    plain, row = found["methods"]
    assert (plain["method"], row["method"]) == ("none", "oracle")
    interval = [1.0, 1.0] if batch_size < 5 else None  # one batch has no interval
    assert (plain["speedup"], plain["speedup_ci95"]) == (1.0, interval)
    assert plain["mean_acceptance_length"] == 1.0
    for one in found["methods"]:
        assert list(one)[: len(ROW)] == ROW
        assert one["prompts"] == 5
        check_row(one)
        assert set(one["by_category"]) == {"chat", "qa", "math"}
        assert sum(cell["tokens"] for cell in one["by_category"].values()) == one["tokens"]
        assert sum(cell["seconds"] for cell in one["by_category"].values()) == pytest.approx(one["seconds"])
        for cell in one["by_category"].values():
            assert list(cell)[: len(ROW)] == ROW
            check_row(cell)
    assert row["mean_acceptance_length"] > 1.0
    if temperature:
        assert row["identical"] is None
    else:
        assert row["identical"] == {"same": 5, "of": 5, "near_ties": 0}
        assert plain["tokens"] == row["tokens"]
    assert found["methods"][1]["by_category"]["math"]["speedup_ci95"] is None  # one prompt has no interval


def test_prompts_of_one_batch_count_together_in_the_interval() -> None:
    model = make()

    def measured(batches: Seq[int]) -> Measured:
        def records(seconds: Seq[float]) -> MethodRecords:
            of = MethodRecords("some", method(model))
            for at, (batch, spent) in enumerate(zip(batches, seconds, strict=True)):
                metrics = RequestMetrics(tokens=11, answered=1, first_tokens=1, seconds=spent)
                of.records[str(at)] = Record(str(at), "qa", batch, [Answer((), (), metrics, 0.0)])
            return of

        ours = records([1.0, 3.0, 2.0, 2.0])
        return Measured(ours, list(ours.records.values()), records([2.0] * 4), compared=False, seed=0)

    assert measured([0, 1, 2, 3]).pairs == ([(10, 1.0), (10, 3.0), (10, 2.0), (10, 2.0)], [(10, 2.0)] * 4)
    assert measured([0, 0, 1, 1]).pairs == ([(20, 4.0), (20, 4.0)], [(20, 4.0)] * 2)


def test_a_batch_of_one_agrees_with_the_request_metrics() -> None:
    model = make()
    found = run(model, [], PROMPTS[1:2], SHORT)
    row = found["methods"][0]
    assert row["tokens"] == 12
    assert row["decode_tokens_per_second"] > row["tokens_per_second"] * 0.9
    assert row["ttft_ms"] / 1e3 < row["seconds"]
    assert row["speedup_ci95"] is None


def test_every_prompt_runs_with_every_method_before_the_next_and_the_order_changes() -> None:
    model = make()
    log: list[tuple[str, tuple[int, ...]]] = []

    class Logged(Oracle):
        def __init__(self, label: str) -> None:
            super().__init__(table_of(model))
            self.label = label

        def begin(self, sequence: Sequence) -> DraftState:
            log.append((self.label, tuple(sequence.tokens)))
            return DraftState(sequence)

    methods = [Method(label, Logged(label), RecursiveRejection(), Fixed(2)) for label in "xyz"]
    prompts = [Prompt(str(i), "a", (f"prompt {i}",)) for i in range(12)]
    first = run(model, methods, prompts, SHORT)
    assert first["complete"]
    counted = log[3:]  # after the warm-up
    groups = [counted[i : i + 3] for i in range(0, len(counted), 3)]
    assert len(groups) == 12
    assert all(len({context for _, context in group}) == 1 for group in groups)
    assert all({label for label, _ in group} == set("xyz") for group in groups)
    assert len({tuple(label for label, _ in group) for group in groups}) > 1


def test_what_drafts_take_is_measured_for_every_size_of_batch_before_the_first_answer() -> None:
    model = make()
    done: list[int | str] = []

    class Measured(Oracle):
        def measure(self, batch: int, *, sampled: bool | None = None) -> None:
            assert sampled is False, "greedy requests alone are measured"
            done.append(batch)

        def begin(self, sequence: Sequence) -> DraftState:
            done.append("answer")
            return DraftState(sequence)

    class Fails(Oracle):
        def measure(self, batch: int, *, sampled: bool | None = None) -> None:
            raise RuntimeError("no memory")

    methods = [
        Method(drafter.__class__.__name__, drafter, RecursiveRejection(), Fixed(2))
        for drafter in (Measured(table_of(model)), Fails(table_of(model)))
    ]
    found = run(model, methods, PROMPTS, replace(SHORT, batch_size=3))
    assert done[:4] == [1, 2, 3, "answer"] and not {1, 2, 3} & set(done[3:])
    assert [row["error"] for row in found["methods"]] == [None, None, "RuntimeError: no memory"]


def contexts(
    model: Model, *, rule: AcceptanceRule | None = None, temperature: float = 0.0
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    log: list[tuple[int, ...]] = []
    settings = BenchSettings(max_new_tokens=10, params=SamplingParams(temperature=temperature), ignore_eos=True)
    one = method(model, rule=rule, log=log)
    run(model, [one], PROMPTS[:1], settings)
    plain_log: list[tuple[int, ...]] = []
    plain = Method("none", Oracle(table_of(model), log=plain_log), RecursiveRejection(), Fixed(0))
    run(model, [plain], PROMPTS[:1], settings)
    return log[1:], plain_log[1:]


@pytest.mark.parametrize(("rule", "temperature"), [(None, 0.0), (None, 1.0), (Lossy(), 0.0)])
def test_later_turns_have_plain_decodings_contexts(rule: AcceptanceRule | None, temperature: float) -> None:
    ours, plain = contexts(make(), rule=rule, temperature=temperature)
    assert len(ours) == 3
    assert ours == plain
    assert ours[0] == ours[1][: len(ours[0])]


def test_a_lossless_method_continues_its_own_answers_at_temperature_0() -> None:
    class Greedy(Second):
        def check_params(self, params: SamplingParams) -> None:
            pass

    model = make()
    log: list[tuple[int, ...]] = []

    class Wrong(Method):
        def rule_for(self, params: SamplingParams) -> AcceptanceRule:
            return self.rule

    wrong = Wrong("wrong", Oracle(table_of(model), log=log), Greedy(), Fixed(0))
    result = run(model, [wrong], PROMPTS[:1], SHORT)
    row = result["methods"][1]
    assert row["identical"] == {"same": 0, "of": 1, "near_ties": 0}
    difference = row["differences"][0]
    assert difference["turn"] == 1
    assert difference["gap"] > 1e-3
    _, plain = contexts(make())
    assert log[2] != plain[1]


def test_near_ties_are_told_from_mistakes() -> None:
    base = random_table(VOCAB, seed=3)

    def tied(path: tuple[int, ...]) -> torch.Tensor:
        """The two best tokens of every position lie 5e-4 apart."""
        logits = base(path).clone()
        best = logits.topk(2)
        logits[best.indices[1]] = best.values[0] - 5e-4
        return logits

    for table, ties in ((base, 0), (tied, 1)):
        model = make(table)
        row = run(model, [method(model, rule=Lossy())], PROMPTS[1:2], SHORT)["methods"][1]
        assert row["lossless"] is False
        assert row["identical"] == {"same": 0, "of": 1, "near_ties": ties}


def test_an_answer_that_ends_early_is_compared_at_its_end() -> None:
    def table(path: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(VOCAB)
        logits[5] = 9.0
        logits[EOS] = 9.0 - 5e-4
        return logits

    model = make(table)
    row = run(model, [method(model, rule=Lossy())], PROMPTS[1:2], BenchSettings(max_new_tokens=12))["methods"][1]
    assert row["identical"] == {"same": 0, "of": 1, "near_ties": 1}
    assert row["differences"][0]["gap"] == pytest.approx(5e-4, rel=0.01)


def test_a_method_that_fails_has_an_error_and_the_others_go_on() -> None:
    model = make()
    good = method(model, "good")
    bad = method(model, "bad", error=RuntimeError("the draft\ncache is full"), fail_at=25)
    found = run(model, [bad, good], PROMPTS, SHORT)
    assert found["complete"] is True
    plain, failed, fine = found["methods"]
    assert failed["error"] == "RuntimeError: the draft cache is full"
    assert 0 < failed["prompts"] < 5
    assert failed["speedup"] is not None
    assert (plain["error"], fine["error"]) == (None, None)
    assert (plain["prompts"], fine["prompts"]) == (5, 5)
    assert oracle_of(bad).open == 0
    json.dumps(found, allow_nan=False)


def test_plain_decoding_may_fail_too() -> None:
    model = make()
    plain = Method("none", Oracle(table_of(model), RuntimeError("no"), 20), RecursiveRejection(), Fixed(1))
    found = run(model, [method(model), plain], PROMPTS, SHORT)
    first, row = found["methods"]
    assert (first["method"], first["error"]) == ("none", "RuntimeError: no")
    assert row["prompts"] == 5
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("after", [1, 30])
def test_ctrl_c_returns_whole_prompts(after: int) -> None:
    model = make()
    one = method(model, error=KeyboardInterrupt(), fail_at=after)
    found = run(model, [one], PROMPTS, SHORT)
    assert found["complete"] is False
    plain, row = found["methods"]
    assert plain["prompts"] == row["prompts"] < 5
    assert (plain["prompts"] > 0) == (after > 1)
    if after == 1:
        assert plain["speedup"] is None
        assert row["time_split"] == dict.fromkeys(PHASES)
    assert oracle_of(one).open == 0
    json.dumps(found, allow_nan=False)


def test_progress_is_told_before_every_turn_of_a_prompt_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_TELLING", 60.0)
    model = make()
    told: list[Progress] = []
    run(model, [method(model)], PROMPTS, SHORT, told.append)
    assert [one.category for one in told[:2]] == ["warm-up", "warm-up"]
    assert (told[-1].done, told[-1].total) == (16, 16)
    assert [one.done for one in told[2:]] == list(range(0, 17, 2)), "two methods answer each"
    assert set(told[-1].rates) == {"none", "oracle"}


def test_progress_is_told_while_answers_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_TELLING", 0.0)
    monkeypatch.setattr(slices, "SLICE", 0.0)
    model = make()
    told: list[Progress] = []
    run(model, [method(model)], PROMPTS[:1], SHORT, told.append)
    assert sum(one.done == 0 and one.method == "oracle" and one.category != "warm-up" for one in told) > 1


def test_turns_without_room_are_left_out_for_all() -> None:
    model = make(context=70)
    found = run(model, [method(model)], PROMPTS[:1], BenchSettings(max_new_tokens=20, ignore_eos=True))
    assert found["settings"]["skipped_turns"] == 1
    assert {row["tokens"] for row in found["methods"]} == {40}


def test_what_cannot_work_is_refused_before_anything_runs() -> None:
    model = make(context=20)
    with pytest.raises(BadInput, match="prompt 'long'"):
        run(model, [], [Prompt("long", "a", ("x" * 50,))], SHORT)
    with pytest.raises(BadInput, match="at least one prompt"):
        run(model, [], [], SHORT)
    with pytest.raises(BadInput, match="batch_size"):
        BenchSettings(batch_size=0)
    with pytest.raises(BadInput, match="max_new_tokens"):
        BenchSettings(max_new_tokens=0)


def test_methods_of_one_name_are_told_apart() -> None:
    model = make()
    found = run(model, [method(model), method(model, length=2), method(model, "none")], PROMPTS[:2], SHORT)
    assert [row["method"] for row in found["methods"]] == ["none", "oracle", "oracle#2"]


def test_repeated_ngrams_show_loops() -> None:
    def loop(path: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(7), VOCAB).float() * 9

    assert run(make(loop), [], PROMPTS[1:2], SHORT)["methods"][0]["repeated_ngrams"] == pytest.approx(8 / 9)
    assert run(make(), [], PROMPTS[1:2], BenchSettings(max_new_tokens=2))["methods"][0]["repeated_ngrams"] is None


# ---------------------------------------------------------------------------------------------------- namespaces


@dataclass(slots=True)
class Heard(DraftState):
    """What was heard in the namespace."""

    heard: list[int]


class Learner(Drafter[Heard]):
    """Drafts what it heard last in the namespace, and notes under which names it was asked."""

    def __init__(self) -> None:
        self.heard = Namespaces[list[int]](list)
        self.asked: list[str] = []

    def begin(self, sequence: Sequence) -> Heard:
        self.asked.append(sequence.namespace)
        return Heard(sequence, self.heard.open(sequence))

    def propose(self, state: Heard, budget: Budget) -> TokenTree:
        return TokenTree.chain(state.heard[: budget.depth])

    def caches(self, state: Heard) -> tuple[CacheUse, ...]:
        return (CacheUse("heard", len(state.heard), 5, evicted=1),)

    def end(self, state: Heard) -> None:
        state.heard[:] = state.sequence.tokens[-5:]


def learner(model: Model, name: str = "learner") -> Method:
    return Method(name, Learner(), RecursiveRejection(), Fixed(4))


def test_without_a_namespace_nothing_goes_from_prompt_to_prompt() -> None:
    model = make()
    one = learner(model)
    found = run(model, [one], PROMPTS, SHORT)
    assert isinstance(one.drafter, Learner)
    assert set(one.drafter.asked) == {""}
    assert found["settings"]["namespace"] is None
    assert found["methods"][1]["drafting_rounds"] == 0.0
    assert not any("amespace" in note for note in notes(found))


@pytest.mark.parametrize(("length", "warmed"), [(4, [4]), (7, [4]), (8, [4, 8])])
def test_the_warm_up_answers_a_prompt_of_each_range_of_lengths(length: int, warmed: list[int]) -> None:
    model = make()
    log: list[tuple[int, ...]] = []
    one = Method("one", Oracle(table_of(model), log=log), RecursiveRejection(), Fixed(2))
    prompts = [Prompt.single("short", "a" * 4), Prompt.single("long", "b" * length)]
    run(model, [one], prompts, BenchSettings(max_new_tokens=4))
    assert [len(tokens) - 1 for tokens in log] == [*warmed, 4, length]


@pytest.mark.parametrize(("namespace", "answered"), [("", 3), ("ours", 2)])
def test_an_answer_during_which_costs_were_measured_does_not_count(namespace: str, answered: int) -> None:
    class Measured(FixedCosts):
        count = 0

        @property
        def measurements(self) -> int:
            return self.count

    class Measuring(Oracle):
        def begin(self, sequence: Sequence) -> DraftState:
            costs.count += len(begun) == 1  # in the first answer after the warm-up
            begun.append(tuple(sequence.tokens))
            return super().begin(sequence)

    model, costs = make(), Measured()
    begun: list[tuple[int, ...]] = []
    table_of(model).costs = costs
    one = Method("one", Measuring(table_of(model)), RecursiveRejection(), Fixed(2))
    found = run(model, [one], PROMPTS[1:2], replace(SHORT, namespace=namespace))
    assert len(begun) == answered, "with a namespace the second answer would know the first"
    assert found["methods"][1]["tokens"] == 12


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_namespace_is_kept_apart_by_method_and_begins_after_the_warm_up(batch_size: int) -> None:
    model = make()
    one = learner(model)
    both = [one, Method("learner", one.drafter, one.rule, one.controller)]  # the worst case: they share a drafter
    settings = replace(SHORT, namespace="ours", batch_size=batch_size)
    found = run(model, both, PROMPTS[:3], settings)
    assert isinstance(one.drafter, Learner)
    warm = 2 * batch_size
    assert set(one.drafter.asked[:warm]) == {""}, "the warm-up teaches nothing"
    uncounted = {""} if batch_size > 1 else set()  # those that keep places learn nothing
    assert set(one.drafter.asked[warm:]) == {"ours/learner", "ours/learner#2"} | uncounted
    assert found["settings"]["namespace"] == "ours"
    assert found["methods"][1]["drafting_rounds"] > 0
    assert found["methods"][1]["drafting_rounds"] == found["methods"][2]["drafting_rounds"]
    assert found["methods"][1]["caches"] == [{"name": "heard", "entries": 5, "bound": 5, "evicted": 1}]
    assert any("Namespace 'ours'" in note for note in notes(found))
    page = render(BenchReport(found).report())
    assert "(namespace" in page
    assert "evicted" in page
    found = run(model, both, PROMPTS[1:2], replace(settings, namespace="fresh"))
    assert [row["drafting_rounds"] for row in found["methods"]] == [0.0] * 3, "what one learned, the other did not"
