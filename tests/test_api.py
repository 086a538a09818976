"""outpace.generate and outpace.stream: what a person writes, and what is kept for the next call."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import dataclass

import pytest
from pydantic import BaseModel, ConfigDict

import outpace
import outpace.methods.registry
from cli_support import toy
from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.namespaces import Namespaces
from outpace.methods.registry import Context, Parts, methods, register
from outpace.model import REMEMBERED, Model
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


def rounds_drafted(model: Model, namespace: str = "", **options: object) -> float:
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


def test_several_draft_models_may_be_given(model: Model) -> None:
    found = outpace.generate(model, "abc", method="draft-model", draft_model=[toy(), toy("other")], max_new_tokens=9)
    assert found.metrics["mean_acceptance_length"] > 1


def test_what_a_model_remembers_is_bounded(model: Model) -> None:
    for length in range(1, REMEMBERED + 4):
        outpace.generate(model, "abc", method="pld", settings={"length": length}, namespace="mine", max_new_tokens=2)
    assert len(model.learned) == REMEMBERED
    kept = [dict(literal_eval(key[1]))["length"] for key in reversed(model.learned.recent())]
    assert kept == list(range(4, REMEMBERED + 4)), "the least recently used left first"
