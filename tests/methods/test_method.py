"""Methods are found by name, configured by their settings, and refused in one line when they do not fit."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from pydantic import BaseModel, Field, model_validator

import outpace.methods.registry
from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.greedy import Greedy
from outpace.acceptance.registry import rules
from outpace.acceptance.rejection import RecursiveRejection, Rejection
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context, NoSettings, Parts, build, configured, find, methods, register
from outpace.targets.table import TableTarget
from support import CERTAIN_TREE, CHAIN, TREE, Toy, certain_tree


class Settings(BaseModel):
    """Settings as a newcomer writes them: nothing said about unknown ones."""

    length: int = Field(8, ge=0, description="draft tokens a round")
    share: float = Field(0.5, ge=0, le=1)

    @model_validator(mode="after")
    def agree(self) -> Settings:
        if self.length == 13:
            raise ValueError("13 brings bad luck")
        return self


CARRIED = Proposal(sampled=True, keeps_unverified_draws=True)


CONTEXT = Context(TableTarget(4))


def toy(proposal: Proposal) -> Toy:
    return Toy(certain_tree(0, 4), proposal)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy of the registry with a toy method, gone afterwards."""
    methods()
    monkeypatch.setattr(outpace.methods.registry, "_REGISTRY", dict(outpace.methods.registry._REGISTRY))

    @register("toy", family="test", paper="-", summary="A toy.", aliases=("plaything", "bauble"))
    def build_toy(context: Context, settings: Settings) -> Parts:
        return Parts(toy(CERTAIN_TREE), Fixed(settings.length))

    yield
    outpace.methods.registry._discover.cache_clear()


def refused(words: str, name: str, **options: object) -> str:
    with pytest.raises(BadInput, match=words) as caught:
        build(name, CONTEXT, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_plain_decoding_comes_first_and_every_method_is_described() -> None:
    listed = methods()
    assert listed[0].name == "none"
    assert len({info.name for info in listed}) == len(listed)
    for info in listed:
        public = info.public()
        assert info.lossless or public.pop("bound", 0) is None
        assert set(public) == {
            "name", "aliases", "family", "paper", "lossless", "trained", "needs", "summary", "when_to_use",
        }  # fmt: skip
        described = ("name", "family", "paper", "summary", "when_to_use")
        assert all(public[key] for key in described if info.name != "toy"), info
        assert set(public["needs"]) <= {"draft model", "head", "datastore", "reference", "gate"}
        assert ("head" in public["needs"]) == public["trained"]
        assert not any("\n" in text for text in (info.paper, info.summary, info.when_to_use))
        assert info.settings.model_fields.keys() >= set(info.tiny)


def test_a_method_is_built_with_its_settings() -> None:
    one = build("toy", CONTEXT, {"length": "3"})
    assert one.name == "toy"
    assert one.lossless
    assert isinstance(one.rule, RecursiveRejection)
    assert one.controller.budget(RequestMetrics(), 1) == Budget(3)
    assert build("toy", CONTEXT).controller.budget(RequestMetrics(), 1).depth == 8
    plain = build("none", CONTEXT)
    assert isinstance(plain.drafter, NoDraft)
    assert plain.controller.budget(RequestMetrics(), 1).depth == 0


def test_aliases_lead_to_the_method() -> None:
    for alias in ("plaything", "bauble"):
        assert find(alias) is find("toy")
        assert build(alias, CONTEXT).name == "toy"
    assert [info.name for info in methods()].count("toy") == 1
    assert "bauble" not in [info.name for info in methods()]


BUILT = """
leviathan sps sam cacheback llma santilli rest lookahead pld sad del swift dv bpd medusa eagle eagle2 eagle3 attdrift
copydec pard2 ddtree distill hetvocab rsd specinfer univer hsd metasd taskspec triforce mcsjd fvo
"""
"""The papers, by their keys in the list of methods to hold, that are a method or a rule by now."""


@pytest.mark.parametrize("key", BUILT.split())
def test_every_paper_that_is_built_is_a_name_or_an_alias(key: str) -> None:
    assert key in {name for info in methods() for name in (info.name, *info.aliases)} | set(rules())


@pytest.mark.parametrize(("alias", "name"), [("dv", "draft-verify"), ("del", "early-exit"), ("santilli", "jacobi")])
def test_methods_are_named_for_what_they_do(alias: str, name: str) -> None:
    assert find(alias) is find(name)
    assert find(alias).name == name


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("draft-model", ["draft model"]),
        ("hsd", ["draft model"]),
        ("rest", ["datastore"]),
        ("llma", ["reference"]),
        ("eagle2", ["head"]),
        ("pld", []),
        ("auto", []),
    ],
)
def test_a_method_says_what_it_needs(name: str, needs: list[str]) -> None:
    assert find(name).public()["needs"] == needs


