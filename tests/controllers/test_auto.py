"""``auto``: the learned part, the free part, both or neither, by what they bring for what they cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.acceptance.default import default_rule
from outpace.certify.exact import certify_exact, tiny_context
from outpace.controllers import yields
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.controllers.yields import Clock, Yield
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.model_drafter import DraftModel
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.heads.checkpoint import facts, new_head, save
from outpace.heads.head_folder import open_head
from outpace.heads.kinds import find_kind, plan
from outpace.heads.shipped import measured
from outpace.heads.untrained import random_head
from outpace.methods import registry
from outpace.methods.bindings import Binding, Bindings, draft_models
from outpace.methods.combination import auto
from outpace.methods.combination.auto import Auto, AutoSettings, learned_methods, learned_part
from outpace.methods.lookup.sam import SuffixLookup
from outpace.methods.registry import Context, Parts, register
from outpace.model import Model
from outpace.targets.base import Sequence
from outpace.targets.costs import ForwardCosts
from outpace.targets.table import TableTarget, random_table
from support import certain_tree, greedy_is_plain
from test_combined import FEW

VOCAB = 40
LENGTH = 120
SAMPLED = SamplingParams(temperature=0.9, seed=4)


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still: what rounds take on toy targets would decide otherwise every time."""
    monkeypatch.setattr(auto, "perf_counter", lambda: 0.0)


class Costs(ForwardCosts):
    """Forwards that cost what they are said to."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        super().__init__(TableTarget(3))
        self._cost = cost

    def _measure(self, rows: int) -> float:
        return self._cost(rows)


def cheap(rows: int) -> float:
    return 1.0 + 0.02 * rows


def proportional(rows: int) -> float:
    return float(rows)


def wandering(cost: Callable[[int], float] = cheap) -> TableTarget:
    """A target that hardly repeats itself."""
    target = TableTarget(VOCAB, random_table(VOCAB, 3, order=5), context_length=1000)
    target.__dict__["costs"] = Costs(cost)
    return target


class Foresight(Drafter[DraftState]):
    """Knows the target's table, and is right at positions that ``knows`` accepts; counts how often it was asked."""

    def __init__(self, target: TableTarget, knows: Callable[[int], bool], length: int = 3) -> None:
        self.target, self.knows, self.length = target, knows, length
        self.asked = 0

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        self.asked += 1
        tree, path, node = TokenTree(), tuple(state.sequence.tokens), ROOT
        for depth in range(min(self.length, budget.depth)):
            row = self.target.table(path)
            token = int(row.argmax() if self.knows(len(path)) else row.argmin())
            node = tree.add(node, token, path_acceptance_prob=0.8 ** (depth + 1))
            path = (*path, token)
        return tree


class Still(Clock):
    """A clock that always shows the same."""

    def __init__(self, shows: float) -> None:
        super().__init__()
        self.shows = shows

    def seconds(self, count: int) -> float | None:
        return self.shows


def of(target: TableTarget, learned: Drafter[Any] | None = None, draft: float = 0.1) -> Method:
    """``auto`` of the suffix automaton and ``learned``, whose drafts take ``draft`` seconds; an autoregressive step
    takes one."""
    parts: list[Drafter[Any]] = [SuffixLookup()] if learned is None else [SuffixLookup(), learned]
    drafter = Auto(parts, ["sam", "learned"][: len(parts)], target)
    drafter.clock = Still(draft)
    controllers = [CostModel(target.costs) for _ in parts]
    return Method("auto", drafter, default_rule(drafter.proposal), CombinedController(controllers, united=True))


def answer(
    target: TableTarget,
    method: Method,
    prompt: Seq[int] = (1, 2, 3),
    params: SamplingParams | None = None,
    length: int = LENGTH,
) -> Generation:
    decoder = Decoder(target)
    generation = decoder.submit(
        Request(tuple(prompt), method, params or SamplingParams(), max_new_tokens=length, trace=True)
    )
    decoder.run()
    return generation


def plain(target: TableTarget, prompt: Seq[int] = (1, 2, 3), length: int = LENGTH) -> list[int]:
    return answer(target, registry.build("none", Context(target)), prompt, length=length).tokens


def always(position: int) -> bool:
    return True


def never(position: int) -> bool:
    return False


