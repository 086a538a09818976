"""A request is answered by the model that it names; of several that it offers, by the one that is expected soonest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cli_support import toy
from outpace.methods.combination.aio.routed_drafter import Routed
from outpace.model import Model
from outpace.serving.offered import Defaults
from outpace.serving.service import Service
from outpace.targets.costs import FixedCosts
from serving_support import CHAT, COMPLETE, client, complete, refused


class Slower(FixedCosts):
    """Forwards that take ``times`` as long."""

    def __init__(self, times: float) -> None:
        self._times = times

    def seconds(self, rows: int, context: int = 0) -> float:
        return self._times * super().seconds(rows, context)


def offered(method: str, *models: Model) -> Service:
    return Service(list(models), defaults=Defaults(method))


def model(name: str, times: float, context_length: int = 400) -> Model:
    found: Model = toy(name, context_length)
    found.target.costs = Slower(times)
    return found


@pytest.fixture
def service() -> Service:
    return offered("aio", model("large", 8.0), model("small", 1.0, 40))


def test_one_model_is_never_swapped(service: Service) -> None:
    with client(service) as to:
        for name in ("large", "small"):
            answer = complete(to, model=name)
            assert answer["model"] == name


def test_of_several_the_soonest_answers_as_it_would_alone(service: Service) -> None:
    with client(service) as to:
        chosen, alone = complete(to, model="large, small"), complete(to, model="small")
        assert chosen["model"] == "small"
        assert chosen["choices"][0]["text"] == alone["choices"][0]["text"]


def test_numbers_out_of_range_are_no_defect(service: Service) -> None:
    with client(service) as to:
        refused(to, 400, "of which 38 fit", path=COMPLETE, model="large,small", max_tokens=10**400)
        refused(to, 400, "the prompt holds token 99999", path=COMPLETE, model="large,small", prompt=[99999, 3])


def test_a_model_that_the_prompt_does_not_fit_is_left_out(service: Service) -> None:
    with client(service) as to:
        assert complete(to, model="large,small", prompt="ab" * 30)["model"] == "large"
        refused(to, 400, "tokens", path=COMPLETE, model="small,large", prompt="ab" * 300)


def test_what_drafts_gain_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large model answers sooner where its drafts are accepted and the small one's are not."""
    service = offered("aio", model("large", 2.0), model("small", 1.0))
    best: dict[str, float] = {"large": 4.0, "small": 1.0}
    for name, one in service.offered.items():
        drafter = one.method(None).drafter
        assert isinstance(drafter, Routed)
        monkeypatch.setattr(drafter.routes, "speedups", told(best[name]))
    with client(service) as to:
        assert complete(to, model="large,small", max_tokens=200)["model"] == "large"


def told(speedup: float) -> Callable[..., tuple[list[float], list[float]]]:
    return lambda numbers, batch, context: ([speedup], [speedup])


def test_wrong_offers_are_refused(service: Service) -> None:
    with client(service) as to:
        error = refused(to, 404, "there is no model 'middle'", path=COMPLETE, model="large,middle")
        assert error["param"] == "model"
        refused(to, 400, "does not predict", "aio", path=COMPLETE, model="large,small", speculation={"method": "pld"})
        refused(to, 404, "there is no model", path=CHAT, model="large;small")
