"""Bandits and routers: rewards, exact laws, and that the choice learns what it should."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.acceptance.rejection import RecursiveRejection
from outpace.certify.exact import certify_exact, tiny_context
from outpace.controllers.bandit import Bandit, Policy
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.clusters import Clusters
from outpace.drafting.rewards import Pull, Reward, divergence_reward, length_reward, pace_reward
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods import registry
from outpace.methods.combination.metasd import Switch
from outpace.methods.combination.taskspec import TaskSwitch
from outpace.methods.registry import Context, build
from outpace.targets.base import Sequence
from outpace.targets.table import TableTarget, random_table
from test_combined import FEW

POLICIES: tuple[Policy, ...] = ("ucb", "thompson", "exp3")


# ------------------------------------------------------------------------------------------------------ bandits


@pytest.mark.parametrize("policy", POLICIES)
def test_the_best_arm_is_found(policy: Policy) -> None:
    rng, bandit = random.Random(0), Bandit(3, policy)
    pulls: Counter[int] = Counter()
    for _ in range(1500):
        p = bandit.probabilities()
        assert float(p.sum()) == pytest.approx(1.0)
        arm = rng.choices(range(3), p.tolist())[0]
        pulls[arm] += 1
        bandit.learn(arm, float(rng.random() < (0.3, 0.7, 0.4)[arm]), float(p[arm]))
    assert pulls[1] > 900


@pytest.mark.parametrize("policy", POLICIES)
def test_only_a_discounting_bandit_follows_rewards_that_turn(policy: Policy) -> None:
    def late_pulls(discount: float) -> int:
        rng, bandit = random.Random(1), Bandit(2, policy, discount, 0.2)
        late = 0
        for round_ in range(1600):
            before = round_ < 1000
            p = bandit.probabilities()
            arm = rng.choices(range(2), p.tolist())[0]
            late += round_ >= 1100 and arm == 1
            bandit.learn(arm, 0.5 if arm == 0 else 0.1 if before else 0.9, float(p[arm]))
        return late

    assert late_pulls(0.97) > 300
    assert late_pulls(0.97) > 1.2 * late_pulls(1.0)


def test_thompson_choices_are_how_often_a_sampled_rate_is_the_largest() -> None:
    bandit = Bandit(3, "thompson")
    bandit.rewards, bandit.pulls = [2.0, 5.5, 1.0], [4.0, 8.0, 1.0]
    generator = torch.distributions.Beta(torch.tensor([3.0, 6.5, 2.0]), torch.tensor([3.0, 3.5, 1.0]))
    torch.manual_seed(0)
    wins = generator.sample((200_000,)).argmax(1).bincount().double() / 200_000
    assert (bandit.probabilities() - wins).abs().max() < 0.005


# ------------------------------------------------------------------------------------------------------ rewards


def pulled(tree: TokenTree, at: int = 2, depth: int = 4, **more: Any) -> Pull:
    return Pull(0, 1.0, tree, at, Budget(depth, **more))


def test_rewards_by_their_definitions() -> None:
    target = TableTarget(4, seed=1)
    sequence = target.sequence([0, 1], SamplingParams(temperature=1.0))
    row = torch.tensor([0.1, 0.2, 0.3, 0.4])
    tree = TokenTree.chain([2, 3], [QRow(row), QRow(row)])
    scores = target.score([(sequence, tree)])[0]
    overlap = [float(torch.minimum(row, scores.p(node)).sum()) for node in (-1, 0)]
    sequence.tokens.extend([2, 1])
    assert length_reward(pulled(tree), sequence) == 1 / 4
    assert divergence_reward(pulled(tree), sequence, scores) == pytest.approx(sum(overlap) / 4)
    certain = TokenTree.chain([2])
    assert divergence_reward(pulled(certain), sequence, scores) == pytest.approx(float(scores.p(-1)[2]) / 4)
    free = pace_reward(pulled(tree, relative_costs=(1.0, 1.0, 1.0, 1.0, 1.0)), sequence)
    assert free == pytest.approx(2 / 5)
    dear = pace_reward(replace(pulled(tree, relative_costs=(1.0, 1.0, 2.0, 2.0, 2.0)), steps=2.0), sequence)
    assert dear == pytest.approx((2 / 4) / (5 / 2))


def test_draws_that_live_on_are_not_looked_at() -> None:
    """The reward of a draft whose rest is carried on must be the same whatever that rest is."""
    target = TableTarget(4, seed=1)
    sequence = target.sequence([0, 1], SamplingParams(temperature=1.0))
    values = []
    for later in (0, 1, 2):
        row = torch.full((4,), 0.25)
        tree = TokenTree.chain([2, 3, later], [QRow(row)] * 3)
        scores = target.score([(sequence, tree)])[0]
        after = target.sequence([0, 1], SamplingParams(temperature=1.0))
        after.tokens.extend([1])
        values.append(divergence_reward(replace(pulled(tree, depth=3), keeps_unverified_draws=True), after, scores))
    assert values[0] == values[1] == values[2] > 0.0


# ------------------------------------------------------------------------------------------------------- switch


class Constant(Drafter[None]):
    """Drafts one token over and over."""

    def __init__(self, token: int) -> None:
        self.token = token

    def begin(self, sequence: Sequence) -> None:
        return None

    def propose(self, state: None, budget: Budget) -> TokenTree:
        return TokenTree.chain([self.token] * budget.depth)


def loop_target(vocab: int) -> TableTarget:
    """Repeats the last token."""
    return TableTarget(vocab, lambda path: 20.0 * torch.nn.functional.one_hot(torch.tensor(path[-1]), vocab).float())


def decode(target: TableTarget, method: Method, prompt: Seq[int], tokens: int, namespace: str = "") -> Generation:
    decoder = Decoder(target)
    generation = decoder.submit(Request(tuple(prompt), method, max_new_tokens=tokens, namespace=namespace))
    decoder.run()
    return generation


def switch(parts: Seq[Drafter[Any]], target: TableTarget, policy: Policy = "ucb", most: int = 64) -> Method:
    names = [str(index) for index in range(len(parts))]
    drafter = Switch(parts, names, target, lambda: Bandit(len(parts), policy, 1.0, 0.3), most=most)
    return Method("switch", drafter, RecursiveRejection(), CombinedController([Fixed(4)] * len(parts)))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_part_that_is_right_comes_to_draft(policy: Policy) -> None:
    target = loop_target(6)
    method = switch([Constant(1), Constant(2), Constant(3)], target, policy)
    rounds = decode(target, method, [0, 3], 200, "n").metrics.rounds
    alone = decode(target, switch([Constant(1)], target), [0, 3], 200).metrics.rounds
    assert alone == 200 and rounds < 110


def test_what_was_learned_stays_in_its_namespace() -> None:
    target = loop_target(6)
    method = switch([Constant(1), Constant(3)], target)
    first = decode(target, method, [0, 3], 30, "a").metrics.rounds
    assert decode(target, method, [0, 3], 30, "b").metrics.rounds == first
    assert decode(target, method, [0, 3], 30, "").metrics.rounds == first
    assert decode(target, method, [0, 3], 30, "a").metrics.rounds < first


def test_greedy_and_sampled_requests_do_not_share_statistics() -> None:
    target = loop_target(6)
    method = switch([Constant(1), Constant(3)], target)
    decode(target, method, [0, 3], 30, "a")
    drafter = method.drafter
    assert isinstance(drafter, Switch)
    greedy = drafter.memory.open(target.sequence([0], namespace="a"))
    sampled = drafter.memory.open(target.sequence([0], SamplingParams(temperature=1.0), namespace="a"))
    assert sum(greedy.pulls) > 0 == sum(sampled.pulls)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reward", ["length", "divergence", "pace"])
def test_a_switch_is_exact(policy: Policy, reward: str) -> None:
    settings = {
        "parts": ("pld", "draft-model"),
        "settings": {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 1}},
        "policy": policy,
        "reward": reward,
    }
    cells = FEW[2:] if policy == "ucb" else FEW[:1]
    certificate = certify_exact("metasd", lambda context: build("metasd", context, settings), cells)
    assert certificate.lossless, certificate.verdict


def test_measured_times_never_reach_a_sampled_request(monkeypatch: pytest.MonkeyPatch) -> None:
    context = tiny_context(4, 3)
    settings = {"parts": ("pld", "draft-model"), "reward": "pace", "policy": "thompson"}

    def drafts(slow: float) -> list[Any]:
        clock = iter(range(10**6))
        monkeypatch.setattr("outpace.drafting.rewarded.perf_counter", lambda: slow * next(clock) ** 2)
        method = build("metasd", context, settings)
        decoder = Decoder(context.target)
        params = SamplingParams(temperature=1.0)
        generation = decoder.submit(Request((0, 1, 0, 1), method, params, max_new_tokens=40, trace=True))
        decoder.run()
        return [one.tree.tokens for one in generation.rounds]

    assert drafts(1.0) == drafts(1e-9)


# ----------------------------------------------------------------------------------------------------- taskspec


def workload(count: int) -> list[list[int]]:
    """Prompts of two kinds, told apart by the words they hold; the answer repeats the last token, 1 or 2."""
    rng = random.Random(5)
    out = []
    for index in range(count):
        words = range(10, 30) if index % 2 else range(30, 50)
        out.append([*rng.choices(words, k=12), 3, 4, 5, 1 if index % 2 else 2])
    return out


def router(target: TableTarget, clusters: int, likeness: float = 0.2) -> Method:
    parts = [Constant(1), Constant(2)]

    def make() -> Clusters[Any]:
        return Clusters(lambda: Bandit(2, "ucb", 1.0, 0.1), clusters, likeness)

    drafter = TaskSwitch(parts, ["one", "two"], target, make)
    return Method("taskspec", drafter, RecursiveRejection(), CombinedController([Fixed(4), Fixed(4)]))


def test_each_kind_of_prompt_comes_to_its_part() -> None:
    target = loop_target(50)

    def late_rounds(clusters: int, namespace: str = "n") -> int:
        method = router(target, clusters)
        rounds = [decode(target, method, prompt, 10, namespace).metrics.rounds for prompt in workload(30)]
        return sum(rounds[10:])

    assert late_rounds(4) == 20 * 2, "every prompt after the first few is drafted by the part that is right"
    assert late_rounds(1) > 1.5 * 20 * 2, "one kind for all prompts: no routing"
    assert late_rounds(4, "") > 1.5 * 20 * 2, "without a namespace there is no past"


def test_clusters_are_bounded_and_the_least_used_leaves() -> None:
    clusters: Clusters[list[int]] = Clusters(list, 2, 0.3)
    kinds = [[base + one for one in range(8)] for base in (0, 100, 200)]
    first = clusters.assign(kinds[0])
    second = clusters.assign(kinds[1])
    assert clusters.assign(kinds[0][:6]) is first
    clusters.assign(kinds[2])
    assert len(clusters) == 2 and clusters.evicted == 1
    assert clusters.assign(kinds[0]) is first
    assert clusters.assign(kinds[1]) is not second


class DraftVocabulary:
    """Token i reads as word i."""

    def decode(self, ids: Seq[int]) -> str:
        return " ".join(["translate", "sum", "summary", "Sum"][token] for token in ids)


def test_the_users_rules_come_first() -> None:
    target = TableTarget(4, random_table(4, 1))
    context = Context(target, tokenizer=DraftVocabulary())  # type: ignore[arg-type]
    settings = {"parts": ["sam", "pld", "llma"], "rules": {"sum": "llma", "translate": "pld"}}
    drafter = build("taskspec", context, settings).drafter
    assert isinstance(drafter, TaskSwitch)
    routes = []
    for prompt in ([0], [2], [2, 3], [0, 1]):
        sequence = target.sequence(prompt)
        routes.append(drafter.begin(sequence).route[0])
    assert routes == [1, 0, 2, 2]
    with pytest.raises(BadInput, match="none of the parts"):
        build("taskspec", context, {"parts": ["sam"], "rules": {"sum": "pld"}})
    with pytest.raises(BadInput, match="tokenizer"):
        build("taskspec", Context(target), settings)


class Kinds:
    """A text of one kind for ``each`` tokens, then of the other: tokens from 10 on, or from 30 on, eight by turns."""

    def __init__(self, each: int) -> None:
        self.each, self.vocab = each, 50

    def __call__(self, path: tuple[int, ...]) -> Tensor:
        base = 10 if (len(path) // self.each) % 2 == 0 else 30
        row = torch.zeros(self.vocab)
        row[base + len(path) % 8] = 9.0
        return row


class Successors(Drafter[DraftState]):
    """Drafts the next four tokens of a text of one kind."""

    def __init__(self, base: int) -> None:
        self.base = base

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        length = len(state.sequence.tokens)
        return TokenTree.chain([self.base + (length + ahead) % 8 for ahead in range(min(4, budget.depth))])


def kinds_router(target: TableTarget, window: int, policy: Policy = "ucb", reward: Reward = "length") -> Method:
    def make() -> Clusters[Any]:
        return Clusters(lambda: Bandit(2, policy, 1.0, 0.1), 8, 0.2)

    drafter = TaskSwitch([Successors(10), Successors(30)], ["one", "two"], target, make, reward, window=window)
    return Method("taskspec", drafter, RecursiveRejection(), CombinedController([Fixed(4), Fixed(4)]))


def test_the_route_changes_where_the_text_changes_its_kind() -> None:
    """After 64 tokens the text is of another kind; a second text of both kinds is drafted right all along."""
    target = TableTarget(50, Kinds(64))
    plain = decode(target, build("none", Context(target)), [10], 127).tokens

    def second(window: int) -> tuple[list[int], int]:
        method = kinds_router(target, window)
        for _ in range(3):
            decode(target, method, [10], 127, "n")
        decoder, routes = Decoder(target), list[int]()
        one = decoder.submit(Request((10,), method, SamplingParams(), max_new_tokens=127, namespace="n"))
        while decoder.step():
            if one.finish_reason is None:
                routes.append(one.draft_state.route[0])
        assert one.tokens == plain
        return routes, one.metrics.accepted

    routes, accepted = second(16)
    assert routes[0] == 0 and routes[-1] == 1 and sorted(routes) == routes
    stays, less = second(0)
    assert len(set(stays)) == 1 and accepted > 1.5 * less


def test_routes_of_sampled_requests_depend_on_tokens_and_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableTarget(50, Kinds(24))
    found = []
    for seed in (1, 2):
        rng = random.Random(seed)
        monkeypatch.setattr("outpace.drafting.rewarded.perf_counter", lambda rng=rng: rng.random() * 100)
        method = kinds_router(target, 8, "thompson", "pace")
        decoder, routes = Decoder(target), list[tuple[int, tuple[int, float]]]()
        params = SamplingParams(temperature=1.0, seed=5)
        one = decoder.submit(Request((10,), method, params, max_new_tokens=150))
        while decoder.step():
            if one.finish_reason is None:
                routes.append((one.draft_state.routed, one.draft_state.route))
        found.append((one.tokens, routes))
    assert found[0] == found[1] and len({route for _, (route, _) in found[0][1]}) == 2


def test_rules_follow_the_text_too() -> None:
    """A window that holds a rule's word goes to its part; another window goes by the prompt's rule."""
    target = TableTarget(50, Kinds(64))
    words = {10: 0, 30: 1}

    def rule(tokens: Seq[int]) -> int | None:
        return next((part for word, part in words.items() if word in tokens), None)

    method = kinds_router(target, 16)
    assert isinstance(method.drafter, TaskSwitch)
    method.drafter.rule = rule
    decoder, routes = Decoder(target), list[int]()
    one = decoder.submit(Request((10,), method, SamplingParams(), max_new_tokens=127))
    while decoder.step():
        if one.finish_reason is None:
            routes.append(one.draft_state.route[0])
    assert set(routes) == {0, 1} and sorted(routes) == routes
    assert one.metrics.rounds < 45


@pytest.mark.parametrize("policy", POLICIES)
def test_a_router_is_exact(policy: Policy) -> None:
    settings = {**registry.find("taskspec").tiny, "policy": policy}
    certificate = certify_exact("taskspec", lambda context: build("taskspec", context, settings), FEW[2:])
    assert certificate.lossless, certificate.verdict
