"""outpace.generate and outpace.stream: what a person writes, and what is kept for the next call."""

from __future__ import annotations

import inspect
import subprocess
import sys
from ast import literal_eval
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

import outpace
import outpace.methods.registry
from cli_support import Failing, toy
from outpace.acceptance.base import Verdict
from outpace.cli.options import Sampling
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.namespaces import Namespaces
from outpace.heads.checkpoint import read_provenance
from outpace.methods.registry import Context, Parts, methods, register
from outpace.model import REMEMBERED, Model
from outpace.prompts.prompt import Prompt
from outpace.targets.base import Sequence


@dataclass(slots=True)
class Heard(DraftState):
    """What was heard in the namespace."""

    heard: list[int]


class Hearsay(Drafter[Heard]):
    """Drafts the answer that was heard before in the namespace."""

    def __init__(self) -> None:
        self.heard = Namespaces[list[int]](list)

    def begin(self, sequence: Sequence) -> Heard:
        return Heard(sequence, self.heard.open(sequence))

    def propose(self, state: Heard, budget: Budget) -> TokenTree:
        said = len(state.sequence.tokens) - state.sequence.prompt_length
        return TokenTree.chain(state.heard[said : said + budget.depth])

    def observe(self, state: Heard, verdict: Verdict) -> None:
        answer = state.sequence.tokens[state.sequence.prompt_length :]
        state.heard[: len(answer)] = answer


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid")
    length: int = 3


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """The toy model, with a method that remembers."""
    methods()
    monkeypatch.setattr(outpace.methods.registry, "_REGISTRY", dict(outpace.methods.registry._REGISTRY))

    @register("hearsay", family="test", paper="-", summary="Remembers.")
    def build(context: Context, settings: Settings) -> Parts:
        return Parts(Hearsay(), Fixed(settings.length))

    return toy()


def rounds_drafted(model: Model, namespace: str = "", **options: Any) -> float:
    found = outpace.generate(model, "abc", max_new_tokens=9, namespace=namespace, **({"method": "hearsay"} | options))
    assert found.tokens == outpace.generate(model, "abc", max_new_tokens=9, method="none").tokens
    return float(found.metrics["drafting_rounds"])


def test_what_a_method_learns_is_kept_for_its_namespace_alone(model: Model) -> None:
    assert rounds_drafted(model, "ours") == 0
    assert rounds_drafted(model, "ours") > 0.5
    assert rounds_drafted(model, "theirs") == 0
    assert rounds_drafted(model) == 0
    assert rounds_drafted(model) == 0, "without a namespace nothing outlives a request"
    assert rounds_drafted(toy(), "ours") == 0, "nor does it reach another model"


def test_other_settings_are_another_method(model: Model) -> None:
    assert rounds_drafted(model, "ours") == 0
    assert rounds_drafted(model, "ours", settings={"length": 2}) == 0
    assert rounds_drafted(model, "ours", settings={"length": 2}) > 0.5
    assert rounds_drafted(model, "ours", rule="rejection") == 0


def test_a_method_that_was_built_keeps_its_memory_itself(model: Model) -> None:
    built = model.method("hearsay")
    assert rounds_drafted(model, "ours", method=built) == 0
    assert rounds_drafted(model, "ours", method=built) > 0.5
    assert rounds_drafted(model, "ours") == 0


def test_streams_give_the_same_text(model: Model) -> None:
    whole = outpace.generate(model, "abc", method="hearsay", max_new_tokens=9)
    for _ in range(2):
        pieces = outpace.stream(model, "abc", method="hearsay", max_new_tokens=9, namespace="ours")
        assert "".join(pieces) == whole.text == str(whole)


def test_a_processor_that_fails_is_said_by_generate_and_stream(model: Model) -> None:
    words = "logits processor 'Failing' raised ValueError in process: no such rule"
    for method in ("none", "auto"):
        with pytest.raises(BadInput, match=words):
            outpace.generate(model, "a cat", method=method, max_new_tokens=9, processors=(Failing(),))
        pieces = outpace.stream(model, "a cat", method=method, max_new_tokens=9, processors=(Failing(),))
        told = [next(pieces)]
        with pytest.raises(BadInput, match=words):
            told.extend(pieces)
        assert len("".join(told)) == 3, "what came before it was yielded"


def test_several_draft_models_may_be_given(model: Model) -> None:
    found = outpace.generate(model, "abc", method="draft-model", draft_model=[toy(), toy("other")], max_new_tokens=9)
    assert found.metrics["mean_acceptance_length"] > 1