# -------------------------------------------------------------------------------------------------- what is chosen


def test_a_learned_part_that_is_right_drafts() -> None:
    target = wandering()
    found = answer(target, of(target, Foresight(target, always)))
    assert found.tokens == plain(target)
    assert found.metrics.committed / found.metrics.rounds > 3.5
    assert found.metrics.parts["learned"] > 0.9 * found.metrics.rounds


def test_one_that_is_wrong_is_left_in_peace_and_tried_ever_less() -> None:
    target = wandering()
    asked = {}
    for length in (60, 240):
        wrong = Foresight(target, never)
        found = answer(target, of(target, wrong), length=length)
        assert found.tokens == plain(target, length=length)
        asked[length] = wrong.asked
    assert 1 <= asked[60] < 20
    assert asked[240] - asked[60] < 0.04 * 180


def test_where_rows_cost_in_proportion_decoding_is_plain() -> None:
    target = wandering(proportional)
    right = Foresight(target, always)
    found = answer(target, of(target, right))
    assert found.tokens == plain(target)
    assert found.metrics.drafted == 0
    assert right.asked < 0.25 * LENGTH
    assert found.metrics.parts == {"sam": 0, "learned": 0}


def test_a_draft_that_takes_longer_than_it_saves_is_not_asked_for() -> None:
    target = wandering()
    counts = {}
    for draft in (0.1, 5.0):
        part = Foresight(target, always)
        answer(target, of(target, part, draft))
        counts[draft] = part.asked
    assert counts[5.0] < 0.2 * LENGTH
    assert counts[0.1] >= 0.9 * LENGTH / 4


def test_copying_alone_does_where_text_repeats() -> None:
    target = TableTarget(VOCAB, random_table(VOCAB, 3, order=1))  # order 1: it runs in circles soon
    target.__dict__["costs"] = Costs(cheap)
    prompt = (1, 2, 3, *plain(target))
    part = Foresight(target, always)
    found = answer(target, of(target, part), prompt)
    assert found.tokens == plain(target, prompt)
    assert found.metrics.parts == {"sam": found.metrics.drafting, "learned": 0}
    assert found.metrics.drafting >= found.metrics.rounds - 1, "the last token has no room for a draft"
    assert part.asked == 0, "where copying promises more, the learned part rests"
    alone = answer(target, of(target))
    assert alone.metrics.parts == {"sam": alone.metrics.drafting}


def test_both_bring_more_than_either() -> None:
    """Half of the answer is in the prompt, the other half the learned part knows."""
    target = wandering()
    said = plain(target, length=80)
    prompt = (*said[:40], 0, 1, 2, 3)
    copied = TableTarget(VOCAB, lambda path: target.table(path[44:] if len(path) > 44 else (7,)))
    copied.__dict__["costs"] = Costs(cheap)
    rounds = {}
    for name, made in {"both": of(copied, Foresight(copied, lambda at: at > 84)), "copying": of(copied)}.items():
        found = answer(copied, made, (*prompt[:44],), length=80)
        rounds[name] = found.metrics.rounds
        if name == "both":
            assert found.metrics.parts["learned"] > 3
            assert found.tokens == plain(copied, prompt[:44], 80)
    assert rounds["both"] < rounds["copying"]


def test_trees_are_united_and_cut_by_what_pays() -> None:
    target = wandering()
    method = of(target, Foresight(target, always))
    sequence = target.sequence((1, 2, 3, 4, 2))
    state = method.drafter.begin(sequence)
    budget = Budget(6, 6, relative_costs=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6))
    [tree] = method.drafter.propose_batch([state], [budget])
    assert tree.child(ROOT, 3) is not None, "what the text says"
    assert tree.child(ROOT, int(target.table(tuple(sequence.tokens)).argmax())) is not None, "what the head says"
    assert len(tree) <= 6
    dear = Budget(6, 6, relative_costs=(1.0, 5.0, 9.0, 13.0, 17.0, 21.0, 25.0))
    assert len(method.drafter.propose_batch([state], [dear])[0]) == 0


# --------------------------------------------------------------------------------------------- when it asks again


