"""A decoder inside a drafter: exact at every handover that is allowed, with its surplus kept and its K/V in step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.block import Block
from outpace.acceptance.default import default_rule
from outpace.acceptance.rejection import RecursiveRejection
from outpace.certify.exact import Setting, certify_exact, tiny_context
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.model_drafter import DraftModel
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.combination import nested_decoder as nested
from outpace.methods.combination.nested_decoder import Handover, Nested
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context, Parts, build, find
from outpace.targets.base import Scores, Sequence, Target
from outpace.targets.table import TableTarget, random_table
from weights_support import with_drafts

CELLS = [
    Setting("top-k 2", 3, 4, (0, 1, 2, 0, 1), "alone", 1),
    Setting("top-k 2", 3, 3, (1, 1, 0), "beside autoregressive decoding", 2),
    Setting("user's processor", 3, 3, (0, 1, 2, 0, 1), "alone", 4),
    Setting("penalties", 3, 2, (0, 1, 2, 0, 1), "alone", 3),
]
"""Several rounds each, and few enough outcomes."""


def certified(settings: dict[str, Any], rule: str | None = None, cells: Seq[Setting] = CELLS) -> bool:
    certificate = certify_exact("hsd", lambda context: build("hsd", context, settings, rule), cells)
    return bool(certificate.lossless)


ONE: dict[str, Any] = {"levels": 1, "lengths": (2,)}
SHORT = {"pld": {"num_draft_tokens": 1}, "draft-model": {"num_draft_tokens": 1}}


@pytest.mark.parametrize("rule", ["block", "recursive-rejection"])
@pytest.mark.parametrize("handover", ["fixed", "variable"])
@pytest.mark.parametrize("inner", ["pld", "draft-model"])
def test_both_handovers_are_exact(inner: str, handover: str, rule: str) -> None:
    settings = {**ONE, "handover": handover, "inner": inner, "inner_settings": {"num_draft_tokens": 2}}
    cells = CELLS if inner == "pld" else CELLS[2:]
    assert certified({**settings, "lengths": (1,) if handover == "variable" else (2,)}, rule, cells)


@pytest.mark.parametrize(
    "settings",
    [
        {"levels": 2, "lengths": (2, 1), "inner": "pld", "inner_settings": {"num_draft_tokens": 1}},
        {**ONE, "inner": "rsd", "inner_settings": {"branching": (2,)}},
        {**ONE, "inner": "merge", "inner_settings": {"settings": SHORT, "parts": ("pld", "draft-model")}},
        {**ONE, "inner": "sam", "inner_settings": {"num_draft_tokens": 2}},
        {**ONE, "inner": "cascade", "inner_settings": {"settings": SHORT, "parts": ("pld", "draft-model")}},
    ],
    ids=lambda one: f"{one['levels']} {one['inner']}",
)
def test_any_method_any_number_of_levels(settings: dict[str, Any]) -> None:
    assert certified(settings, cells=CELLS[2:])


def test_it_combines() -> None:
    settings = {"parts": ("hsd", "pld"), "settings": {"hsd": find("hsd").tiny, "pld": {"num_draft_tokens": 1}}}
    merged = certify_exact("merge", lambda context: build("merge", context, settings), CELLS[1:2])
    cascaded = certify_exact("cascade", lambda context: build("cascade", context, settings), CELLS[1:2])
    assert merged.lossless and cascaded.lossless, (merged.verdict, cascaded.verdict)


# ------------------------------------------------------------------------------------- planted bugs are caught


def made(inner_rule: AcceptanceRule, handover: Handover, kind: type[Nested] = Nested) -> Any:
    def make(context: Context) -> Method:
        middle, small = (draft for _, draft in context.drafts())
        inner = Method("inner", DraftModel(small), inner_rule, Fixed(2))
        drafter = kind(middle, inner, handover)
        return Method("hsd", drafter, default_rule(drafter.proposal), Fixed(2))

    return make


@pytest.mark.parametrize("rule", [RecursiveRejection(), Block()])
def test_a_variable_handover_is_exact_whether_or_not_the_inner_rule_looks_ahead(rule: AcceptanceRule) -> None:
    certificate = certify_exact("hsd", made(rule, "variable"), CELLS[1:3])
    assert certificate.lossless, certificate.verdict


class Choosy(Nested):
    """The planted bug: a round that gave one token alone is held back."""

    def _handed(self, run: Any, budget: Any) -> TokenTree:
        tree = super()._handed(run, budget)
        return tree if len(tree) > 1 else TokenTree()


def test_holding_tokens_back_for_being_few_is_a_bias() -> None:
    cells = [Setting("temperature 1", 3, 2, (0, 1, 2, 0, 1), "alone", 1)]

    def small(kind: type[Nested]) -> Any:
        def make(context: Context) -> Method:
            inner = build("pld", context, {"num_draft_tokens": 2}, "recursive-rejection")
            drafter = kind(context.draft(), inner, "variable")
            return Method("hsd", drafter, RecursiveRejection(), Always())

        return make

    assert certify_exact("hsd", small(Nested), cells).lossless
    assert certify_exact("hsd", small(Choosy), cells).lossless is False


class Always(Fixed):
    """Two draft tokens, whatever room is left."""

    def __init__(self) -> None:
        super().__init__(2)

    def budget(self, *args: Any, **more: Any) -> Any:
        budget = super().budget(*args, **more)
        return Unlimited(budget.depth)


class Unlimited(Budget):
    """A budget that no room limits."""

    def limited(self, depth: int) -> Budget:
        return self


class Lossy(RecursiveRejection):
    """A rule that does not claim to keep the distribution."""

    name = "lossy-for-a-test"
    lossless = False


class Overlapping:
    """The planted bug: streams by the inner position alone, which comes again in a later round."""

    def __init__(self, sequence: Sequence, owner: Nested) -> None:
        self._sequence = sequence

    def at(self, position: int, purpose: str) -> Chance:
        return self._sequence.chance.at(position, f"inner/{purpose}")


def test_numbers_that_come_again_in_a_later_round_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Setting("top-k 2", 3, 4, (0, 1, 2, 0, 1), "alone", 1)]
    settings = {**ONE, "inner": "none", "lengths": (2,)}
    assert certified(settings, cells=cells)
    monkeypatch.setattr(nested, "_InnerChance", Overlapping)
    assert not certified(settings, cells=cells)


def test_what_cannot_be_exact_is_refused() -> None:
    context = tiny_context(3, 0)
    with pytest.raises(BadInput, match="changes the inner model's distribution"):
        Nested(context.draft(), Method("inner", NoDraft(), Lossy(), Fixed(0)))
    with pytest.raises(BadInput, match="unknown acceptance rule 'blok'"):
        build("hsd", context, {**ONE, "inner_rule": "blok"})
    with pytest.raises(BadInput, match="needs a further draft model"):
        build("hsd", context, {"levels": 2, "inner": "draft-model"})
    with pytest.raises(BadInput, match="3 levels"):
        build("hsd", context, {"levels": 3})
    with pytest.raises(BadInput, match="unknown method"):
        build("hsd", context, {"inner": "plod"})
    with pytest.raises(BadInput, match="at least 1"):
        build("hsd", context, {"lengths": (0,)})
    with pytest.raises(BadInput, match="is for temperature 0"):
        build("hsd", context, {**ONE, "inner_rule": "greedy"})
    bridged = TableTarget(3)
    bridged.whole = False
    for reader in ("lookahead", "dv", "triforce"):
        with pytest.raises(BadInput, match="shows only its logits"):
            build("hsd", with_drafts(context.target, bridged), {"levels": 1, "inner": reader})
    other = TableTarget(5)
    with pytest.raises(BadInput, match="5 tokens"):
        build("hsd", with_drafts(context.target, other), {})


# ------------------------------------------------------------------------------------------ K/V and the surplus


class Counting(TableTarget):
    """Counts forwards and the tokens that were prefilled, and refuses K/V out of step with the tokens."""

    forwards = 0
    lags = False
    """Whether it may be behind: a draft model catches up in the forward that drafts."""

    def score(self, batch: Any, *args: Any, **more: Any) -> Scores:
        self.forwards += 1
        for sequence, _ in batch:
            assert sequence.kv == sequence.tokens[: len(sequence.kv)]
            assert self.lags or len(sequence.kv) == len(sequence.tokens) - 1
        return super().score(batch, *args, **more)


def decode(target: Target, method: Method, tokens: int = 40, temperature: float = 0.0) -> Any:
    decoder = Decoder(target)
    params = SamplingParams(temperature=temperature, seed=4)
    running = [
        decoder.submit(Request(prompt, method, params, max_new_tokens=tokens)) for prompt in ((0, 1, 2), (2, 0, 2, 0))
    ]
    decoder.run()
    return running


@pytest.mark.parametrize("inner", ["pld", "sam", "draft-model", "recycling", "cacheback", "llma", "merge", "hsd"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_inner_sequences_stay_in_step(inner: str, temperature: float) -> None:
    table = random_table(5, 8, order=1, sharpness=2.5)
    target = TableTarget(5, lambda path: table(path) + 0.7 * random_table(5, 9)(path))
    drafts = Counting(5, table), Counting(5, random_table(5, 8, order=1, sharpness=1.5))
    drafts[1].lags = True
    context = with_drafts(target, *drafts)
    settings = {"parts": ("pld", "draft-model")} if inner == "merge" else {"levels": 1} if inner == "hsd" else {}
    method = build("hsd", context, {"levels": 1, "lengths": (4,), "inner": inner, "inner_settings": settings})
    running = decode(target, method, 60, temperature)
    assert all(one.metrics.accepted > 10 for one in running)
    if temperature == 0.0:
        plain = decode(target, build("none", context), 60)
        assert [one.tokens for one in running] == [one.tokens for one in plain]
    drafter = method.drafter
    assert isinstance(drafter, Nested) and not drafter.decoder.active


def test_the_surplus_is_kept_while_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the models agree, the inner model need not put out a token twice."""

    def forwards() -> int:
        table = random_table(5, 8, order=1, sharpness=9.0)
        target, draft = TableTarget(5, table), Counting(5, table)
        context = with_drafts(target, draft)
        settings = {"lengths": (2,), "inner": "pld", "inner_settings": {"num_draft_tokens": 8}}
        decode(target, build("hsd", context, settings), 60)
        return draft.forwards

    kept = forwards()
    handed = Nested._handed

    def forgetful(self: Nested, run: Any, budget: Any) -> TokenTree:
        tree = handed(self, run, budget)
        run.seen = 10**6
        return tree

    monkeypatch.setattr(Nested, "_handed", forgetful)
    assert forwards() > 1.2 * kept


