"""The default method, the router, and what a method can draft with: said by the registry, not by those who ask."""

from __future__ import annotations

import pytest

from outpace.advice.candidates import Shape
from outpace.advice.engine_commands import Offer, Typed, commands
from outpace.api.chosen import choose
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.registry import Context, build, find, methods, routers
from outpace.serving.offered import Defaults
from outpace.targets.table import TableTarget


def test_the_default_is_a_registered_method_and_the_same_everywhere() -> None:
    assert find(DEFAULT_METHOD).name == DEFAULT_METHOD
    assert choose({}).method == DEFAULT_METHOD == Defaults().method


def test_methods_that_route_predict_when_an_answer_is_complete() -> None:
    assert routers()
    for name in routers():
        method = build(name, Context(TableTarget(8)), {"strategies": ("none", "pld")})
        seconds = method.drafter.expected_seconds([1, 2, 3], 16, greedy=True)
        assert seconds is not None and seconds > 0
    for name in ("none", "pld", "sam", DEFAULT_METHOD):
        assert name not in routers()
        assert build(name, Context(TableTarget(8))).drafter.expected_seconds([1, 2, 3], 16, greedy=True) is None


def test_what_a_method_needs_it_takes() -> None:
    for info in methods():
        assert all(map(info.takes, (*info.needs, *info.optional)))
        assert not {*info.needs} & {*info.optional}
    assert not find("pld").takes("draft model")


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        (DEFAULT_METHOD, {"--head", "--draft-model"}),
        ("draft-model", {"--draft-model"}),
        ("eagle3", {"--head"}),
        ("pld", set()),
    ],
)
def test_a_command_names_what_its_method_takes(method: str, flags: set[str]) -> None:
    typed = Typed(model="m", heads=["folder"], draft_models={"small": "small"})
    offer = Offer(method, Shape(engines=frozenset({"outpace"})), 2.0, 1.9)
    assert {one for one in commands(typed, offer, [offer])["outpace"].split() if one.startswith("--")} - {
        "--model",
        "--method",
    } == flags