def test_waits_grow_with_trials_that_do_not_pay_and_end_when_they_do() -> None:
    known = Yield(tokens=50.0, steps=100.0)
    waits = []
    for _ in range(4):
        waits.append(next(n for n in range(1000) if known.wanted(1.0, 0.2)))
        known.learn(1, 1.5)
    assert waits == [yields.PATIENCE * factor for factor in (1, 2, 4, 8)]
    while not known.wanted(1.0, 0.2):
        pass
    known.learn(4, 1.5)
    assert known.wanted(1.0, 0.2), "one that pays is followed by another at once"
    for _ in range(8):
        known.learn(4, 1.5)
        assert known.wanted(1.0, 0.2)
    assert known.rate(0.2) > 1.5


def test_a_poor_part_becomes_good_when_the_text_does() -> None:
    target = wandering()
    part = Foresight(target, lambda at: at > 150)
    found = answer(target, of(target, part), length=400)
    assert part.asked < found.metrics.rounds
    assert sum(len(one.committed) for one in found.rounds[-20:]) > 3 * 20


def test_the_clock_shows_the_usual_time() -> None:
    clock = Clock()
    assert clock.seconds(1) is None
    for seconds in (1.0, 1.0, 50.0):
        clock.read(1, seconds)
    assert clock.seconds(1) == 1.0
    assert clock.seconds(4) is None


def test_a_round_that_takes_long_in_truth_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever prices say: a part whose rounds bring four tokens in ten times a plain round's time is left alone."""
    now, target = [1.0], wandering()
    monkeypatch.setattr(auto, "perf_counter", lambda: now[0])
    part = Foresight(target, always)
    method = of(target, part)
    assert isinstance(method.drafter, Auto)
    inner, score = part.asked, target.score

    def slow(batch: object, *rest: object, **named: object) -> object:
        nonlocal inner
        now[0] += 10.0 if part.asked > inner else 1.0
        inner = part.asked
        return score(batch, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "score", slow)
    found = answer(target, method, length=200)
    assert part.asked < 0.3 * found.metrics.rounds


def test_a_first_draft_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the prompt, which no later one will."""
    ticks = iter(range(1000))
    monkeypatch.setattr(auto, "perf_counter", lambda: float(next(ticks)))
    target = wandering()
    method = of(target, Foresight(target, always))
    assert isinstance(method.drafter, Auto)
    method.drafter.clock = Clock()
    answer(target, method, length=1)
    assert method.drafter.clock.seconds(1) is None
    answer(target, method, length=9)
    assert method.drafter.clock.seconds(1) == 1.0


def test_what_is_known_stays_in_its_namespace() -> None:
    target = wandering()
    wrong = Foresight(target, never)
    method = of(target, wrong)
    asked = []
    for namespace in ("ours", "ours", "theirs", "", ""):
        before = wrong.asked
        decoder = Decoder(target)
        decoder.submit(Request((1, 2), method, max_new_tokens=30, namespace=namespace))
        decoder.run()
        asked.append(wrong.asked - before)
    assert asked[1] < asked[0] == asked[2] == asked[3] == asked[4]


# ---------------------------------------------------------------------------------------------------- losslessness


@pytest.mark.parametrize("draft", [0.01, 3.0])
@pytest.mark.parametrize("cost", [cheap, proportional])
def test_a_seed_reproduces_its_answer_whatever_clocks_say(cost: Callable[[int], float], draft: float) -> None:
    seen = []
    for costs, seconds in ((cheap, 0.1), (cost, draft)):
        target = wandering(costs)
        found = answer(target, of(target, Foresight(target, lambda at: at % 3 > 0), seconds), params=SAMPLED, length=60)
        seen.append([(one.tree.tokens, one.committed) for one in found.rounds])
    assert seen[0] == seen[1]


def test_at_temperature_0_it_is_plain_decoding() -> None:
    greedy_is_plain("auto", {})


class Guess(Drafter[DraftState]):
    """A certain tree, another one for every context."""

    proposal = Proposal(tree=True)

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        tree, sequence = TokenTree(), state.sequence
        certain_tree(5, 3, 3)(tree, tuple(sequence.tokens), budget.depth, self.chance(sequence))
        return tree


def certain(context: Context) -> Drafter[Any]:
    return Guess()


def sampled(context: Context) -> Drafter[Any]:
    return DraftModel(context.draft())


@pytest.mark.parametrize("learned", [certain, sampled])
def test_outputs_have_the_target_s_law(learned: Callable[[Context], Drafter[Any]]) -> None:
    def make(context: Context) -> Method:
        drafter = Auto([SuffixLookup(), learned(context)], ["sam", "learned"], context.target)
        controller = CombinedController([CostModel(context.target.costs, 4), Fixed(2, max_nodes=3)], united=True)
        return Method("auto", drafter, default_rule(drafter.proposal), controller)

    certificate = certify_exact("auto", make, FEW)
    assert certificate.lossless, certificate.verdict
    assert all(check.max_abs_error is not None for check in certificate.checks), "enumerated, every one"


def test_with_a_trained_method_as_it_is_registered() -> None:
    name = learned_methods()[0]
    tiny = {name: dict(registry.find(name).tiny)}

    def make(context: Context) -> Method:
        return registry.build("auto", context, {"learned": [name], "settings": tiny})

    assert tuple(make(tiny_context(3, 0)).drafter.names) == ("sam", name)  # type: ignore[attr-defined]
    certificate = certify_exact("auto", make, FEW[:1])
    assert certificate.lossless, certificate.verdict


def test_requests_side_by_side_say_what_they_say_alone() -> None:
    target = wandering()
    method = of(target, Foresight(target, lambda at: at % 4 > 0))
    prompts = [(1, 2), (5, 6, 7, 5, 6, 7, 5), (9,)]
    decoder = Decoder(target)
    running = [decoder.submit(Request(one, method, max_new_tokens=50)) for one in prompts]
    running.append(decoder.submit(Request((3,), method, SAMPLED, max_new_tokens=50)))
    decoder.run()
    assert [one.tokens for one in running[:3]] == [plain(target, one, 50) for one in prompts]
    assert running[3].tokens == answer(target, method, (3,), SAMPLED, 50).tokens


# ---------------------------------------------------------------------------------------------- which parts it has


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those that there are, two trained methods of toy kinds."""
    registry.methods()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    def declare(name: str, kind: str) -> None:
        @register(name, family="toy", paper="none", summary="toy", head=kind)
        def build(context: Context, settings: registry.NoSettings) -> Parts:
            context.head(kind)
            return Parts(Guess(), Fixed(2))

    declare("toy-one", "one")
    declare("toy-two", "two")


