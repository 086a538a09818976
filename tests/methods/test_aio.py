"""``aio``: each request is given one strategy, before anything is drafted, and only the time of its answer changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from outpace.acceptance.base import Verdict
from outpace.acceptance.default import default_rule
from outpace.certify.exact import NEIGHBOURS, PROMPTS, SAME_NAMESPACE, Setting, certify_exact, tiny_context
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.controllers.fixed import Fixed
from outpace.controllers.predictor import NOMINAL_FORWARD, FreeDraft, ModelDraft, Predictor, RecordedDraft
from outpace.core.errors import BadInput
from outpace.core.metrics import RequestMetrics
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.methods.bindings import Bindings, draft_models
from outpace.methods.combination.aio.method import AioSettings, offered
from outpace.methods.combination.aio.prompt_features import FEATURES, PromptFeatures
from outpace.methods.combination.aio.routed_drafter import RequestRoute, Routed
from outpace.methods.combination.aio.routing import AUTOREGRESSIVE, Routes, Strategy
from outpace.methods.combination.aio.strategy_estimates import OWN, SHARED, Estimate, Expected, Prior, Ridge, priors
from outpace.methods.registry import Context, build, find
from outpace.model import Model
from outpace.targets.base import Sequence
from outpace.targets.costs import FixedCosts, ForwardCosts
from outpace.targets.table import TableTarget, random_table

TINY = dict(find("aio").tiny)
OPEN = [1.0] + [0.0] * (len(FEATURES) - 1)


class Characters:
    """A tokenizer of single characters whose chat template writes a frame."""

    fingerprint = "characters"
    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [ord(one) for one in text]

    def decode(self, ids: Seq[int]) -> str:
        return "".join(map(chr, ids))

    def chat(self, messages: Seq[Any]) -> list[int]:
        return self.encode(f"<system>Summarise helpfully.\n<user>{messages[-1]['content']}<assistant>")


def numbers(text: str) -> dict[str, float]:
    tokenizer = Characters()
    found = PromptFeatures(tokenizer).of(tokenizer.chat([{"content": text}]))  # type: ignore[arg-type]
    return dict(zip(FEATURES, found, strict=True))


class Given(ForwardCosts):
    """Forwards that take what they are said to."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__(TableTarget(3))
        self._given = seconds

    def seconds(self, rows: int, context: int = 0) -> float:
        return self._given(rows)

    def even(self, rows: int, batch: int = 1, context: int = 0) -> float:
        return self._given(rows)


# ----------------------------------------------------------------------------------------------------- features


CODE = "def add(a, b):\n    total = a + b\n    return total\n\nclass Sum:\n    pass\n"
STORY = "The canals of the town were dug by hand. They drained the marsh and carried goods to the houses. " * 3


def test_all_levels_of_a_parallel_draft_take_one_forward() -> None:
    target, expected = FixedCosts(), Expected(1.0, 4.0, 2.0)

    def steps(*, together: bool) -> float:
        drafting = RecordedDraft(target, lambda: 1.0, together=together)
        return Strategy("any", "head", target, drafting).forecast(expected, 1.0, 1, 16, live=False).steps

    assert steps(together=False) - steps(together=True) == pytest.approx(3 * NOMINAL_FORWARD)


def test_a_prompt_s_kind_is_told_by_its_instruction_not_by_its_text_or_the_template() -> None:
    assert numbers("Please translate this into French: " + STORY)["translate"] == 1.0
    assert numbers("Fix the bug in this function.\n" + CODE)["edit"] == 1.0
    assert numbers("How many apples are 3 apples and 4 apples?")["math"] == 1.0
    assert numbers(STORY + "\nSummarize the passage in one sentence.")["grounded"] == 1.0
    for text in ("Write a poem about rain.", "Why is the sky blue?"):
        found = numbers(text)
        assert not any(found[kind] for kind in ("edit", "translate", "math", "grounded")), found
    assert numbers("Please translate this into French: " + "The total is summarized. " * 9)["math"] == 0.0


