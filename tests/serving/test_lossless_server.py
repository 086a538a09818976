"""A server that answers losslessly only refuses lossy rules, however a request names them."""

from __future__ import annotations

import pytest

from cli_support import toy
from outpace.serving.errors import ApiError
from outpace.serving.schemas import Speculation
from outpace.serving.service import Defaults, Service


@pytest.mark.parametrize("wish", [{"method": "pld@margin"}, {"method": "pld", "rule": "margin"}])
def test_a_lossy_rule_is_refused(wish: dict[str, str]) -> None:
    [strict] = Service([toy()], defaults=Defaults("pld", lossless=True)).offered.values()
    with pytest.raises(ApiError, match="rule 'margin' is lossy, and this server answers losslessly only"):
        strict.method(Speculation.model_validate(wish))
    [other] = Service([toy()], defaults=Defaults("pld")).offered.values()
    assert other.method(Speculation.model_validate(wish)).lossy == "margin(theta=0.9)"
