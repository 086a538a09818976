"""Names of other projects and other spellings are accepted; those of another algorithm are only suggested."""

from __future__ import annotations

import pytest

from outpace.core.errors import BadInput
from outpace.methods.registry import canonical, find


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *(
            (one, "pld")
            for one in ("prompt_lookup", "prompt-lookup", "PLD", "ngram", "n-gram", "prompt_lookup_decoding")
        ),
        *((one, "eagle3") for one in ("eagle-3", "eagle_3", "EAGLE3", "EAGLE-3")),
        *((one, "eagle") for one in ("eagle1", "eagle-1")),
        *((one, "none") for one in ("autoregressive", "baseline", "plain", "greedy", "off")),
        *((one, "draft-model") for one in ("draft_model", "assisted", "assisted-generation", "speculative")),
        ("jacobi_decoding", "jacobi"),
        ("sam_decoding", "sam"),
        ("faser", "auto"),
        ("SPECTRE", "draft-model"),
    ],
)
def test_common_names_and_spellings(written: str, name: str) -> None:
    assert find(written).name == name
    assert canonical(f"{written}#2") == f"{name}#2"


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("suffix", "sam"),  # SuffixDecoding is another algorithm
        ("suffix-decoding", "sam"),
        ("prompt_lokup", "pld"),
        ("eagle4", "eagle3"),
        ("medusa2", "medusa"),
    ],
)
def test_what_may_be_meant_is_suggested(written: str, near: str) -> None:
    with pytest.raises(
        BadInput, match=rf"unknown method '{written}'; did you mean .*'{near}'.*\? See: outpace methods"
    ):
        find(written)