def context(
    have: Seq[str] = (), named: Seq[str] = (), *, draft: bool = False, speeds: dict[str, float] | None = None
) -> Context:
    """What is shipped or named: heads by kind. ``speeds``: what was measured, by method."""
    target = TableTarget(6)

    def bound(kind: str) -> Binding:
        return Binding(kind, kind, object, speedup=(speeds or {}).get)

    def default(kind: str, name: str) -> list[Binding]:
        return [bound(kind)] if kind in have and name in ("", kind) else []

    drafts = draft_models({"small": target} if draft else {})
    return Context(target, Bindings([*drafts, *map(bound, named)], default))


def chosen(context: Context, **settings: Any) -> str | None:
    found = learned_part(context, AutoSettings(**settings))
    return found and found[0]


def test_parts_are_what_was_named_then_what_is_shipped(methods: None) -> None:
    assert chosen(context()) is None
    assert chosen(context(["one", "two"])) == "toy-one"
    assert chosen(context(["two"])) == "toy-two"
    assert chosen(context(["one"], named=["two"])) == "toy-two"
    assert chosen(context(["one"], draft=True)) == "draft-model"
    assert chosen(context(["one"], named=["two"], draft=True)) == "toy-two"
    assert chosen(context(["one", "two"]), learned=("toy-two",)) == "toy-two"
    assert chosen(context(["one", "two"]), learned=()) is None
    assert chosen(context(["two"]), learned=("toy-one", "toy-two")) == "toy-two"


def test_of_several_heads_the_one_that_measured_best_drafts(methods: None) -> None:
    both, speeds = ["one", "two"], {"toy-one": 1.1, "toy-two": 1.3}
    assert chosen(context(both, speeds=speeds)) == "toy-two"
    assert chosen(context(both, speeds={"toy-two": 1.1})) == "toy-two"
    assert chosen(context(both, speeds=speeds), learned=("toy-one",)) == "toy-one"
    assert chosen(context(named=both, speeds=speeds)) == "toy-two"


