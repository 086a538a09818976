"""A server that answers losslessly only refuses lossy rules, however a request names them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli_support import toy
from outpace.core.errors import BadInput
from outpace.serving.errors import ApiError
from outpace.serving.offered import Defaults
from outpace.serving.schemas import Speculation
from outpace.serving.service import Service


@pytest.mark.parametrize("wish", [{"method": "pld@margin"}, {"method": "pld", "rule": "margin"}])
def test_a_lossy_rule_is_refused(wish: dict[str, str]) -> None:
    [strict] = Service([toy()], defaults=Defaults("pld", lossless=True)).offered.values()
    with pytest.raises(ApiError, match="rule 'margin' is lossy, and this server answers losslessly only"):
        strict.method(Speculation.model_validate(wish))
    [other] = Service([toy()], defaults=Defaults("pld")).offered.values()
    assert other.method(Speculation.model_validate(wish)).lossy == "margin(theta=0.9)"


def test_methods_that_are_lossy_by_themselves_are_marked_and_not_offered_where_they_are_refused() -> None:
    named = {"draft_model": toy("draft")}
    [other] = Service([toy()], defaults=Defaults("pld", named=named)).offered.values()
    [strict] = Service([toy()], defaults=Defaults("pld", lossless=True, named=named)).offered.values()
    assert {"bild", "dsbd", "smcsd"} == set(other.lossy_methods) < set(other.methods)
    assert strict.lossy_methods == []
    assert strict.methods == [name for name in other.methods if name not in other.lossy_methods]
    for name in other.lossy_methods:
        wish = Speculation(method=name)
        assert other.method(wish).lossy
        with pytest.raises(ApiError, match=r"is lossy.*this server answers losslessly only"):
            strict.method(wish)


def test_settings_that_mean_lossless_are_taken() -> None:
    [strict] = Service([toy()], defaults=Defaults("pld", lossless=True)).offered.values()
    wish = Speculation.model_validate({"rule": "cactus", "rule_params": {"delta": 0}})
    assert strict.method(wish).lossy is None


@pytest.mark.parametrize("about", [Defaults("pld", rule="typical"), Defaults("pld@cactus"), Defaults("bild")])
def test_a_lossy_rule_is_no_server_s_default(about: Defaults) -> None:
    with pytest.raises(BadInput, match="lossy and never the default of a server"):
        Service([toy()], defaults=replace(about, named={"draft_model": toy("draft")}))


@pytest.mark.parametrize("gate", ["random", "/etc"])
@pytest.mark.parametrize("method", ["sprinter", "pad", "bild"])
def test_a_request_does_not_name_files_of_the_server(method: str, gate: str) -> None:
    [served] = Service([toy()], defaults=Defaults("pld")).offered.values()
    with pytest.raises(ApiError, match=f"method '{method}', setting 'gate': it names a folder of the server"):
        served.method(Speculation.model_validate({"method": method, "params": {"gate": gate}}))


def test_methods_that_need_a_gate_are_not_offered() -> None:
    [served] = Service([toy()], defaults=Defaults("pld")).offered.values()
    assert not {"sprinter", "pad"} & set(served.methods)
