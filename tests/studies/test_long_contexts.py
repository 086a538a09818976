"""``context``: the same requests behind ever more text, measured on smollm2."""

from __future__ import annotations

import pytest

from cli_support import Run, refused
from outpace.core.errors import BadInput
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.studies.context import behind
from outpace.studies.registry import StudyContext, find_study, read_settings, run_study


@pytest.mark.model
def test_the_request_stays_the_same_behind_more_text(smollm2: Model) -> None:
    [prompt] = load_prompts(limit=1)
    alone = smollm2.tokenizer.chat(prompt.messages)
    texts = {length: behind(smollm2, prompt, length) for length in (len(alone), 1000, 6000)}
    assert list(texts[len(alone)]) == alone
    for length in (1000, 6000):
        assert length - 700 < len(texts[length]) <= length
        shown = smollm2.tokenizer.decode(texts[length])
        assert shown.count(prompt.text) == 1 and shown.rstrip().removesuffix("assistant").rstrip().endswith(prompt.text)
    assert texts[1000][:200] == texts[6000][:200]  # behind the same texts, and more of them


@pytest.mark.model
def test_contexts_on_the_real_model(smollm2: Model) -> None:
    about = StudyContext("smollm2", load_prompts(limit=4), lambda name, dtype: smollm2)
    one = find_study("context")
    wish = {"contexts": [300, 900], "methods": ["sam", "eagle3"], "texts": 2, "repeat": 2, "max_new_tokens": 8}
    found = run_study(one, about, read_settings(one, wish))
    assert [row["method"] for row in found.rows] == ["sam", "eagle3"] * 2
    short, long = found.rows[0], found.rows[2]
    assert short["context"] <= 300 < long["context"] <= 900
    for row in found.rows:
        assert 1.0 <= row["low"] <= row["tokens"] <= row["high"]
        assert row["speedup"] > 0 and row["verify"] > 0.5 and row["prefill"] > 0 and 0 <= row["draft"] < 1
    # Of the two methods, eagle3 alone reads hidden states: two claims are about it, one about the target.
    claims = [claim["says"] for claim in found.result["claims"]]
    assert len(claims) == 3 and sum("eagle3" in one for one in claims) == 2
    with pytest.raises(BadInput, match="no two lengths"):
        run_study(one, about, read_settings(one, wish | {"contexts": [10**6, 10**7]}))
    with pytest.raises(BadInput, match="no prompt fits"):
        run_study(one, about, read_settings(one, wish | {"contexts": [3, 900]}))


def test_what_it_lacks_is_refused(cli: Run) -> None:
    short = ("--setting", "contexts=100,200")
    refused(cli("study", "context", "--setting", "methods=sax", *short), "unknown method 'sax'")
    refused(cli("study", "context", *short), "eagle3")  # the toy model has no such head
    refused(cli("study", "context", "--setting", "contexts=100"), "setting 'contexts'")
    nowhere = ("--setting", "methods=draft-model", "--setting", "draft_model=/nowhere/draft.gguf")
    refused(cli("study", "context", *nowhere, *short), "/nowhere/draft.gguf")
