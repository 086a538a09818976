"""What every combination does: fan-out, budgets, namespaces, and random streams that no two parts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

import pytest
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.default import default_rule
from outpace.acceptance.rejection import RecursiveRejection
from outpace.certify.exact import Setting, certify_exact, tiny_context
from outpace.controllers.base import Budget, Controller
from outpace.controllers.combined import CombinedController
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.metrics import CacheUse, RequestMetrics
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.combination import Combined, one_of, union_of
from outpace.drafting.merged import Merge
from outpace.drafting.model_drafter import DraftModel
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods import registry
from outpace.methods.combination.cascade import Cascade
from outpace.methods.registry import Context
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget, random_table

FEW = [
    Setting("temperature 1", 3, 3, (0, 1, 2, 0, 1), "alone", 1),
    Setting("top-p 0.8", 3, 3, (1, 1, 0), "beside autoregressive decoding", 2),
    Setting("penalties", 3, 2, (0, 1, 2, 0, 1), "alone", 3),
]
"""Several rounds each, and few enough outcomes."""


class Witness(Drafter[DraftState]):
    """Writes down all that happens to it; drafts one certain token."""

    def __init__(
        self, token: int, aux_hidden_state_layers: tuple[int, ...] = (), path_acceptance_prob: float = 1.0
    ) -> None:
        self.token, self.aux_hidden_state_layers, self.path_acceptance_prob = (
            token,
            aux_hidden_state_layers,
            path_acceptance_prob,
        )
        self.seen: list[Any] = []

    def begin(self, sequence: Sequence) -> DraftState:
        self.seen.append("begin")
        return DraftState(sequence)

    def on_prefill(self, state: DraftState, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        self.seen.append(("prefill", tuple(hidden_states)))

    def propose_batch(self, states: Seq[DraftState], budgets: Seq[Budget]) -> list[TokenTree]:
        self.seen.append(("propose", [budget.depth for budget in budgets]))
        trees = []
        for _ in states:
            trees.append(TokenTree())
            trees[-1].add(-1, self.token, path_acceptance_prob=self.path_acceptance_prob)
        return trees

    def observe(self, state: DraftState, verdict: Verdict) -> None:
        self.seen.append("observe")

    def caches(self, state: DraftState) -> tuple[CacheUse, ...]:
        return (CacheUse("words", 3, 7),)

    def end(self, state: DraftState) -> None:
        self.seen.append("end")


def combinations(parts: Seq[Drafter[Any]], names: Seq[str]) -> list[Combined[Any]]:
    return [Cascade(parts, names, 0.5), Merge(parts, names)]


@pytest.mark.parametrize("which", [0, 1])
def test_all_that_happens_reaches_every_part(which: int) -> None:
    one, two = Witness(0, aux_hidden_state_layers=(1,)), Witness(1, aux_hidden_state_layers=(1, 3))
    whole = combinations([one, two], ["one", "two"])[which]
    controller = CombinedController([Fixed(2), Fixed(1)], united=which == 1)
    method = Method("toy", whole, RecursiveRejection(), controller)
    assert whole.aux_hidden_state_layers == (1, 3)
    decoder = Decoder(TableTarget(4))
    generation = decoder.submit(Request((0, 1, 2), method, max_new_tokens=3))
    decoder.step()
    decoder.run()
    assert one.seen[0] == two.seen[0] == "begin" and one.seen[-1] == two.seen[-1] == "end"
    assert ("prefill", (1,)) in one.seen and ("prefill", (1, 3)) in two.seen
    assert one.seen.count("observe") == two.seen.count("observe") == generation.metrics.rounds
    assert ("propose", [2]) in one.seen, "every part gets its own budget"
    assert (("propose", [1]) in two.seen) == (which == 1), "a cascade's second part is not asked where the first drafts"
    assert [cache.name for cache in generation.metrics.caches] == ["one: words", "two: words"]


def test_the_budget_is_the_largest_and_keeps_those_of_the_parts() -> None:
    class Priced(Controller):
        def budget(self, metrics: RequestMetrics, batch: int, repeatable: bool = False) -> Budget:
            return Budget(3, 5, relative_costs=(1.0, 1.1, 1.2))

    parts = [Fixed(6, topk=2, max_nodes=10), Priced(), Fixed(0)]
    apart = CombinedController(parts).budget(RequestMetrics(), 1)
    assert (apart.depth, apart.max_nodes, apart.topk, apart.relative_costs) == (6, 10, 2, (1.0, 1.1, 1.2))
    assert [part.depth for part in apart.parts] == [6, 3, 0]
    assert [part.depth for part in apart.limited(4).parts] == [4, 3, 0]
    assert apart.limited(4) is apart.limited(4)  # what is kept of a budget is found by its identity
    assert CombinedController(parts, united=True).budget(RequestMetrics(), 1).max_nodes == 10 + 5
    nested = CombinedController([CombinedController(parts), Fixed(2)]).budget(RequestMetrics(), 1).limited(1)
    assert [part.depth for part in nested.parts[0].parts] == [1, 1, 0], "limits reach the parts of parts"


def test_a_part_without_a_budget_is_not_asked() -> None:
    for which, whole in enumerate(combinations([Witness(0), Witness(1)], ["one", "two"])):
        sequence = TableTarget(4).sequence([0, 1])
        budget = CombinedController([Fixed(0), Fixed(1)], united=which == 1).budget(RequestMetrics(), 1)
        assert whole.propose_batch([whole.begin(sequence)], [budget])[0].tokens == [1]
        assert isinstance(whole.parts[0], Witness) and set(whole.parts[0].seen) == {"begin"}


# ------------------------------------------------------------------------------------------------------ streams


class Shared(Merge):
    """The planted bug: parts draw from one stream."""

    def nest(self, purpose: str) -> None:
        self.purpose = purpose


def two_models(kind: type[Merge], seeds: tuple[int, int]) -> Any:
    """Two draft models in one tree; with equal ``seeds`` they are the same model twice."""

    def make(context: Context) -> Method:
        vocab = context.target.vocab_size
        drafts = [TableTarget(vocab, random_table(vocab, seed, order=1)) for seed in seeds]
        whole = kind([DraftModel(draft) for draft in drafts], ["a", "b"])
        controller = CombinedController([Fixed(1), Fixed(1)], united=True)
        return Method("two", whole, default_rule(whole.proposal), controller)

    return make


@pytest.mark.parametrize("seeds", [(5, 5), (5, 6)])
def test_parts_never_share_a_number(seeds: tuple[int, int]) -> None:
    certificate = certify_exact("two", two_models(Merge, seeds), FEW)
    assert certificate.lossless, certificate.verdict


def test_a_shared_stream_is_caught() -> None:
    certificate = certify_exact("two", two_models(Shared, (5, 5)), FEW)
    assert certificate.lossless is False
    assert certificate.max_abs_error is not None and certificate.max_abs_error > 1e-3


def test_streams_are_told_apart_at_every_depth() -> None:
    inner = Merge([Witness(0), Witness(1)], ["a", "b"])
    outer = Cascade([Witness(2), inner, Merge([Witness(3)], ["c"])], ["x", "y", "z"], 0.5)
    [lone] = outer.parts[2].parts if isinstance(outer.parts[2], Merge) else [None]
    assert lone is not None
    purposes = [part.purpose for part in (outer, outer.parts[0], inner, *inner.parts, outer.parts[2], lone)]
    assert len(set(purposes)) == len(purposes)


# --------------------------------------------------------------------------------------------------- namespaces


@pytest.mark.parametrize("name", ["cascade", "merge"])
def test_what_a_part_learned_stays_in_its_namespace(name: str) -> None:
    target = TableTarget(6, seed=3)
    context = Context(target)
    settings: dict[str, Any] = {
        "parts": ("recycling", "pld"),
        "settings": {"recycling": {"max_nodes": 4}, "pld": {"num_draft_tokens": 1}},
    }
    settings |= {"confidence": 0.0} if name == "cascade" else {}
    method = registry.build(name, context, settings)

    def accepted(namespace: str) -> int:
        decoder = Decoder(target)
        generation = decoder.submit(Request((0, 1), method, max_new_tokens=8, namespace=namespace))
        decoder.run()
        return generation.metrics.accepted

    first = accepted("a")
    assert accepted("b") == first, "another namespace starts as the first did"
    assert accepted("a") > first, "its own goes on from what it knows"
    assert accepted("") == first


# ---------------------------------------------------------------------------------------------------- proposals

CHAIN, SAMPLED = Proposal(), Proposal(sampled=True)
CERTAIN_TREE = Proposal(tree=True)
SIBLINGS = Proposal(tree=True, sampled=True)
WITHOUT = Proposal(tree=True, sampled=True, replacement=False)
PLUS_ONE = Proposal(tree=True, sampled=True, one_sampled_sibling=True)
CARRIED = Proposal(sampled=True, keeps_unverified_draws=True)


@pytest.mark.parametrize(
    ("parts", "single", "together"),
    [
        ([CHAIN, SAMPLED], True, True),
        ([CERTAIN_TREE, PLUS_ONE], True, True),
        ([SAMPLED, SAMPLED], True, False),
        ([SIBLINGS, CHAIN], False, False),
        ([CHAIN, CERTAIN_TREE], False, False),
        ([WITHOUT, SAMPLED], False, False),
    ],
)
def test_single_is_claimed_where_it_holds(parts: list[Proposal], single: bool, together: bool) -> None:
    assert one_of(parts).one_sampled_sibling == single
    assert union_of(parts).one_sampled_sibling == together


def test_proposals_add_up() -> None:
    assert one_of([CHAIN, SAMPLED]) == Proposal(sampled=True, one_sampled_sibling=True, mixed=True)
    assert union_of([CHAIN, CHAIN]) == Proposal(tree=True, mixed=True)
    assert not union_of([WITHOUT, SAMPLED]).replacement and not one_of([WITHOUT, CHAIN]).replacement
    assert union_of([CARRIED, CHAIN]).keeps_unverified_draws and one_of([CARRIED, CHAIN]).keeps_unverified_draws
    assert union_of([WITHOUT]) == WITHOUT


# ---------------------------------------------------------------------------------------------------- bad input


def test_what_does_not_fit_is_refused_in_words() -> None:
    context = tiny_context(3, 0)
    with pytest.raises(BadInput, match="unknown method 'sm'"):
        registry.build("cascade", context, {"parts": ["sm"]})
    with pytest.raises(BadInput, match="none of the parts"):
        registry.build("merge", context, {"parts": ["sam"], "settings": {"pld": {}}})
    with pytest.raises(BadInput, match="no setting 'min_mach'"):
        registry.build("cascade", context, {"parts": ["sam"], "settings": {"sam": {"min_mach": 4}}})
    with pytest.raises(BadInput, match="parts"):
        registry.build("cascade", context, {"parts": []})
    with pytest.raises(BadInput, match="k-seq"):
        registry.build("merge", context, {"parts": ["pld", "sampled-tree"]}, rule="k-seq")
    with pytest.raises(BadInput, match="replacement"):
        registry.build("merge", context, {"parts": ["rsd", "draft-model"]}, rule="univer")


def test_combinations_of_combinations_decode_greedily_as_plain() -> None:
    context = tiny_context(5, 7)
    inner = {"parts": ["pld", "draft-model"], "settings": {"pld": {"num_draft_tokens": 3}}}
    settings = {"parts": ["merge", "sam"], "settings": {"merge": inner, "sam": {"num_draft_tokens": 3}}}
    method = registry.build("cascade", context, settings)
    answers = []
    for one in (method, registry.build("none", context)):
        decoder = Decoder(context.target)
        answers.append(decoder.submit(Request((0, 1, 2, 0, 1), one, SamplingParams(), max_new_tokens=30)))
        decoder.run()
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].metrics.accepted > 0


@pytest.mark.parametrize("name", ["merge", "cascade", "metasd"])
def test_kept_draft_tokens_have_no_say_in_what_is_drafted_before_them(name: str) -> None:
    """Successor tables read what follows draft tokens that no rule has judged yet: with these kept, that would bias."""
    with pytest.raises(BadInput, match="'mcsjd' keeps draft tokens"):
        registry.build(name, tiny_context(3, 0), {"parts": ("recycling", "mcsjd")})
    registry.build(name, tiny_context(3, 0), {"parts": ("pld", "mcsjd")})
