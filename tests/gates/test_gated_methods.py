"""Methods with gates: lossless where they always ask the target, lossy and marked elsewhere; what stands."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import outpace
from outpace.certify.distributions import autoregressive_distribution, enumerated_distribution
from outpace.certify.exact import SAMPLING, Setting, cells_of, certify_exact, requests, rotating_slice, tiny_context
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.bindings import Bindings, draft_models
from outpace.methods.registry import Context, build, find
from outpace.model import Model
from outpace.targets.table import TableTarget, random_table

pytestmark = pytest.mark.usefixtures("one_thread")

GATED = ("sprinter", "pad", "bild")
ASKS: dict[str, dict[str, Any]] = {name: dict(find(name).tiny) for name in GATED}
"""Settings at which every token is judged exactly; the gates are random."""
TRUSTS: dict[str, dict[str, Any]] = {
    "sprinter": {"gate": "random", "threshold": 0.5, "num_draft_tokens": 2},
    "pad": {"gate": "random", "threshold": 0.5, "num_draft_tokens": 2},
    "bild": {"fallback": 0.3, "rollback": 2.0, "num_draft_tokens": 2},
}
"""Settings at which draft tokens stand."""
PROMPT = (0, 2, 1)


def built(name: str, settings: dict[str, Any], rule: str | None, context: Context) -> Method:
    return build(name, context, settings, rule)


def certified(name: str, settings: dict[str, Any], rule: str | None = None, count: int = 5) -> Any:
    make = partial(built, name, settings, rule)
    cells = rotating_slice(cells_of(make(tiny_context(3, 0))), 1, count)
    return certify_exact(name, make, cells, samples=400, outcomes=20_000)


@pytest.mark.certification
@pytest.mark.parametrize("name", GATED)
def test_a_gate_that_always_asks_changes_nothing(name: str) -> None:
    certificate = certified(name, ASKS[name])
    assert certificate.lossless, certificate.verdict
    assert "exact: output probabilities equal" in certificate.verdict


@pytest.mark.certification
def test_pad_s_gate_may_be_asked_and_let_nothing_stand() -> None:
    """At threshold 0 it is not asked; at one that no probability falls below it is, and nothing stands all the same."""
    certificate = certified("pad", {**TRUSTS["pad"], "threshold": 1e-30})
    assert certificate.max_abs_error is not None and certificate.max_abs_error < 1e-6, certificate.verdict


@pytest.mark.certification
@pytest.mark.parametrize("name", GATED)
def test_a_gate_that_trusts_changes_the_distribution(name: str) -> None:
    certificate = certified(name, TRUSTS[name])
    assert certificate.lossless is False, certificate.verdict


@pytest.mark.certification
@pytest.mark.parametrize("rule", ["recursive-rejection", "block"])
def test_drafts_that_end_where_the_gate_doubts_are_lossless_under_exact_rules(rule: str) -> None:
    """A draft ends by the tokens that were drawn; no draw is dropped for what it is."""
    certificate = certified("sprinter", {**TRUSTS["sprinter"], "threshold": 0.3}, rule)
    assert certificate.lossless, certificate.verdict


@pytest.mark.parametrize("name", GATED)
def test_what_is_lossy_says_so(name: str) -> None:
    assert find(name).lossless is False
    assert find(name).public()["lossless"] is False
    method = build(name, tiny_context(3, 0), TRUSTS[name])
    assert method.lossless is False
    assert method.lossy in ("sprinter(threshold=0.5)", "pad(threshold=0.5)", "rollback(distance=2)")


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("sampling", ["top-k 2", "grammar", "top-p 0.8"])
def test_no_token_stands_that_the_sampling_parameters_exclude(name: str, sampling: str) -> None:
    settings = {**TRUSTS[name], **({"rollback": 100.0} if name == "bild" else {"threshold": float(name == "pad")})}
    cell = Setting(sampling, 3, 3, (0, 1, 2, 0, 1), "alone", 7)
    params = SAMPLING[sampling]
    make = partial(built, name, settings, None)
    outputs, drafted = enumerated_distribution(partial(requests, make, cell, params), 20_000)
    plain = autoregressive_distribution(random_table(3, 7), 3, params, cell.prompt, cell.length)
    assert drafted
    assert {output for output, weight in outputs.items() if weight > 1e-9} <= set(plain)


# -------------------------------------------------------------------------------------------------- what stands


def answer(name: str, settings: dict[str, Any], length: int = 12) -> tuple[list[int], Any]:
    context = context_of()
    decoder = Decoder(context.target)
    made = decoder.submit(Request(PROMPT, build(name, context, settings), max_new_tokens=length, trace=True))
    decoder.run()
    return made.tokens, made


def context_of() -> Context:
    target, draft = TableTarget(9, seed=1), TableTarget(9, seed=2)
    return Context(target, Bindings(draft_models({"draft": draft})))


def written_by_turns(drafted: int, length: int) -> list[int]:
    """``drafted`` tokens of the draft model, one of the target, and so on; all greedy."""
    context = context_of()
    draft = context.bindings.draft_models[0].load()
    text = list(PROMPT)
    while len(text) < len(PROMPT) + length:
        # The last token of an answer is never drafted: the round has room for no more.
        room = len(PROMPT) + length - len(text) - 1
        for _ in range(min(drafted, room)):
            text.append(int(draft.table(tuple(text)).argmax()))
        text.append(int(context.target.table(tuple(text)).argmax()))  # type: ignore[attr-defined]
    return text[len(PROMPT) :]


TRUSTING = [
    ("sprinter", {"gate": "random", "threshold": 0.0, "num_draft_tokens": 3}),
    ("pad", {"gate": "random", "threshold": 1.0, "num_draft_tokens": 3}),
    ("bild", {"fallback": 0.0, "rollback": 100.0, "num_draft_tokens": 3}),
]


@pytest.mark.parametrize(("name", "settings"), TRUSTING)
def test_a_gate_that_trusts_everything_lets_the_draft_model_write(name: str, settings: dict[str, Any]) -> None:
    found, made = answer(name, settings)
    assert found == written_by_turns(3, 12)
    assert made.metrics.accepted == made.metrics.drafted


@pytest.mark.parametrize("name", GATED)
def test_a_gate_that_always_asks_answers_greedily_as_the_target(name: str) -> None:
    assert answer(name, ASKS[name])[0] == answer("none", {})[0]


def test_sprinter_asks_about_the_first_token_that_it_doubts_and_no_later_one() -> None:
    _, made = answer("sprinter", {"gate": "random", "threshold": 0.5, "num_draft_tokens": 6}, 60)
    vouched = [len(one.tree.vouched) for one in made.rounds if len(one.tree)]
    for one in made.rounds:
        count = len(one.tree)
        assert one.tree.vouched in (frozenset(range(count)), frozenset(range(count - 1)))
        assert len(one.path) >= len(one.tree.vouched)
    assert sum(vouched) > 0 and min(vouched) < 6


def test_bild_stops_where_its_draft_model_is_unsure() -> None:
    _, made = answer("bild", {"fallback": 0.6, "rollback": 0.0}, 60)
    sure = sum(len(one.tree) for one in made.rounds)
    _, bold = answer("bild", {"fallback": 0.0, "rollback": 0.0}, 60)
    assert 0 < sure < sum(len(one.tree) for one in bold.rounds)


def test_what_a_grammar_cuts_keeps_its_vouched_nodes() -> None:
    tree = TokenTree.chain([4, 5, 6])
    tree.vouched = frozenset({0, 2})
    kept = tree.only([0, 1])
    assert kept.tokens == [4, 5]
    assert kept.vouched == frozenset({0})


# ----------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("name", ["sprinter", "pad"])
def test_a_gate_must_be_named(name: str) -> None:
    with pytest.raises(BadInput, match=f"method '{name}' needs a gate: train one with 'outpace train {name}"):
        build(name, tiny_context(3, 0))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("sprinter", {"gate": "nowhere"}, "there is no gate at 'nowhere'; train one: outpace train sprinter"),
        ("bild", {"gate": "nowhere"}, "there is no gate at 'nowhere'"),
        ("sprinter", {"gate": "random", "threshold": 1.5}, "setting 'threshold'"),
        ("pad", {"gate": "random", "threshold": -0.1}, "setting 'threshold'"),
        ("bild", {"rollback": -1.0}, "setting 'rollback'"),
    ],
)
def test_settings_that_do_not_exist_are_refused(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        build(name, tiny_context(3, 0), settings)


def test_a_gated_method_is_no_part_of_a_lossless_one() -> None:
    with pytest.raises(BadInput, match="'sprinter' is lossy, and no part of another method"):
        build("cascade", tiny_context(3, 0), {"parts": ["sprinter", "pld"], "settings": {"sprinter": ASKS["sprinter"]}})


# ------------------------------------------------------------------------------------------------ a real model


@pytest.mark.parametrize("name", GATED)
def test_on_a_real_model_gates_that_ask_keep_greedy_answers(smollm2_float32: Model, name: str) -> None:
    model = smollm2_float32
    prompt = model.tokenizer.chat([{"role": "user", "content": "Name three birds."}])
    settings = {**ASKS[name], "num_draft_tokens": 4}

    def decoded(method: Method, params: SamplingParams) -> list[int]:
        decoder = Decoder(model.target)
        made = decoder.submit(Request(tuple(prompt), method, params, max_new_tokens=24, stop_ids=model.eos_ids))
        decoder.run()
        made.raise_error()
        return made.tokens

    asks, none = model.method(name, settings), model.method("none")
    assert decoded(asks, SamplingParams()) == decoded(none, SamplingParams())
    trusts = model.method(name, {**TRUSTS[name], "num_draft_tokens": 4})
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=3)):
        assert decoded(trusts, params)


def test_a_gate_that_always_asks_reads_no_states() -> None:
    context = tiny_context(3, 0)
    for name in ("sprinter", "pad"):
        method = build(name, context, ASKS[name])
        rule: Any = method.rule
        assert rule.exact
        assert rule.aux_hidden_state_layers == ()


# ---------------------------------------------------------------------------------------------------- certification


@pytest.mark.parametrize("name", GATED)
@pytest.mark.slow
def test_the_command_s_certificate_is_of_the_setting_that_always_asks(name: str) -> None:
    certificate = outpace.certify(name, cells=2)
    assert certificate.lossless, certificate.verdict
    with pytest.raises(BadInput, match=f"method '{name}' is lossy and states no bound"):
        outpace.certify(name, level="exact", settings=TRUSTS[name], cells=1)


def test_bild_keeps_the_bound_of_its_rule() -> None:
    certificate = outpace.certify("bild", level="bound", settings=TRUSTS["bild"], cells=1)
    assert certificate.passed, certificate.verdict
    assert certificate.bounds[0].rule == "rollback(distance=2)"
    assert certificate.bounds[0].total_variation > 0.01
    with pytest.raises(BadInput, match="method 'sprinter' is lossy and states no bound"):
        outpace.certify("sprinter", level="bound", settings=TRUSTS["sprinter"])


def test_what_departs_from_the_target_whatever_its_rule_is_still_refused() -> None:
    for name in ("copy-decode", "smcsd"):
        with pytest.raises(BadInput, match="is lossy and states no bound"):
            outpace.certify(name, level="bound")
