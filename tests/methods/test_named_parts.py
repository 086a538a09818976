"""Parts of one method with draft models or heads of their own: which is bound to which, and that answers stay exact."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

import outpace.loading
from cli_support import Run, refused, toy
from outpace.certify.exact import certify_exact
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.heads.checkpoint import save
from outpace.heads.untrained import random_head
from outpace.methods.bindings import Bindings, draft_models, heads
from outpace.methods.registry import Context, build
from outpace.model import Model
from outpace.targets.base import Scores, Target
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.table import TableTarget, random_table
from target_suite import tiny_model
from test_combined import FEW

COMBINATIONS = ["cascade", "merge", "metasd", "taskspec"]
TINY = {"max_nodes": 3, "depth": 2, "topk": 2}


class Counted(TableTarget):
    """Counts its forwards, and the rows of draft tokens in them."""

    forwards = 0

    def score(self, batch: Any, *args: Any, **more: Any) -> Scores:
        self.forwards += 1
        return super().score(batch, *args, **more)


def decode(target: Target, method: Method, prompt: Seq[int], params: SamplingParams, namespace: str = "") -> Generation:
    decoder = Decoder(target)
    generation = decoder.submit(Request(tuple(prompt), method, params, max_new_tokens=40, namespace=namespace))
    decoder.run()
    assert generation.error is None
    return generation


def over(name: str, parts: Seq[str], settings: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    more: dict[str, Any] = {"metasd": {"exploration": 1.0}, "cascade": {"confidence": 0.9}}.get(name, {})
    if name == "taskspec":
        more = {"policy": "thompson"}
    return {"parts": list(parts), "settings": settings or {}, **more}


# --------------------------------------------------------------------------------------------- two draft models


@pytest.mark.parametrize("name", COMBINATIONS)
def test_two_draft_models_draft_in_one_combination(name: str) -> None:
    target = TableTarget(7, random_table(7, 1))
    small, large = Counted(7, random_table(7, 2)), Counted(7, random_table(7, 1, sharpness=3.0))
    context = Context(target, Bindings(draft_models({"small": small, "large": large})))
    parts = ("draft-model#small", "draft-model#large")
    settings = {"draft-model#small": {"num_draft_tokens": 1}, "draft-model#large": {"num_draft_tokens": 5}}
    method = build(name, context, over(name, parts, settings))
    drafter: Any = method.drafter
    assert [part.draft for part in drafter.parts] == [small, large]
    assert method.drafts_with == ("draft model 'small'", "draft model 'large'")
    plain = build("none", context)
    drafted: dict[str, int] = {}
    for seed in range(6):
        prompt = (seed, 6 - seed, seed)
        found = decode(target, method, prompt, SamplingParams(), "ours")
        assert found.tokens == decode(target, plain, prompt, SamplingParams()).tokens
        assert set(found.metrics.parts) == set(parts)
        for part, rounds in found.metrics.parts.items():
            drafted[part] = drafted.get(part, 0) + rounds
    if name == "cascade":  # a sampled drafter is asked first, and always has something
        assert drafted["draft-model#small"] and small.forwards and not drafted["draft-model#large"]
    else:
        assert all(drafted.values()), drafted
        assert small.forwards and large.forwards
    assert [one.depth for one in method.controller.budget(found.metrics, 1, repeatable=False).parts] == [1, 5]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_parts_of_two_draft_models_keep_the_law(name: str) -> None:
    settings = {part: {"num_draft_tokens": 1} for part in ("draft-model#small", "draft-model#large")}
    chosen = over(name, list(settings), settings)
    certificate = certify_exact(name, lambda context: build(name, context, chosen), FEW[:2])
    assert certificate.lossless, certificate.verdict


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_two_parts_over_one_model_have_kv_and_settings_of_their_own(temperature: float) -> None:
    """The same weights under two names, on the fast target: neither part's forward disturbs the other's."""
    target = DenseTarget(read_decoder_spec(tiny_model("llama")))
    draft = DenseTarget(read_decoder_spec(tiny_model("llama")))
    context = Context(target, Bindings(draft_models({"one": draft, "two": draft})))
    settings = {"draft-model#one": {"num_draft_tokens": 2}, "draft-model#two": {"num_draft_tokens": 4, "topk": 2}}
    method = build("merge", context, {"parts": list(settings), "settings": settings})
    params = SamplingParams(temperature=temperature, seed=3)
    found = decode(target, method, (1, 2, 3), params)
    if temperature == 0.0:
        assert found.tokens == decode(target, build("none", context), (1, 2, 3), params).tokens
    assert found.metrics.parts == dict.fromkeys(settings, found.metrics.drafting)
    assert found.metrics.accepted >= 0.9 * (found.metrics.committed - found.metrics.rounds) > 10
    assert found.metrics.rounds < 20  # both draft as the target decodes


def test_hsd_and_specinfer_take_the_named_ones() -> None:
    target = TableTarget(5, random_table(5, 1))
    models = {"small": TableTarget(5, random_table(5, 2)), "large": TableTarget(5, random_table(5, 3))}
    context = Context(target, Bindings(draft_models(models)))
    all_of_them: Any = build("specinfer", context, {"branching": (1,)}).drafter
    assert all_of_them.names == ("small", "large")
    only: Any = build("specinfer#large", context, {"branching": (1,)})
    assert (only.name, only.drafter.names) == ("specinfer#large", ("large",))
    inner = {"parts": ["draft-model#large", "pld"]}
    nested: Any = build("hsd", context, {"levels": 1, "inner": "merge", "inner_settings": inner})
    assert nested.drafter.model is models["small"]
    assert nested.drafter.method.drafter.parts[0].parts[0].draft is models["large"]


# -------------------------------------------------------------------------------------------------- two heads


def tiny_dense() -> DenseTarget:
    return DenseTarget(read_decoder_spec(tiny_model("llama")))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_two_heads_of_one_kind_draft_in_one_combination(name: str) -> None:
    target = tiny_dense()
    loaded = {
        "prose": random_head(["eagle3"], target, seed=0, vocabulary=30),
        "code": random_head(["eagle3"], target, seed=1, vocabulary=20),
    }
    context = Context(target, Bindings(heads(loaded)))
    settings = {"eagle3#prose": TINY, "eagle3#code": {**TINY, "max_nodes": 2}}
    method = build(name, context, over(name, list(settings), settings))
    drafter: Any = method.drafter
    assert [len(part.net.ids) for part in drafter.parts] == [30, 20], "each part drafts its own head's tokens"
    assert method.drafts_with == ("head 'prose' (eagle3)", "head 'code' (eagle3)")
    plain = build("none", context)
    drafted: dict[str, int] = {}
    for prompt in ((1, 2, 3), (9, 8), (4, 4, 5, 6), (7,)):
        for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=2)):
            found = decode(target, method, prompt, params, "ours")
            if params.greedy:
                assert found.tokens == decode(target, plain, prompt, params).tokens
            for part, rounds in found.metrics.parts.items():
                drafted[part] = drafted.get(part, 0) + rounds
    assert set(drafted) == set(settings)
    # A cascade's first part drafts only where it is confident, and a head without training may never be.
    assert all(drafted.values()) or (name == "cascade" and drafted["eagle3#code"]), drafted


@pytest.mark.parametrize("name", ["merge", "metasd"])
def test_parts_of_two_heads_keep_the_law(name: str) -> None:
    chosen = over(name, ["eagle3#prose", "eagle3#code"], {"eagle3#prose": TINY, "eagle3#code": TINY})
    certificate = certify_exact(name, lambda context: build(name, context, chosen), FEW[:1])
    assert certificate.lossless, certificate.verdict


# ------------------------------------------------------------------------------------------------ what is refused


def named_context() -> Context:
    target = TableTarget(6)
    weights = [
        *draft_models({"small": TableTarget(6)}),
        *heads({"code": random_head(["eagle3"], target), "chat": random_head(["medusa"], target)}),
    ]
    return Context(target, Bindings(weights))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["draft-model#smol"], r"'draft-model#smol'.*'smol'.*heads: code \(eagle3\), chat.*; did you mean 'small'"),
        (["eagle3#kode"], r"'eagle3#kode'.*'kode'.*draft models: small; heads: code \(eagle3\), chat"),
        (["eagle3#chat"], "'eagle3#chat' drafts with a head of kind eagle3, and 'chat' is a head of kind medusa"),
        (["draft-model#code"], "'draft-model#code' drafts with the draft model that is named 'code', and none is"),
        (["draft-model#small", "draft-model#small"], "'draft-model#small' is a part twice"),
        (["draft-model#"], "has no name after '#'"),
        (["plod#small"], "unknown method 'plod'"),
    ],
)
def test_names_that_are_bound_to_nothing_are_refused(parts: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said) as raised:
        build("merge", named_context(), {"parts": parts})
    assert "\n" not in str(raised.value)


def test_names_may_tell_parts_apart_that_need_no_weights() -> None:
    settings = {"pld#long": {"num_draft_tokens": 9}, "pld": {"num_draft_tokens": 2}}
    method = build("merge", named_context(), {"parts": list(settings), "settings": settings})
    drafter: Any = method.drafter
    assert drafter.names == ("pld#long", "pld")
    with pytest.raises(BadInput, match="'pld#short', which is none of the parts"):
        build("merge", named_context(), {"parts": ["pld#long"], "settings": {"pld#short": {}}})


# --------------------------------------------------------------------------------------- from the command line


def test_the_command_line_names_draft_models(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    honest = outpace.loading.load

    def load(name: str, **options: Any) -> Model:
        loads.append(name)
        return honest(name, **options)

    monkeypatch.setattr(outpace.loading, "load", load)
    parts = '["draft-model#small", "draft-model#large"]'
    settings = '{"draft-model#small": {"num_draft_tokens": 2}}'
    argv = ["--draft-model", "small=other", "--draft-model", "large=other", "-n", "20"]
    told = cli("generate", "abc abc", "--method", "merge", "--param", f"parts={parts}", "--param",
               f"settings={settings}", *argv, "--explain")  # fmt: skip
    assert told.code == 0, told.err
    assert "Drafted by: draft-model#small in" in told.out and "draft-model#large in" in told.out
    assert loads == ["smollm2", "other"], "a model with two names is loaded once"
    labels = "draft-model#small,draft-model#large"
    more = ["--param", "draft-model#small.num_draft_tokens=1", "--limit", "1", "--json", "-"]
    ran = cli("bench", "--methods", labels, *argv, *more)
    assert ran.code == 0, ran.err
    assert f'"{labels.split(",")[1]}"' in ran.out and "\"draft model 'small'\"" in ran.out
    refused(cli("generate", "x", "--draft-model", "a=one", "--draft-model", "a=two"), "names 'a' twice")
    free = cli("generate", "x", "--method", "draft-model#smol", "--draft-model", "small=one", "-n", "2")
    assert free.code == 0, free.err
    assert "did you mean 'small'?" in " ".join(free.err.split())


def test_python_names_draft_models_and_heads(tmp_path: Path) -> None:
    model = toy()
    for seed, name in enumerate(("prose", "code")):
        save(random_head(["eagle3"], model.target, seed=seed), tmp_path / name, {})
    both = {"small": toy("one"), "large": toy("two")}
    method = model.method("merge", {"parts": ["rsd#small", "rsd#large"]}, draft_model=both)
    drafter: Any = method.drafter
    assert [part.draft for part in drafter.parts] == [one.target for one in both.values()]
    with pytest.raises(BadInput, match="names 'eagle3' twice"):
        model.method("eagle3", head=[tmp_path / "prose", tmp_path / "code"])
    bound = model.context(head=[f"prose={tmp_path / 'prose'}", tmp_path / "code"]).bindings
    assert [(one.name, one.kind) for one in bound.heads] == [("prose", "eagle3"), ("eagle3", "eagle3")]
    same = model.context(head={"a": tmp_path / "code", "b": tmp_path / "code"}).bindings.heads
    assert same[0].load is same[1].load, "loaded once"