def test_text_to_work_on_code_and_repetition_are_shares() -> None:
    alone, given = numbers("Why is the sky blue?"), numbers("Summarise this text:\n" + STORY)
    assert alone["given"] == 0.0 and given["given"] > 0.8
    assert numbers("Fix this.\n" + CODE)["code"] > 0.6 and alone["code"] == given["code"] == 0.0
    assert numbers(STORY)["repeated"] > 0.5 > 0.2 > alone["repeated"]
    assert alone["length"] < given["length"] <= 1.0
    assert all(0.0 <= one <= 1.0 for text in ("", "x", CODE, STORY * 200) for one in numbers(text).values())


def test_without_a_tokenizer_lengths_and_repetition_are_known() -> None:
    found = dict(zip(FEATURES, PromptFeatures(None).of([1, 2, 3, 4] * 8), strict=True))
    assert found["repeated"] > 0.8 and found["length"] > 0.0
    assert found["code"] == found["given"] == found["math"] == 0.0


# ---------------------------------------------------------------------------------------------------- estimates


def test_ridge_is_the_closed_form_around_its_prior() -> None:
    weights, rng = [0.4, 0.1, -0.2], np.random.default_rng(3)
    one = Ridge(weights, 0.5)
    usual, doubt = one.expected([1.0, 0.5, 0.5])
    assert usual == pytest.approx(0.4 + 0.05 - 0.1)
    assert doubt == pytest.approx(0.5 * (1 / OWN + 0.25 / SHARED + 0.25 / SHARED) ** 0.5)
    rows, figures = rng.random((3, 3)), rng.random(3)
    rows[:, 0] = 1.0
    fades = np.array([0.995**2, 0.995, 1.0])
    for row, figure in zip(rows, figures, strict=True):
        one.learn(row.tolist(), figure, 0.5)
    left = np.diag([OWN, SHARED, SHARED]) + (rows * (0.5 * fades)[:, None]).T @ rows
    right = np.diag([OWN, SHARED, SHARED]) @ weights + (rows * (0.5 * fades)[:, None]).T @ figures
    x = np.array([1.0, 0.2, 0.9])
    assert one.expected(x.tolist())[0] == pytest.approx(float(x @ np.linalg.solve(left, right)))


def prior(drafting: float, nodes: float, accepted: float) -> Prior:
    rest = (0.0,) * (len(FEATURES) - 1)
    return Prior((drafting, *rest), (nodes, *rest), (accepted, *rest), 1.0)


def test_requests_of_one_kind_move_the_estimate_of_that_kind_most() -> None:
    known = Estimate(prior(0.5, 3.0, 1.0))
    grounded = [*OPEN]
    grounded[FEATURES.index("grounded")] = grounded[FEATURES.index("given")] = 1.0
    before = known.expected(grounded)[0]
    for _ in range(12):
        known.learn(grounded, RequestMetrics(rounds=20, drafting=19, drafted=114, accepted=76, judged=80), 114)
        known.learn(OPEN, RequestMetrics(rounds=60, drafting=3, drafted=6, accepted=0, judged=3), 3)
    after, hoped = known.expected(grounded)
    assert after.drafting > 0.7 > before.drafting and after.accepted > 3.0 and after.nodes > 5.0
    other = known.expected(OPEN)[0]
    assert other.drafting < 0.35 and other.accepted < after.accepted - 1.0
    assert hoped.drafting >= after.drafting and hoped.accepted > after.accepted
    assert known.width == pytest.approx(1.0, abs=0.1)


def test_no_figure_is_impossible() -> None:
    known = Estimate(prior(0.5, 1.0, 1.0))
    for _ in range(30):
        known.learn([1.0] * len(FEATURES), RequestMetrics(rounds=20, drafting=20, drafted=20, accepted=20), 20)
        known.learn(OPEN, RequestMetrics(rounds=20, drafting=0), 0)
    for numbers in ([1.0] * len(FEATURES), OPEN, [1.0] + [-1.0] * (len(FEATURES) - 1)):
        for one in known.expected(numbers):
            assert 0.0 <= one.drafting <= 1.0 <= one.nodes and 0.0 <= one.accepted <= one.nodes


