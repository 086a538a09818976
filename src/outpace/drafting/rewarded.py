"""Rewarded: one part drafts a round; what becomes of its draft is its reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

from outpace.acceptance.base import Verdict
from outpace.controllers.bandit import Bandit
from outpace.controllers.base import Budget
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.combination import CombinedState, OneAtATime
from outpace.drafting.rewards import Pull, Reward, divergence_reward, length_reward, pace_reward
from outpace.targets.base import Sequence, Target


@dataclass(slots=True)
class RewardedState(CombinedState):
    """``bandit``: what is known for this request. ``pull``: the draft that waits for its verdict."""

    bandit: Bandit = field(kw_only=True)
    pull: Pull | None = None


R = TypeVar("R", bound=RewardedState)


class Rewarded(OneAtATime[R], ABC):
    """One part a round, chosen before anything is drafted; what became of its draft is its reward.

    ``target`` is what draft times are compared with.
    """

    def __init__(self, parts: Seq[Drafter[Any]], names: Seq[str], target: Target, reward: Reward = "length") -> None:
        super().__init__(parts, names)
        self.target = target
        self.reward = reward
        self.learns_from_rejected |= reward == "divergence"

    @abstractmethod
    def choose(self, state: R) -> tuple[int, float]:
        """Who drafts, and the probability with which it was chosen."""

    def propose_batch(self, states: Seq[R], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = [TokenTree() for _ in states]
        chosen: dict[int, list[tuple[int, float]]] = {}
        for at, state in enumerate(states):
            arm, probability = self.choose(state)
            state.drafting = arm
            chosen.setdefault(arm, []).append((at, probability))
        for arm, members in chosen.items():
            began = perf_counter()
            drafted = self.ask(arm, [states[at] for at, _ in members], [budgets[at] for at, _ in members])
            spent = perf_counter() - began
            keeps = self.parts[arm].proposal.keeps_unverified_draws
            for (at, probability), tree in zip(members, drafted, strict=True):
                trees[at], sequence = tree, states[at].sequence
                states[at].rounds[self.names[arm]] += len(tree) > 0
                pull = Pull(arm, probability, tree, len(sequence.tokens), budgets[at], keeps_unverified_draws=keeps)
                if self.reward == "pace" and sequence.params.greedy and sequence.timed:
                    pull.steps = spent / len(members) / self.target.costs.seconds(1)
                states[at].pull = pull
        return trees

    def observe_batch(self, states: Seq[R], verdicts: Seq[Verdict]) -> None:
        for state, verdict in zip(states, verdicts, strict=True):
            pull, state.pull = state.pull, None
            if pull is not None:
                state.bandit.learn(pull.arm, self._reward(pull, state.sequence, verdict), pull.probability)
        super().observe_batch(states, verdicts)

    def _reward(self, pull: Pull, sequence: Sequence, verdict: Verdict) -> float:
        if self.reward == "pace":
            return pace_reward(pull, sequence)
        if self.reward == "divergence" and not sequence.params.greedy:
            return divergence_reward(pull, sequence, verdict.scores)
        return length_reward(pull, sequence)

    def draw(self, sequence: Sequence, bandit: Bandit) -> tuple[int, float]:
        """An arm as the bandit wants it pulled, from a stream that nobody else draws from."""
        probabilities = bandit.probabilities()
        chance = sequence.chance.at(len(sequence.tokens), f"{self.purpose}/choice")
        arm = chance.categorical(probabilities)
        return arm, float(probabilities[arm])