def test_a_head_that_was_measured_not_to_gain_is_left_out(methods: None) -> None:
    both, slow = ["one", "two"], {"toy-one": 0.97, "toy-two": 1.0}
    assert chosen(context(both, speeds=slow)) is None
    assert chosen(context(named=["one"], speeds=slow)) is None
    assert chosen(context(named=["one"], draft=True, speeds=slow)) == "draft-model"
    assert chosen(context(both, speeds={"toy-one": 0.9})) == "toy-two"
    assert chosen(context(both, speeds=slow), learned=("toy-one",)) == "toy-one", "it was asked for"


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        (context(named=["three"]), {}, "of kind three"),
        (context(), {"learned": ["toy-one"]}, "'toy-one' drafts with a trained head, and none is shipped"),
        (context(), {"learned": ["nonesuch"]}, "unknown method 'nonesuch'"),
        (context(), {"settings": {"pld": {"num_draft_tokens": 2}}}, "none of auto's parts"),
        (context(), {"settings": {"sam": {"lenth": 2}}}, "lenth"),
        (context(["one"]), {"learned": ["toy-one"], "settings": {"toy-one": {"x": 1}}}, "no setting 'x'"),
        (context(), {"free": "nonesuch"}, "unknown method"),
        (context(draft=True), {"free": "draft-model"}, "samples, or runs"),
    ],
)
def test_what_cannot_be_is_refused(methods: None, given: Context, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        registry.build("auto", given, settings)


def test_a_rule_that_changes_the_output_is_refused(methods: None) -> None:
    lossy: Any = SimpleNamespace(name="lenient", lossless=False)

    @register("toy-lossy", family="toy", paper="none", summary="toy", head="one")
    def build(context: Context, settings: registry.NoSettings) -> Parts:
        return Parts(Guess(), Fixed(2), lossy)

    with pytest.raises(BadInput, match="changes the output"):
        registry.build("auto", context(["one"]), {"learned": ["toy-lossy"]})


def test_what_was_measured_is_read_beside_the_head(tmp_path: Path) -> None:
    target = wandering()
    config = plan(find_kind("eagle3"), facts(target, "toy"), size="tiny", vocabulary=16)
    rows = [{"method": "eagle3", "speedup": speed} for speed in (1.4, 1.2)] + [{"method": "other", "speedup": 2.0}]
    save(new_head(config, target, torch.arange(16)), tmp_path / "head", {})
    kept = {"weights": open_head(tmp_path / "head").files.fingerprint, "drafters": rows}
    (tmp_path / "head" / "training.json").write_text(json.dumps({"measured": {"temperature 0": kept}}))
    save(new_head(config, target, torch.arange(16)), tmp_path / "bare", {"measured": "never"})
    assert measured(open_head(tmp_path / "head"), "eagle3") == 1.4
    assert measured(open_head(tmp_path / "head"), "eagle2") is None
    for gains, expected in ((False, 0.0), (True, None)):
        folder = tmp_path / f"gains {gains}"
        save(new_head(config, target, torch.arange(16)), folder, {"trial": {"gains": gains}})
        assert measured(open_head(folder), "eagle3") == expected
    assert measured(open_head(tmp_path / "bare"), "eagle3") is None


def test_without_a_head_it_is_the_suffix_automaton_alone() -> None:
    method = registry.build("auto", context())
    assert method.drafter.names == ("sam",)  # type: ignore[attr-defined]
    assert not method.drafter.aux_hidden_state_layers
    assert not method.drafter.proposal.tree


def test_a_head_that_was_named_drafts_and_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = wandering()
    model = Model("toy", target, None, frozenset())  # type: ignore[arg-type]
    config = plan(find_kind("eagle3"), facts(target, "toy"), size="tiny", vocabulary=16)
    save(random_head(["eagle3"], target), tmp_path / "other", {})
    save(new_head(config, target, torch.arange(16)), tmp_path / "fits", {})
    method = model.method("auto", head=tmp_path / "fits")
    assert method.drafter.names == ("sam", "eagle3")  # type: ignore[attr-defined]
    assert answer(target, method, length=30).tokens == plain(target, length=30)
    with pytest.raises(BadInput, match="made for other"):
        model.method("auto", head=tmp_path / "other")
    with pytest.raises(BadInput, match="no such folder"):
        model.method("auto", head=tmp_path / "nowhere")