class Renamed(BaseModel):
    """Settings under today's names; ``width`` is another thing here than the candidates of a node."""

    num_draft_tokens: int = Field(8, ge=0)
    topk: int = 4
    max_nodes: int = 16
    width: int = 1


def test_the_earlier_names_of_settings_are_understood() -> None:
    @register("renamed", family="test", paper="-", summary="A toy.")
    def build_renamed(context: Context, settings: Renamed) -> Parts:
        return Parts(toy(CERTAIN_TREE), Fixed(settings.num_draft_tokens))

    info = find("renamed")
    assert configured(info, {"length": 3, "k": "2", "nodes": 5, "width": 7}) == Renamed(
        num_draft_tokens=3, topk=2, max_nodes=5, width=7
    )
    refused("'num_draft_tokens'.*greater than", "renamed", settings={"length": -1})
    refused(
        "'length' is the earlier name of 'num_draft_tokens'", "renamed", settings={"length": 1, "num_draft_tokens": 2}
    )
    refused("no setting 'nodes'", "toy", settings={"nodes": 3})


def test_unknown_names_are_refused_with_near_ones_or_the_command_that_lists_them() -> None:
    assert "did you mean 'toy'" in refused("unknown method 'toyy'", "toyy")
    refused("unknown method 'xyzzy'; see: outpace methods$", "xyzzy")
    refused("unknown acceptance rule 'nonsense'; see: outpace rules$", "toy", rule="nonsense")
    assert "did you mean 'rejection'" in refused("unknown acceptance rule 'rejektion'", "toy", rule="rejektion")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lenght": 3}, "'lenght'.*length, share"),
        ({"length": -1}, "'length'.*greater than or equal to 0"),
        ({"length": "many"}, "'length'.*integer"),
        ({"length": 2.5}, "'length'"),
        ({"share": float("nan")}, "'share'"),
        ({"share": 1.01}, "'share'"),
        ({"length": None}, "'length'"),
        ({"length": 13}, "'toy'.*13 brings bad luck"),
        ({"length": 3, "Length": 4}, "'Length'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], words: str) -> None:
    assert "toy" in refused(words, "toy", settings=settings)


def test_a_method_without_settings_takes_none() -> None:
    assert "it has none" in refused("'length'", "none", settings={"length": 3})


def test_what_the_method_needs_is_asked_for_in_its_words() -> None:
    @register("needy", family="test", paper="-", summary="Needs a draft model.")
    def build_needy(context: Context, settings: NoSettings) -> Parts:
        return Parts(toy(CHAIN), Fixed(context.draft().vocab_size))

    refused("'needy' needs a draft model.*--draft-model NAME", "needy")


class ChainsOnly(Greedy):
    takes_trees = False
    takes_sampled = False


@pytest.mark.parametrize(
    ("rule", "proposal", "words"),
    [
        (Rejection(), CERTAIN_TREE, "'rejection' takes chains, but 'mine' drafts trees of deterministic draft tokens"),
        (Rejection(), TREE, "'rejection' takes chains, but 'mine' drafts trees of sampled draft tokens"),
        (ChainsOnly(), CHAIN, "takes deterministic draft tokens, but 'mine' drafts chains of sampled"),
        (ChainsOnly(), CERTAIN_TREE, "takes chains"),
        (rules()["traversal"](), CARRIED, "'traversal' looks at all draft tokens to judge each, but 'mine' keeps"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_words(rule: AcceptanceRule, proposal: Proposal, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        Method("mine", toy(proposal), rule, Fixed(2))
    assert "\n" not in str(caught.value)


def test_a_rule_can_be_chosen_by_name_or_given() -> None:
    assert isinstance(build("toy", CONTEXT, rule="greedy").rule, Greedy)
    given = RecursiveRejection()
    assert build("toy", CONTEXT, rule=given).rule is given
    refused("'rejection' takes chains, but 'toy' drafts trees", "toy", rule="rejection")


def test_draws_that_live_on_are_left_to_rules_that_judge_each_without_a_look_at_later_ones() -> None:
    """A rule that has looked at a draw it did not reach leaves it conditioned on the verdict: no longer its row's."""
    taken = set()
    for name, rule in rules().items():
        if rule.__module__.startswith("outpace.") and name == rule.name and rule.lossless:
            try:
                Method("mine", toy(CARRIED), rule(), Fixed(2))
            except BadInput as error:
                assert "rejection" in str(error) or "noise" in str(error)
            else:
                taken.add(name)
    assert taken == {"greedy", "rejection", "recursive-rejection"}
    assert build_default(CARRIED).name in taken


def build_default(proposal: Proposal) -> AcceptanceRule:
    """The rule that a method without one of its own gets."""
    register("default-of", family="test", paper="-", summary="-")(
        lambda context, settings: Parts(toy(proposal), Fixed(2))
    )
    return build("default-of", CONTEXT).rule


def test_rules_are_listed_by_name() -> None:
    listed = rules()
    assert list(listed) == sorted(listed)
    assert {"greedy", "rejection", "recursive-rejection"} <= set(listed)
    assert ChainsOnly not in listed.values()
    for name, rule in listed.items():
        assert name in (rule.name, *rule.aliases)
        assert rule.paper


def test_a_greedy_rule_is_refused_at_another_temperature() -> None:
    one = build("toy", CONTEXT, rule="greedy")
    with pytest.raises(BadInput, match=r"'greedy' is for temperature 0, but the temperature is 0\.7"):
        one.rule_for(SamplingParams(0.7))


@pytest.mark.parametrize(("taken", "aliases"), [("none", ()), ("fresh", ("none",)), ("fresh", ("toy",))])
def test_a_name_is_given_once(taken: str, aliases: tuple[str, ...]) -> None:
    before = find(aliases[0] if aliases else taken)
    with pytest.raises(BadInput, match="two methods register the name"):

        @register(taken, family="test", paper="-", summary="An impostor.", aliases=aliases)
        def build_impostor(context: Context, settings: NoSettings) -> Parts:
            return Parts(NoDraft(), Fixed(0))

    assert find(before.name) is before


# ------------------------------------------------------------------------------------------------- entry points


def install(monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Pretend that packages with these sources are installed and name their modules as entry points."""
    points = [EntryPoint(name, f"toy_{name}", "outpace.methods") for name in modules]

    def load(self: EntryPoint) -> types.ModuleType:
        module = types.ModuleType(self.value)
        monkeypatch.setitem(sys.modules, self.value, module)
        exec(modules[self.name], module.__dict__)
        return module

    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(
        outpace.methods.registry, "entry_points", lambda group: points if group == "outpace.methods" else []
    )
    outpace.methods.registry._discover.cache_clear()


GOOD = """
from outpace.controllers.fixed import Fixed
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context, NoSettings, Parts, register

@register("theirs", family="other", paper="Doe 2026", summary="From another package.", aliases=("hers",))
def build(context: Context, settings: NoSettings) -> Parts:
    return Parts(NoDraft(), Fixed(0))
"""


def test_another_package_adds_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, package=GOOD)
    assert "theirs" in [info.name for info in methods()]
    assert build("hers", CONTEXT).name == "theirs"


@pytest.mark.parametrize("source", ["import nowhere_to_be_found", "raise RuntimeError('two\\nlines')", "1 / 0", "def"])
def test_a_package_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    install(monkeypatch, good=GOOD, broken=source)
    message = refused(r"entry point 'broken' \(toy_broken\)", "none")
    assert "good" not in message
    refused("entry point 'broken'", "none")


def test_a_package_cannot_take_a_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, thief=GOOD.replace('"theirs"', '"none"'))
    refused("thief.*'none'", "none")
