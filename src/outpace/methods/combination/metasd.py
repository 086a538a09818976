"""A bandit picks who drafts: multi-drafter speculative decoding.

``metasd`` (Kim, Jung, Yun 2026, arXiv 2604.05417): every round is a pull of a multi-armed bandit whose arms are the
parts. The reward is the accepted length, normalised; or the block divergence, the mean of 1 - TV(p, q) over the draft's
positions, which needs no luck to be high; or the pace, tokens per measured time.

What is learned belongs to the request's namespace, where greedy and sampled requests have states of their own: pace is
measured by the clock for greedy requests, and what a sampled request drafts must not depend on clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import partial
from typing import Any

from pydantic import Field

from outpace.controllers.bandit import Bandit, Policy
from outpace.controllers.combined import CombinedController
from outpace.drafting.base import Drafter
from outpace.drafting.namespaces import Namespaces
from outpace.drafting.rewarded import Rewarded, RewardedState
from outpace.drafting.rewards import Reward
from outpace.methods.combination.parts import CombinationSettings, build_parts
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target


class Switch(Rewarded[RewardedState]):
    """A bandit a namespace, at most ``most`` of them; a pull every round."""

    def __init__(
        self,
        parts: Seq[Drafter[Any]],
        names: Seq[str],
        target: Target,
        make: Callable[[], Bandit],
        reward: Reward = "length",
        most: int = 64,
    ) -> None:
        super().__init__(parts, names, target, reward)
        self.memory: Namespaces[Bandit] = Namespaces(make, most)

    def opened(self, sequence: Sequence, parts: list[Any]) -> RewardedState:
        return RewardedState(sequence, parts, bandit=self.memory.open(sequence))

    def choose(self, state: RewardedState) -> tuple[int, float]:
        return self.draw(state.sequence, state.bandit)


class SwitchSettings(CombinationSettings):
    """Settings of ``metasd``."""

    parts: tuple[str, ...] = Field(
        ("sam", "recycling"), min_length=1, max_length=16, description="names of methods: the bandit's arms"
    )
    policy: Policy = Field("ucb", description="how the next part is chosen: ucb, thompson or exp3")
    reward: Reward = Field(
        "length",
        description="accepted length, block divergence (for sampled requests), or pace: tokens per unit of time",
    )
    discount: float = Field(
        1.0, gt=0.0, le=1.0, description="factor by which the weight of a past reward decreases per round"
    )
    exploration: float = Field(
        0.3, ge=0.0, le=1.0, description="amount of exploration: the width of ucb, the random share of exp3"
    )
    namespaces: int = Field(64, ge=1, description="maximum number of namespaces whose statistics are kept")


@register(
    "metasd",
    family="combination",
    paper="Kim, Jung, Yun 2026, arXiv 2604.05417",
    summary="A bandit (UCB1, Thompson, EXP3) chooses each round's drafter by the rewards of earlier rounds.",
    when_to_use="When it is unknown which part suits the text, over long answers or in a namespace. Not for short "
    "answers, because exploration costs rounds.",
    tiny={
        "parts": ("pld", "draft-model"),
        "settings": {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 2}},
        "policy": "thompson",
    },
)
def build(context: Context, settings: SwitchSettings) -> Parts:
    """A bandit over the parts."""
    built = build_parts(context, settings)
    make = partial(Bandit, len(built.drafters), settings.policy, settings.discount, settings.exploration)
    drafter = Switch(built.drafters, built.names, context.target, make, settings.reward, settings.namespaces)
    return Parts(drafter, CombinedController(built.controllers))
