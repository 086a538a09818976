"""A bandit picks who drafts: multi-drafter speculative decoding.

``metasd`` (Kim, Jung, Yun 2026, arXiv 2604.05417): every round is a pull of a multi-armed bandit whose arms are the
parts. The reward is the accepted length, normalised; or the block divergence, the mean of 1 - TV(p, q) over the draft's
positions, which needs no luck to be high; or the pace, tokens per measured time.

What is learned belongs to the request's namespace, where greedy and sampled requests have states of their own: pace is
measured by the clock for greedy requests, and what a sampled request drafts must not depend on clocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from time import perf_counter

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.bandit import Bandit, Policy
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.drafters.base import Drafter
from outpace.drafters.combine import CombinationSettings, OneAtATime, build_parts
from outpace.drafters.memory import Namespaces
from outpace.drafters.rewards import Pull, Reward, divergence_reward, length_reward, pace_reward
from outpace.method import Context, Parts, register
from outpace.targets.base import Sequence, Target, TreeScores
from outpace.tree import TokenTree


class Rewarded(OneAtATime):
    """One part a round, chosen before anything is drafted; what became of its draft is its reward.

    ``target`` is what draft times are compared with.
    """

    def __init__(self, parts: Seq[Drafter], names: Seq[str], target: Target, reward: Reward = "length") -> None:
        super().__init__(parts, names)
        self.target = target
        self.reward = reward
        self.reads_all |= reward == "divergence"
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
                carried = self.parts[arm].proposal.carried
                pull = Pull(arm, probability, tree, len(sequence.tokens), budgets[at], carried=carried)
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


class Switch(Rewarded):
    """A bandit a namespace, at most ``most`` of them; a pull every round."""

    def __init__(
        self,
        parts: Seq[Drafter],
        names: Seq[str],
        target: Target,
        make: Callable[[], Bandit],
        reward: Reward = "length",
        most: int = 64,
    ) -> None:
        super().__init__(parts, names, target, reward)
        self.memory: Namespaces[Bandit] = Namespaces(make, most)

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self.memory.open(sequence)

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        super().fork(sequence, twin)
        self.memory.open(twin)

    def bandit(self, sequence: Sequence) -> Bandit:
        return self.memory[sequence]

    def choose(self, sequence: Sequence) -> tuple[int, float]:
        return self.draw(sequence)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self.memory.close(sequence)


class SwitchSettings(CombinationSettings):
    """Settings of ``metasd``."""

    parts: tuple[str, ...] = Field(
        ("sam", "recycling"), min_length=1, max_length=16, description="names of methods: the bandit's arms"
    )
    policy: Policy = Field("ucb", description="how the next part is chosen: ucb, thompson or exp3")
    reward: Reward = Field(
        "length", description="accepted length, block divergence where the request samples, or pace: tokens per time"
    )
    discount: float = Field(1.0, gt=0.0, le=1.0, description="what a past reward still weighs a round later")
    exploration: float = Field(0.3, ge=0.0, le=1.0, description="how much is tried: ucb's width, exp3's random share")
    namespaces: int = Field(64, ge=1, description="most namespaces whose statistics are kept")


@register(
    "metasd",
    family="combination",
    paper="Kim, Jung, Yun 2026, arXiv 2604.05417",
    summary="A bandit (UCB1, Thompson, EXP3) picks each round's drafter by the rewards of earlier rounds.",
    pays="Where nobody knows which part suits the text, over long answers or in a namespace. Not for a short answer: "
    "finding out costs rounds.",
    tiny={
        "parts": ("pld", "draft-model"),
        "settings": {"pld": {"length": 2}, "draft-model": {"length": 2}},
        "policy": "thompson",
    },
)
def build(context: Context, settings: SwitchSettings) -> Parts:
    """A bandit over the parts."""
    built = build_parts(context, settings)
    make = partial(Bandit, len(built.drafters), settings.policy, settings.discount, settings.exploration)
    drafter = Switch(built.drafters, built.names, context.target, make, settings.reward, settings.namespaces)
    return Parts(drafter, CombinedController(built.controllers))