def test_a_draft_models_context_that_is_full_ends_drafting_alone() -> None:
    target = TableTarget(4, random_table(4, 1), context_length=80)
    draft = TableTarget(4, random_table(4, 1), context_length=24)
    method = build("hsd", with_drafts(target, draft), {"lengths": (3,), "inner_settings": {"num_draft_tokens": 3}})
    plain = decode(target, build("none", Context(target)), 50)
    assert [one.tokens for one in decode(target, method, 50)] == [one.tokens for one in plain]


def test_auto_takes_the_quickest_hierarchy(monkeypatch: pytest.MonkeyPatch) -> None:
    context = tiny_context(4, 1)
    slow, middle, small = context.target, *(draft for _, draft in context.drafts())
    costs = {id(slow): 100.0, id(middle): 10.0, id(small): 1.0}
    monkeypatch.setattr("outpace.targets.costs.ForwardCosts.seconds", lambda self, rows: costs[id(self._target)])

    def chain(acceptance: Any) -> list[Target]:
        parts: Any = build("hsd", context, {"hierarchy": "auto", "acceptance": acceptance, "inner": "none"})
        found, drafter = [], parts.drafter
        while isinstance(drafter, Nested):
            found.append(drafter.model)
            drafter = drafter.method.drafter.parts[0]  # type: ignore[attr-defined]
        return found

    assert chain(((1, 0.9, 0.2), (0, 1, 0.9), (0, 0, 1))) == [middle, small]
    assert chain(((1, 0.5, 0.9), (0, 1, 0.9), (0, 0, 1))) == [small]
    assert chain(((1, 0, 0), (0, 1, 0), (0, 0, 1))) == []
    assert chain(()), "rates are measured where none are given"


def test_an_empty_hierarchy_drafts_nothing() -> None:
    parts = Parts(NoDraft(), Fixed(0))
    assert not Method("hsd", parts.drafter, RecursiveRejection(), parts.controller).may_draft