# ------------------------------------------------------------------------------------------------------ routing


def routes(target: ForwardCosts, drafts: dict[str, tuple[float, Expected, Expected]], *, live: bool = True) -> Routes:
    """Draft models by the seconds of their forward, and what is expected and hoped of them."""

    def model(name: str, seconds: float) -> Strategy:
        return Strategy(name, "draft", target, ModelDraft(target, [Given(lambda rows: seconds)]))

    found = Routes(
        [
            Strategy("none", AUTOREGRESSIVE, target, FreeDraft()),
            *(model(name, seconds) for name, (seconds, _, _) in drafts.items()),
        ],
        live=live,
    )
    found.estimates = [None, *(Certain(usual, better) for _, usual, better in drafts.values())]
    return found


class Certain(Estimate):
    """Expects the same of every prompt."""

    def __init__(self, usual: Expected, hoped: Expected) -> None:
        super().__init__(prior(0.5, 1.0, 1.0))
        self.both = usual, hoped

    def expected(self, numbers: Seq[float]) -> tuple[Expected, Expected]:
        return self.both


def sure(seconds: float, accepted: float, nodes: float = 4.0) -> tuple[float, Expected, Expected]:
    return seconds, Expected(1.0, nodes, accepted), Expected(1.0, nodes, accepted)


def best(known: Routes, batch: int = 1) -> str:
    odds = known.odds(OPEN, batch, 16, 0.0)
    return known.strategies[odds.index(1.0)].name


def test_the_smaller_draft_model_is_not_chosen_where_it_is_slower_end_to_end() -> None:
    """The scaling paradox: a quarter of the time a token, and a third as many accepted."""
    target = Given(lambda rows: 1.0 + 0.02 * rows)
    assert best(routes(target, {"small": sure(0.05, 0.9), "large": sure(0.2, 2.7)})) == "large"
    assert best(routes(target, {"small": sure(0.05, 2.4), "large": sure(0.2, 2.7)})) == "small"
    assert best(routes(target, {"small": sure(0.05, 0.1), "large": sure(0.2, 0.4)})) == "none"


def test_in_batches_whose_rows_cost_time_nothing_is_drafted() -> None:
    known = routes(Given(lambda rows: max(1.0, rows / 5)), {"draft": sure(0.05, 2.0)})
    assert best(known, 1) == "draft" and best(known, 8) == "none"


def test_a_forecast_is_of_rounds_with_a_draft_and_without() -> None:
    target = Given(lambda rows: 1.0 + 0.1 * rows)
    one = Strategy("draft", "draft", target, ModelDraft(target, [Given(lambda rows: 0.11)]))
    figures, width = Expected(0.25, 6.0, 1.5), 2.0
    found = one.forecast(figures, width, 1, 16, live=True)
    [verified] = Predictor(target).relative_costs([6], 1, 16, live=True)
    assert verified > 1.7 / 1.1
    assert found.tokens == pytest.approx(1.0 + 0.25 * 1.5)
    assert found.steps == pytest.approx(0.75 + 0.25 * (verified + 3 * 0.1))
    timed = one.forecast(figures, width, 1, 16, live=True, draft_seconds=0.55)
    assert timed.steps == pytest.approx(0.75 + 0.25 * (verified + 0.5))
    four = one.forecast(figures, width, 4, 16, live=True)
    assert four.steps == pytest.approx(
        0.75 + 0.25 * (Predictor(target).relative_costs([24], 4, 16, live=True)[0] + 3 * 0.11 / 1.4)
    )


