"""Rewarded: one part drafts a round; what becomes of its draft is its reward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from time import perf_counter

from outpace.acceptance.base import Verdict
from outpace.controllers.bandit import Bandit
from outpace.controllers.base import Budget
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.combination import OneAtATime
from outpace.drafting.rewards import Pull, Reward, divergence_reward, length_reward, pace_reward
from outpace.targets.base import Sequence, Target, TreeScores


class Rewarded(OneAtATime):
    """One part a round, chosen before anything is drafted; what became of its draft is its reward.

    ``target`` is what draft times are compared with.
    """

    def __init__(self, parts: Seq[Drafter], names: Seq[str], target: Target, reward: Reward = "length") -> None:
        super().__init__(parts, names)
        self.target = target
        self.reward = reward
        self.learns_from_rejected |= reward == "divergence"
        self._pulls: dict[Sequence, Pull] = {}

    @abstractmethod
    def bandit(self, sequence: Sequence) -> Bandit:
        """What is known for this request, and learns from it."""

    @abstractmethod
    def choose(self, sequence: Sequence) -> tuple[int, float]:
        """Who drafts, and the probability with which it was chosen."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        trees = [TokenTree() for _ in sequences]
        chosen: dict[int, list[tuple[int, float]]] = {}
        for at, sequence in enumerate(sequences):
            arm, probability = self.choose(sequence)
            self._drafting[sequence] = arm
            chosen.setdefault(arm, []).append((at, probability))
        for arm, members in chosen.items():
            began = perf_counter()
            drafted = self.ask(arm, [sequences[at] for at, _ in members], [budgets[at] for at, _ in members])
            spent = perf_counter() - began
            for (at, probability), tree in zip(members, drafted, strict=True):
                trees[at], sequence = tree, sequences[at]
                carried = self.parts[arm].proposal.keeps_unverified_draws
                pull = Pull(arm, probability, tree, len(sequence.tokens), budgets[at], keeps_unverified_draws=carried)
                if self.reward == "pace" and sequence.params.greedy:
                    pull.steps = spent / len(members) / self.target.costs.seconds(1)
                self._pulls[sequence] = pull
        return trees

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence, scored in zip(sequences, scores, strict=True):
            pull = self._pulls.pop(sequence, None)
            if pull is not None:
                self.bandit(sequence).learn(pull.arm, self._reward(pull, sequence, scored), pull.probability)
        super().observe(sequences, scores, verdicts)

    def _reward(self, pull: Pull, sequence: Sequence, scores: TreeScores) -> float:
        if self.reward == "pace":
            return pace_reward(pull, sequence)
        if self.reward == "divergence" and not sequence.params.greedy:
            return divergence_reward(pull, sequence, scores)
        return length_reward(pull, sequence)

    def draw(self, sequence: Sequence) -> tuple[int, float]:
        """An arm as the bandit wants it pulled, from a stream that nobody else draws from."""
        probabilities = self.bandit(sequence).probabilities()
        chance = sequence.chance.at(len(sequence.tokens), f"{self.purpose}/choice")
        arm = chance.categorical(probabilities)
        return arm, float(probabilities[arm])

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._pulls.pop(sequence, None)
