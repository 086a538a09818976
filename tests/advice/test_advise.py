"""``outpace advise`` on the embedded model, small; and its bad input."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_support import Run, refused, toy
from layouts_support import head_of, written
from outpace.acceptance.rejection import RecursiveRejection
from outpace.advice.advising import advise
from outpace.advice.candidates import Offered, candidates
from outpace.advice.measuring import LEAST_PROMPTS, Measurements, Timer
from outpace.advice.trial import Trial
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.engine.replay import replay
from outpace.methods.bindings import Bindings, draft_models
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context, build
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.targets.costs import FixedCosts
from outpace.targets.table import TableTarget


def test_the_advice_on_the_embedded_model(smollm2: Model, tmp_path: Path) -> None:
    found = advise(smollm2, load_prompts(limit=7), batches=(1, 2), minutes=1.0, max_new_tokens=24)
    result = found.result
    assert set(result) >= {"recommendation", "candidates", "commands", "seconds"}
    assert set(result["recommendation"]["batch"]) == {"1", "2"}
    assert set(result["commands"]) == {"outpace", "vllm", "sglang", "llama.cpp"}
    methods = {row["method"] for row in result["candidates"]}
    assert {"none", "pld", "sam", "eagle3", "auto"} <= methods
    for row in result["candidates"]:
        low, high = row["interval"]
        assert 0.2 < low <= row["speedup"] <= high < 8.0
    for entry in result["recommendation"]["batch"].values():
        assert entry["use"] == "none" or entry["interval"][0] > 1.02
    json.dumps(result, allow_nan=False)
    page = tmp_path / "page.html"
    found.write_html(page)
    assert "Expected speed-up" in page.read_text()
    assert result["words"][0] in str(found).replace("\n", " ")


def only(monkeypatch: pytest.MonkeyPatch, methods: set[str], *, chains: bool = False) -> None:
    """``methods`` alone are advised on; ``chains``: with chains of fixed length alone."""

    def found(context: Context, engine: str, *, greedy: bool) -> Offered:
        kept = [one for one in candidates(context, engine, greedy=greedy).candidates if one.method in methods]
        shapes = [tuple(shape for shape in one.shapes if shape.chain or not chains) for one in kept]
        return Offered([replace(one, shapes=some) for one, some in zip(kept, shapes, strict=True)], [])

    monkeypatch.setattr("outpace.advice.advising.candidates", found)


def test_sampled_answers(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, {"pld", "draft-model"})
    found = advise(
        smollm2,
        load_prompts(limit=7),
        batches=(1,),
        params=SamplingParams(temperature=0.8, seed=3),
        minutes=0.4,
        max_new_tokens=16,
        draft_model="draft-lm",
    ).result
    rows = {row["method"]: row for row in found["candidates"]}
    assert rows["pld"]["acceptance"] == "replayed"
    # Which of its lengths is best depends on the machine; only those that are chosen in each round must be decoded.
    chain = rows["draft-model"]
    assert chain["acceptance"] == ("teacher-forced" if "num_draft_tokens" in chain["settings"] else "decoded")


@pytest.mark.parametrize(("temperature", "seed", "repeats"), [(0.8, None, False), (0.8, 3, True)])
def test_it_predicts_requests_that_repeat_only_where_a_seed_is_given(
    temperature: float, seed: int | None, repeats: bool
) -> None:
    """Users send sampled requests without a seed, and those go by what rounds take now."""
    target = TableTarget(7)
    plain = Method("none", NoDraft(), RecursiveRejection(), Fixed(0))
    work = Measurements(target, plain, SamplingParams(temperature=temperature, seed=seed), [1], Timer(1.0))
    work.answer([(1, 2, 3)] * 5, 8, frozenset(), set())
    assert [one.repeats for one in work.answers] == [repeats] * 5
    played = [one.request(plain) for one in work.answers]
    assert [one.repeats for one in played] == [repeats] * 5 and len({one.params.seed for one in played}) == 5
    assert all(len(replay(target, [one], plain)) == len(one.tokens) for one in work.answers)
    work.close()


PROMPTS = ["ab" * count for count in range(3, 10)]


def advised_rows(**given: Any) -> list[dict[str, Any]]:
    """On the toy model."""
    model = toy()
    model.target.costs = FixedCosts()
    result = advise(model, PROMPTS, batches=(1,), draft_model=toy(), minutes=0.1, max_new_tokens=12, **given).result
    return [row for row in result["candidates"] if row["method"] != "none"]


def test_without_a_trial_no_draft_model_is_taken_to_draft_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measurements, "trial", lambda *_: None)
    only(monkeypatch, {"draft-model"})
    assert [row["acceptance"] for row in advised_rows()] == ["replayed"], "what a chain's draft takes is not known"
    only(monkeypatch, {"draft-model"}, chains=True)
    with pytest.raises(BadInput, match="no candidate could be measured"):
        advised_rows()


@pytest.mark.parametrize("engine", ["outpace", "sglang"])
def test_a_draft_s_time_is_known_from_its_method_s_trial_where_the_best_length_has_none(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    trial, made = Measurements.trial, list[Trial | None]()

    def once(self: Measurements, method: Method, batch: int) -> Trial | None:
        made.append(None if made else trial(self, method, batch))
        return made[-1]

    monkeypatch.setattr(Measurements, "trial", once)
    only(monkeypatch, {"draft-model"}, chains=True)
    [row] = advised_rows(engine=engine)
    assert len(made) == 2 and row["acceptance"] == "teacher-forced" and row["draft_steps"] > 0


def test_only_as_many_answers_are_scored_by_a_draft_model_as_there_is_time_for() -> None:
    target = TableTarget(7)
    context = Context(target, bindings=Bindings(draft_models({"small": TableTarget(7)})))
    timer = Timer(1.0)
    work = Measurements(target, build("none", context), SamplingParams(), [1], timer)
    work.answer([(1, 2, 3)] * 8, 8, frozenset(), set())
    timer.minutes = 0.0
    assert len(work.ratios(build("draft-model", context))) == LEAST_PROMPTS
    work.close()


def test_bad_input(smollm2: Model) -> None:
    with pytest.raises(BadInput, match="advise decodes without grammars"):
        advise(smollm2, load_prompts("structured", 2))
    with pytest.raises(BadInput, match="no prompts"):
        advise(smollm2, [])
    with pytest.raises(BadInput, match="do not fit into memory"):
        advise(smollm2, load_prompts(limit=2), batches=(10_000_000,))
    with pytest.raises(BadInput, match="--minutes"):
        advise(smollm2, load_prompts(limit=2), minutes=0)
    with pytest.raises(BadInput, match="--max-new-tokens must be at least 2"):
        advise(smollm2, load_prompts(limit=2), max_new_tokens=1)
    with pytest.raises(BadInput, match="--engine"):
        advise(smollm2, load_prompts(limit=2), engine="tgi")


def test_a_batch_that_fits_alone_but_not_beside_a_trial_is_refused(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = load_prompts(limit=2)
    longest = max(len(smollm2.tokenizer.chat(one.messages)) for one in prompts) + 64
    one = smollm2.target.kv_bytes(None, longest)
    monkeypatch.setattr("outpace.advice.advising.free_memory", lambda target: 5 * one)
    with pytest.raises(BadInput, match=r"--batch 2: .* and 2 kept answers do not fit into memory"):
        advise(smollm2, prompts, batches=(2,))


def test_the_command_prints_words_or_one_object(cli: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(
        "\n".join(f"say {word} again and again" for word in ("one", "two", "three", "four", "five", "six"))
    )
    page = tmp_path / "page.html"
    asked = ["advise", "--prompts", str(prompts), "--batch", "1,2", "--minutes", "0.1", "-n", "16"]
    ran = cli(*asked, "--json", "--html", str(page))
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert set(result["recommendation"]) == {"method", "settings", "batch"}
    assert {(row["method"], row["batch"]) for row in result["candidates"]} >= {("none", 1), ("none", 2), ("pld", 1)}
    assert page.read_text().startswith("<!")
    ran = cli(*asked, "--engine", "sglang")
    assert ran.code == 0, ran.err
    assert "Use " in ran.out
    assert "assumed for sglang" in ran.out
    assert "python -m sglang.launch_server" in ran.out


def test_rounds_of_vllm_are_measured_in_the_dtype_that_is_asked_for(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(*_: object, dtype: str, **__: object) -> None:
        asked.append(dtype)
        raise BadInput("that is all")

    monkeypatch.setattr("outpace.integrations.vllm.interpreter.find_interpreter", lambda _: None)
    monkeypatch.setattr("outpace.advice.vllm_rounds.measure_vllm_rounds", measured)
    monkeypatch.setattr("outpace.advice.advising.advise", lambda *_, engine_costs, **__: engine_costs((1,)))
    for words in ([], ["--dtype", "float32"]):
        refused(cli("advise", "--engine", "vllm", *words), "that is all")
    assert asked == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "0"], "--batch takes numbers"),
        (["--batch", "one"], "--batch takes numbers"),
        (["--minutes", "-1"], "--minutes must be above 0"),
        (["--engine", "tgi"], "tgi"),
        (["--vllm-python", "python"], "add --engine vllm"),
        (["--engine", "vllm", "--vllm-python", "/nowhere/python"], "there is no file"),
        (["--engine", "vllm", "--vllm-python", sys.executable], "has no vLLM"),
        (["--engine", "vllm", "--dtype", "int4"], "--dtype int4"),
        (["--engine", "vllm", "--device", "cpu"], "--device is for outpace alone"),
        (["-n", "1"], "--max-new-tokens must be at least 2"),
        (["--prompts", "EMPTY"], "EMPTY"),
        (["--prompts", "structured"], "outpace advise decodes without grammars, and prompt 'structured"),
        (["--head", "EMPTY"], "EMPTY"),
        (["--head", "OTHER", "--prompts", "SHORT"], "OTHER"),
        (["--draft-model", "no/such-model-anywhere.gguf"], "no/such-model-anywhere.gguf"),
        (["--draft-model", "EMPTY"], "EMPTY"),
        (["--html", "/nowhere/page.html"], "no folder"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_bad_input_is_one_line(cli: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "SHORT").write_text("\n".join(["say it again"] * 6))
    written(head_of("medusa"), "medusa", tmp_path / "OTHER")
    ran = cli("advise", *(str(tmp_path / one) if one in ("EMPTY", "OTHER", "SHORT") else one for one in arguments))
    refused(ran, said)