def test_the_clock_of_drafts_is_read_for_greedy_requests_alone() -> None:
    for live, chosen in ((True, "none"), (False, "draft")):
        known = routes(Given(lambda rows: 1.0 + 0.02 * rows), {"draft": sure(0.05, 2.7)}, live=live)
        assert best(known) == "draft"
        for _ in range(9):
            known.clocks[1].read(1, 5.0)
        assert best(known) == chosen


def test_only_what_may_be_better_is_explored() -> None:
    def unsure(usual: float, hoped: float) -> tuple[float, Expected, Expected]:
        return 0.1, Expected(1.0, 4.0, usual), Expected(1.0, 4.0, hoped)

    known = routes(Given(lambda rows: 1.0 + 0.02 * rows), {"a": unsure(3, 3), "b": unsure(2, 4), "c": unsure(1, 2)})
    assert known.odds(OPEN, 1, 16, 0.1) == pytest.approx([0.0, 0.9, 0.1, 0.0])


def test_priors_are_measured_for_these_features_and_expect_copying_where_a_text_is_given() -> None:
    known = priors()
    assert set(known) == {"lookup", "head", "draft", "other"}
    given = dict.fromkeys(FEATURES, 0.0) | {"any": 1.0, "length": 0.85, "repeated": 0.5, "given": 0.9, "grounded": 1.0}
    lookup = Estimate(known["lookup"])
    assert lookup.expected(list(given.values()))[0].drafting > lookup.expected([1.0, 0.4] + [0.0] * 7)[0].drafting


# ------------------------------------------------------------------------------------------------------ drafter


@dataclass(slots=True)
class Watched(DraftState):
    prompt: tuple[int, ...]
    observed: int = 0
    ended: bool = False


class Watching(Drafter[Watched]):
    """Drafts one token in every round, and remembers who asked."""

    def __init__(self, token: int) -> None:
        self.token, self.seen = token, list[Watched]()

    def begin(self, sequence: Sequence) -> Watched:
        self.seen.append(Watched(sequence, tuple(sequence.tokens)))
        return self.seen[-1]

    def propose(self, state: Watched, budget: Budget) -> TokenTree:
        return TokenTree.chain([self.token])

    def observe(self, state: Watched, verdict: Verdict) -> None:
        state.observed += 1

    def end(self, state: Watched) -> None:
        state.ended = True


class ByFirstToken(Routes):
    """Chooses by the prompt's length alone, whose number the features hold: an even number of tokens has part 0."""

    def odds(self, numbers: Seq[float], batch: int, context: int, explore: float) -> list[float]:
        self.batches = [*getattr(self, "batches", []), batch]
        even = round(2 ** (13 * numbers[1]) - 1) % 2 == 0
        return [float(even), float(not even)]


def by_live(make: type[Routes], strategies: Seq[Strategy]) -> Callable[[bool], Routes]:
    return lambda live: make(strategies, live=live)


def routed(parts: Seq[Drafter[Any]], make: type[Routes] = ByFirstToken) -> tuple[Method, Routed]:
    target = TableTarget(3, seed=1)
    two = [Strategy(f"p{at}", "lookup", target.costs, FreeDraft()) for at in range(len(parts))]
    drafter = Routed(parts, [one.name for one in two], target, PromptFeatures(None), by_live(make, two), 0.0, 4)
    return Method(
        "routed", drafter, default_rule(drafter.proposal), CombinedController([Fixed(1)] * len(parts))
    ), drafter


def answered(method: Method, prompts: Seq[Seq[int]], length: int = 6, **more: Any) -> list[Any]:
    decoder = Decoder(TableTarget(3, seed=1))
    running = [decoder.submit(Request(tuple(one), method, SamplingParams(), length, **more)) for one in prompts]
    decoder.run()
    return running


class Reading(Watching):
    """Reads hidden states, and looks at whose."""

    aux_hidden_state_layers = (0,)

    def observed_layers(self, states: Seq[Watched], idle: int) -> Seq[int]:
        assert states and all(isinstance(one, Watched) for one in states)
        return self.aux_hidden_state_layers