def test_what_a_model_remembers_is_bounded(model: Model) -> None:
    for length in range(1, REMEMBERED + 4):
        outpace.generate(model, "abc", method="pld", settings={"length": length}, namespace="mine", max_new_tokens=2)
    assert len(model.learned) == REMEMBERED
    kept = [dict(literal_eval(key[1]))["length"] for key in reversed(model.learned.recent())]
    assert kept == list(range(4, REMEMBERED + 4)), "the least recently used left first"


# ------------------------------------------------------------------------------------------ the commands' functions

PUBLIC = ("train", "evaluate_head", "export_head", "bench", "certify", "generate", "stream", "load")


def in_a_fresh_process(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "import outpace",
        "import outpace, outpace.bench.runner, outpace.certify.exact",
        "import outpace.certify.exact, outpace.bench.runner, outpace",
        "import outpace; outpace.bench; outpace.certify; import outpace.bench.runner, outpace.certify.exact",
        "from outpace import bench, certify; import outpace",
    ],
)
def test_packages_are_called_like_their_functions_in_any_order_of_imports(imports: str) -> None:
    said = in_a_fresh_process(
        f"{imports}\n"
        "import inspect\n"
        "assert 'on_progress' in inspect.signature(outpace.bench).parameters\n"
        "print(outpace.certify('pld', cells=1).lossless)\n"
        "from outpace.bench.runner import run\n"
        "import outpace.certify.statistical\n"
        "print(callable(outpace.bench), callable(outpace.certify), callable(run))\n"
    )
    assert said.split() == ["True"] * 4


def test_everything_public_is_listed_and_naming_the_package_imports_no_torch() -> None:
    said = in_a_fresh_process("import outpace, sys; print(*dir(outpace)); print('torch' in sys.modules)").splitlines()
    assert {*PUBLIC, *outpace.__all__} <= set(said[0].split())
    assert said[1] == "False"


@pytest.mark.parametrize("name", PUBLIC[:5])
def test_what_commands_call_says_what_it_takes_and_does(name: str) -> None:
    function = getattr(outpace, name)
    parameters = inspect.signature(function).parameters.values()
    assert all(one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)
    assert all(one.annotation is not one.empty for one in parameters)
    documented = inspect.unwrap(function).__doc__
    assert "Raises BadInput" in " ".join(documented.split())


def test_a_bench_in_python() -> None:
    prompts = [Prompt("1", "one", ("abc abc",)), Prompt("2", "two", ("the end",))]
    seen: list[str] = []
    found = outpace.bench(
        toy(), ["pld", toy().method("sam")], prompts, max_new_tokens=6, on_progress=lambda now: seen.append(now.method)
    )
    assert [row["method"] for row in found.rows] == ["none", "pld", "sam"]
    assert found.complete
    assert {"pld", "sam"} <= set(seen)


def test_a_head_is_trained_measured_and_exported_in_python(tmp_path: Path) -> None:
    model, stages = toy(), []
    made = outpace.train(
        model, "eagle2", tmp_path / "head", tokens=300, size="tiny", on_progress=lambda now: stages.append(now.stage)
    )
    assert (made.kind, made.method) == ("eagle", "eagle2")
    assert made.provenance["steps"] > 0
    assert list(dict.fromkeys(stages)) == ["data", "collected", "training", "evaluation"]
    prompts = [Prompt("1", "one", ("abc abc",))]
    found = outpace.evaluate_head(model, made.folder, prompts, methods=["eagle2"], max_new_tokens=8, record=True)
    assert [row["drafter"] for row in found["drafters"]][:2] == ["none", "eagle2"]
    assert read_provenance(made.folder)["measured"]  # type: ignore[index]
    head = outpace.export_head(lambda: model, made.folder, tmp_path / "out", "eagle")
    assert head.kind == "eagle"
    with pytest.raises(outpace.BadInput, match="not empty"):
        outpace.export_head(no_model, made.folder, tmp_path / "out", "eagle")
    with pytest.raises(outpace.BadInput, match="holds a run already"):
        outpace.train(no_model, "eagle", tmp_path / "head")


def no_model() -> Model:
    raise AssertionError("the model was loaded before everything else was checked")


def test_every_sampling_parameter_is_an_option() -> None:
    """All but what is no option of a command line, and what generate alone has."""
    declared = {one.name for one in fields(Sampling)}
    constrained = {"constraint", "constraint_weighting"}  # the options of a grammar give these two
    others = {"processors", "logprobs", "top_logprobs"} | constrained
    assert {one.name for one in fields(outpace.SamplingParams)} - declared == others
    assert Sampling(temperature=0.5, logit_bias=["3=2"]).params() == outpace.SamplingParams(0.5, logit_bias={3: 2.0})
