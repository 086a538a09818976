"""Every text goes to the drafter that serves its kind best.

``taskspec`` (Ge et al. 2025, arXiv 2505.08600) partitions prompts and answers into tasks by clustering, gives each task
a drafter, and routes prompts with a light classifier. There, the drafters are models trained on a task each; here they
are any methods, and nothing is trained: clusters are found online from hashed bags of tokens, and which part serves a
cluster is learned from the rewards of its rounds, a bandit a cluster. Rules that the user gives come first: a word of
the text, and the part that then drafts.

Beside the paper: a request is routed anew after every ``window`` tokens of its answer, by these tokens, so that the
route follows a text that goes from prose to code. Between two routes it stays with its part: a draft model that drafts
every other round would have to catch up each time (``metasd`` chooses every round).

Clusters and rewards belong to the request's namespace. A request without one has its own: it goes by the rules, to the
first part where none holds, and after its first ``window`` tokens by what it has learned itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from outpace.controllers.bandit import Bandit, Policy
from outpace.controllers.combined import CombinedController
from outpace.core.errors import BadInput
from outpace.core.metrics import CacheUse
from outpace.drafting.base import Drafter
from outpace.drafting.namespaces import Namespaces
from outpace.drafting.rewarded import Rewarded, RewardedState
from outpace.drafting.rewards import Reward
from outpace.methods.combination.parts import CombinationSettings, build_parts
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from outpace.drafting.clusters import Clusters

Rule = Callable[[Seq[int]], int | None]
"""The part that a user's rules want for the tokens of a text, or None."""


@dataclass(slots=True)
class RoutedState(RewardedState):
    """``route``: the part that drafts, and the probability with which it was chosen. ``routed``: tokens of the sequence
    that have had their say."""

    route: tuple[int, float] = field(kw_only=True)
    clusters: Clusters[Bandit] = field(kw_only=True)
    routed: int = field(kw_only=True)


class TaskSwitch(Rewarded[RoutedState]):
    """Routes each request to one part, by its prompt and again by every ``window`` tokens of its answer (0: never).

    ``rule`` goes before what was learned. What part drafts is a function of the tokens, and of rewards.
    """

    def __init__(
        self,
        parts: Seq[Drafter[Any]],
        names: Seq[str],
        target: Target,
        clusters: Callable[[], Clusters[Bandit]],
        reward: Reward = "length",
        rule: Rule = lambda _: None,
        most: int = 64,
        window: int = 0,
    ) -> None:
        super().__init__(parts, names, target, reward)
        self.memory: Namespaces[Clusters[Bandit]] = Namespaces(clusters, most)
        self.rule = rule
        self.window = window

    def opened(self, sequence: Sequence, parts: list[Any]) -> RoutedState:
        clusters, prompt = self.memory.open(sequence), sequence.tokens[: sequence.prompt_length]
        bandit = clusters.assign(prompt)
        route = self._route(sequence, bandit, self.rule(prompt))
        return RoutedState(
            sequence, parts, bandit=bandit, route=route, clusters=clusters, routed=sequence.prompt_length
        )

    def _route(self, sequence: Sequence, bandit: Bandit, wanted: int | None) -> tuple[int, float]:
        return self.draw(sequence, bandit) if wanted is None else (wanted, 1.0)

    def choose(self, state: RoutedState) -> tuple[int, float]:
        tokens, latest = state.sequence.tokens, None
        while self.window and state.routed + self.window <= len(tokens):
            latest = tokens[state.routed : state.routed + self.window]
            state.bandit = state.clusters.assign(latest)
            state.routed += self.window
        if latest is not None:
            wanted = self.rule(latest)
            if wanted is None:
                wanted = self.rule(tokens[: state.sequence.prompt_length])
            state.route = self._route(state.sequence, state.bandit, wanted)
        return state.route

    def rewind(self, state: RoutedState, sequence: Sequence, kept: int) -> RoutedState:
        state.routed = max(sequence.prompt_length, min(state.routed, kept))
        return super().rewind(state, sequence, kept)

    def caches(self, state: RoutedState) -> tuple[CacheUse, ...]:
        clusters = state.clusters
        use = CacheUse("clusters of texts", len(clusters), clusters.most, clusters.evicted)
        return (use, *super().caches(state))


class TaskSwitchSettings(CombinationSettings):
    """Settings of ``taskspec``."""

    parts: tuple[str, ...] = Field(
        ("sam", "recycling"), min_length=1, max_length=16, description="names of methods that texts are routed to"
    )
    rules: dict[str, str] = Field(
        default_factory=dict,
        description="words and the part for a text that holds them, the last window before the prompt: "
        '{"translate": "recycling"}',
    )
    window: int = Field(
        64, ge=0, le=65536, description="tokens of the answer after which it is routed again; 0: by the prompt only"
    )
    clusters: int = Field(
        16, ge=1, le=1024, description="maximum number of kinds of text; the least recently used are removed first"
    )
    likeness: float = Field(
        0.1, ge=0.0, le=1.0, description="cosine similarity from which on a text belongs to a known kind"
    )
    policy: Policy = Field("ucb", description="how a kind's part is chosen: ucb, thompson or exp3")
    reward: Reward = Field("length", description="accepted length, block divergence, or pace (see metasd)")
    discount: float = Field(
        1.0, gt=0.0, le=1.0, description="factor by which the weight of a past reward decreases per round"
    )
    exploration: float = Field(
        0.1, ge=0.0, le=1.0, description="amount of exploration: the width of ucb, the random share of exp3"
    )
    namespaces: int = Field(64, ge=1, description="maximum number of namespaces whose clusters are kept")


def word_rule(context: Context, settings: TaskSwitchSettings) -> Rule:
    """The user's rules: the first word, in their order, that a text holds. Raises BadInput."""
    for word, part in settings.rules.items():
        if part not in settings.parts:
            raise BadInput(f"the rule for '{word}' names '{part}', which is none of the parts {list(settings.parts)}")
    if not settings.rules:
        return lambda _: None
    tokenizer = context.tokenizer
    if tokenizer is None:
        raise BadInput("rules look for words, so the target needs a tokenizer; without one leave 'rules' out")
    known = [
        (re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE), settings.parts.index(part))
        for word, part in settings.rules.items()
    ]

    def rule(tokens: Seq[int]) -> int | None:
        text = tokenizer.decode(tokens)
        return next((part for pattern, part in known if pattern.search(text)), None)

    return rule


@register(
    "taskspec",
    family="combination",
    paper="Ge et al. 2025, arXiv 2505.08600",
    summary="An online classifier routes prompts and sections of answers to the part that worked best for "
    "similar text.",
    when_to_use="A namespace with many texts of a few kinds that different parts serve best. Without a namespace "
    "it follows the rules and learns only within a long answer.",
    tiny={
        "parts": ("draft-model", "pld"),
        "settings": {"pld": {"num_draft_tokens": 2}, "draft-model": {"num_draft_tokens": 2}},
        "policy": "thompson",
        "window": 2,
    },
)
def build(context: Context, settings: TaskSwitchSettings) -> Parts:
    """A bandit over the parts for every cluster of texts."""
    from outpace.drafting.clusters import Clusters

    built = build_parts(context, settings)
    make = partial(Bandit, len(built.drafters), settings.policy, settings.discount, settings.exploration)
    drafter = TaskSwitch(
        built.drafters,
        built.names,
        context.target,
        partial(Clusters, make, settings.clusters, settings.likeness),
        settings.reward,
        word_rule(context, settings),
        settings.namespaces,
        settings.window,
    )
    return Parts(drafter, CombinedController(built.controllers))