def test_a_part_that_was_chosen_for_nobody_reads_no_hidden_states() -> None:
    parts = Watching(0), Reading(1)
    method, _ = routed(parts)
    for prompts in ([(1, 2)], [(1, 2), (2, 1), (0, 0, 1)]):
        assert all(one.error is None and len(one.tokens) == 6 for one in answered(method, prompts))
    assert len(parts[1].seen) == 1


def test_only_the_chosen_part_reads_drafts_and_learns() -> None:
    parts = Watching(0), Watching(1)
    method, drafter = routed(parts)
    first, second = answered(method, [(0, 1), (1, 1, 0)])
    assert [one.prompt for one in parts[0].seen] == [(0, 1)] and [one.prompt for one in parts[1].seen] == [(1, 1, 0)]
    assert all(one.ended and one.observed for part in parts for one in part.seen)
    assert 1 < first.metrics.parts["p0"] <= first.metrics.rounds and first.metrics.parts["p1"] == 0
    assert second.metrics.parts["p0"] == 0 < second.metrics.parts["p1"]
    for one in (first, second):
        assert one.tokens == answered(build("none", tiny_context(3, 1)), [one.request.prompt])[0].tokens
    assert drafter._live == 0 and not drafter._undecided


def test_requests_that_join_together_are_chosen_for_as_a_batch() -> None:
    method, drafter = routed((Watching(0), Watching(1)))
    answered(method, [(0, 1)] * 5)
    found: list[int] = drafter.routes.batches  # type: ignore[attr-defined]
    assert found[-5:] == [8] * 5, "the fifth request makes the others choose again"


def test_what_a_request_has_shown_is_learned_when_it_ends() -> None:
    class Shown(ByFirstToken):
        pass

    method, drafter = routed((Watching(0), Watching(1)), Shown)
    seen: list[tuple[RequestMetrics, int]] = []
    for known in drafter.routes.estimates:
        assert known is not None
        known.learn = lambda numbers, shown, levels: seen.append((shown, levels))  # type: ignore[method-assign]
    [one] = answered(method, [(0, 1)])
    [(shown, levels)] = seen
    of = ("rounds", "drafting", "drafted", "accepted", "judged")
    assert [getattr(shown, name) for name in of] == [getattr(one.metrics, name) for name in of]
    assert levels == one.metrics.drafted


def test_greedy_requests_learn_together_and_sampled_ones_within_their_namespace() -> None:
    drafter = build("aio", tiny_context(3, 0), TINY).drafter
    assert isinstance(drafter, Routed)

    def opened(temperature: float, namespace: str) -> Routes:
        target = TableTarget(3)
        sequence = target.sequence((0, 1), SamplingParams(temperature=temperature, seed=1), namespace=namespace)
        return drafter.opened(sequence, []).routes

    assert opened(0.0, "a") is opened(0.0, "b") is opened(0.0, "")
    assert opened(1.0, "a") is opened(1.0, "a") and opened(1.0, "a") is not opened(1.0, "b")
    assert opened(1.0, "") is not opened(1.0, "") and opened(1.0, "a") is not opened(0.0, "a")


def test_a_request_that_leaves_before_it_is_chosen_for_leaves_nothing() -> None:
    method, drafter = routed((Watching(0), Watching(1)))
    decoder = Decoder(TableTarget(3, seed=1))
    one = decoder.submit(Request((0, 1), method, SamplingParams(), 4))
    one.cancel()
    decoder.run()
    state = drafter.begin(TableTarget(3).sequence((0, 1), SamplingParams()))
    drafter.end(state)
    assert drafter._live == 0 and not drafter._undecided


def test_what_fails_to_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Watching):
        def begin(self, sequence: Sequence) -> Watched:
            raise BadInput("no")

    method, _ = routed((Failing(0), Watching(1)))
    with pytest.raises(BadInput, match="no"):
        answered(method, [(0, 1), (1, 1, 0)])
    interrupted: Any = KeyboardInterrupt

    def odds(*_: Any) -> list[float]:
        raise interrupted

    _, other = routed((Watching(0), Watching(1)))
    monkeypatch.setattr(other.routes, "odds", odds)
    with pytest.raises(KeyboardInterrupt):
        other.begin(TableTarget(3).sequence((0, 1), SamplingParams()))
    assert other._live == 0 and not other._undecided


# ---------------------------------------------------------------------------------------------------- lossless


class Even(Routes):
    """Every strategy as likely as any other: all are certified together."""

    def odds(self, numbers: Seq[float], batch: int, context: int, explore: float) -> list[float]:
        return [1.0 / len(self.strategies)] * len(self.strategies)


class LooksAtTheDraft(Routed):
    """Leaves the chosen part for a step without a draft where its first token is not the one it hopes for."""

    def propose_batch(self, states: Seq[RequestRoute], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = super().propose_batch(states, budgets)
        return [tree if tree.tokens and tree.tokens[0] == 0 else TokenTree() for tree in trees]


def planted(kind: type[Routed], make: type[Routes]) -> Callable[[Context], Method]:
    def made(context: Context) -> Method:
        whole = build("aio", context, TINY)
        assert isinstance(whole.drafter, Routed)
        known, honest = whole.drafter.routes.strategies, whole.drafter
        features, names = PromptFeatures(context.tokenizer), honest.names
        return replace(whole, drafter=kind(honest.parts, names, context.target, features, by_live(make, known), 1.0, 4))

    return made


def cells(*samplings: str) -> list[Setting]:
    found = [Setting(name, 3, 3, PROMPTS[at % 2], NEIGHBOURS[at % 2], 8 + at) for at, name in enumerate(samplings)]
    return [*found, *(Setting("top-k 2", 3, 2, PROMPTS[0], one, 5) for one in SAME_NAMESPACE)]


def test_a_mixture_of_all_strategies_is_exact() -> None:
    where = cells("temperature 1", "top-p 0.8", "user's processor", "greedy, penalties")
    certificate = certify_exact("aio", planted(Routed, Even), where)
    assert certificate.lossless is True and certificate.p_value is None, certificate


def test_a_router_that_looks_at_what_was_drawn_is_caught() -> None:
    certificate = certify_exact("looks", planted(LooksAtTheDraft, Even), cells("temperature 1"))
    assert certificate.lossless is False, certificate


@pytest.mark.parametrize("strategies", [("pld", "none"), ("draft-model#one", "draft-model#two", "eagle3"), ("auto",)])
def test_every_choice_of_strategies_is_exact(strategies: tuple[str, ...]) -> None:
    settings = {one: {**find(one).tiny, **TINY["settings"].get(find(one).name, {})} for one in strategies}
    made = partial(build, "aio", settings={"strategies": strategies, "settings": settings, "explore": 0.5})
    certificate = certify_exact("aio", made, cells("temperature 1", "min-p 0.2")[:2])
    assert certificate.lossless is True, certificate


# ------------------------------------------------------------------------------------------------------ methods


def test_strategies_are_those_that_there_are_weights_for() -> None:
    target = TableTarget(3)
    models = {name: TableTarget(3, random_table(3, at)) for at, name in enumerate(("small", "large"))}
    none = Context(target)
    assert offered(none, AioSettings.model_validate({})) == ("none", "sam")
    one = Context(target, Bindings(draft_models({"small": models["small"]})))
    assert offered(one, AioSettings.model_validate({})) == ("none", "sam", "draft-model")
    two = Context(target, Bindings(draft_models(models)))
    assert offered(two, AioSettings.model_validate({})) == ("none", "sam", "draft-model#small", "draft-model#large")
    built = build("aio", two)
    assert built.drafts_with == ("draft model 'small'", "draft model 'large'") and built.lossless


def test_the_rule_is_that_of_the_only_kind_of_draft_that_samples() -> None:
    context = tiny_context(3, 0)
    for strategies, like in (
        (("none", "pld", "eagle3"), "eagle3"),
        (("sam", "draft-model"), "draft-model"),
        (("pld",), "pld"),
    ):
        assert build("aio", context, {"strategies": strategies}).rule.name == build(like, context).rule.name
    both = build("aio", context, {"strategies": ("eagle3", "draft-model")})
    assert both.rule.name == default_rule(both.drafter.proposal).name


def test_wrong_settings_are_refused_in_one_line() -> None:
    context = tiny_context(3, 0)
    for settings, said in (
        ({"strategies": ["sam", "sam"]}, "'sam' is a part twice"),
        ({"strategies": ["nobody"]}, "nobody"),
        ({"strategies": ["sam"], "settings": {"pld": {}}}, "settings are given for 'pld'"),
        ({"settings": {"pld": {}}, "strategies": None}, "none of aio's strategies"),
        ({"explore": 2.0}, "explore"),
    ):
        with pytest.raises(BadInput, match=said):
            build("aio", replace(context, bindings=Bindings()), settings)


def test_a_seed_repeats_a_sampled_answer_whatever_greedy_requests_have_shown(smollm2: Model) -> None:
    def ask(**more: Any) -> str:
        asked: dict[str, Any] = {"method": "aio", "max_new_tokens": 16, "temperature": 0.9, "seed": 5} | more
        return str(smollm2.generate("Name three rivers of France.", **asked).text)

    first = ask()
    for _ in range(3):
        ask(temperature=0.0)
    assert ask() == first


def test_on_a_real_model_answers_are_the_target_s_and_one_strategy_drafts(smollm2: Model) -> None:
    prompts = ["Repeat this sentence twice: The ship sailed past the old harbour wall.", "Why is the sky blue?"]
    for prompt in prompts:
        found = smollm2.generate(prompt, method="aio", max_new_tokens=24)
        assert found.text == smollm2.generate(prompt, method="none", max_new_tokens=24).text
        drafted = {name for name, share in found.metrics["drafting_parts"].items() if share}
        assert set(found.metrics["drafting_parts"]) == {"none", "sam", "eagle3"} and len(drafted) <= 1


def test_batches_of_all_strategies_on_a_toy_target_are_plain_decoding() -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(2, 9))] for _ in range(6)]
    context = tiny_context(3, 2)
    found = []
    for method in (planted(Routed, Even)(context), build("none", context)):
        decoder = Decoder(context.target)
        running = [decoder.submit(Request(tuple(one), method, max_new_tokens=20)) for one in prompts]
        decoder.run()
        found.append(([one.tokens for one in running], sum(one.metrics.accepted for one in running)))
    (ours, accepted), (plain, _) = found
    assert ours == plain and accepted > 3


def test_a_round_that_rests_reads_no_draft_s_time_again() -> None:
    method, drafter = routed([Watching(0), Watching(1)])
    answered(method, [(1, 2)], 1)
    sequence = TableTarget(3, seed=1).sequence([1, 2])
    state = drafter.begin(sequence)
    state.drafted_in = 1.0
    scores = TableTarget(3, seed=1).score([(sequence, TokenTree())])
    drafter.observe_batch([state], [Verdict((), 1, scores[0], (1,))])
    assert state.drafted_in is None


def test_greedy_answers_that_must_repeat_take_a_route_that_no_clock_decides() -> None:
    """Under a lossy rule what is drafted decides even a greedy answer."""
    _, drafter = routed([Watching(0), Watching(1)])
    target = TableTarget(3, seed=1)
    usual, lossy = target.sequence([1, 2]), target.sequence([1, 2])
    lossy.depends_on_drafts = True
    assert drafter.opened(usual, [None, None]).routes is drafter.routes
    assert drafter.opened(lossy, [None, None]).routes is not drafter.routes
