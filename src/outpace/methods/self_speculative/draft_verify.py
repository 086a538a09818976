"""Draft & Verify: the target without some of its sublayers drafts for the whole of it.

``draft-verify`` (Zhang et al. 2023, arXiv 2309.08168) skips a fixed set of attention and MLP sublayers, the same for
every prompt. The set is found beforehand by Bayesian optimisation on the user's own prompts (``outpace tune
draft-verify``), saved to a file and named by the setting ``skips``. A draft ends with the first token whose largest
probability in the sub-graph is below a threshold, which follows the acceptance rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.validation import StrictModel
from outpace.drafting.layer_skips import Skips, read_skips
from outpace.drafting.self_draft import DraftPass, SelfDraft, SelfDraftState, stopping
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target
from outpace.targets.sub_graph import SubGraph


@dataclass(slots=True)
class DraftExit:
    """The confidence below which drafting stops, adapted (Zhang et al. 2023, arXiv 2309.08168, section 3.4).

    After each round the acceptance rate is averaged, AR <- b1 AR + (1 - b1) accepted / drafted, and the threshold moves
    towards itself plus or minus ``step``, g <- b2 g + (1 - b2) (g +- step): up while AR is at most ``wanted``, down
    while it is above. A round without a draft changes nothing.
    """

    threshold: float = 0.6
    wanted: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    threshold_memory: float = 0.9
    rate: float = 1.0

    def learn(self, accepted: int, drafted: int) -> None:
        """One round's draft tokens."""
        if not drafted:
            return
        self.rate = self.rate_memory * self.rate + (1.0 - self.rate_memory) * accepted / drafted
        moved = self.threshold + (self.step if self.rate <= self.wanted else -self.step)
        kept = self.threshold_memory
        self.threshold = min(1.0, max(0.0, kept * self.threshold + (1.0 - kept) * moved))


@dataclass(slots=True)
class LayerSkipState(SelfDraftState):
    """A request with a threshold of its own."""

    exit: DraftExit


class LayerSkip(SelfDraft[LayerSkipState]):
    """Drafts through one fixed sub-graph. ``threshold``, ``wanted``, ``step``: every request's :class:`DraftExit`."""

    def __init__(
        self, target: Target, graph: SubGraph, threshold: float = 0.6, wanted: float = 0.9, step: float = 0.01
    ) -> None:
        super().__init__(target)
        self.graph = graph
        self._exit = threshold, wanted, step

    def begin(self, sequence: Sequence) -> LayerSkipState:
        return LayerSkipState(sequence, DraftExit(*self._exit))

    def plan(self, state: LayerSkipState, budget: Budget) -> tuple[SubGraph, Budget]:
        return self.graph, stopping(budget, state.exit.threshold)

    def learn(self, state: LayerSkipState, verdict: Verdict, drafted: DraftPass | None) -> None:
        if drafted is not None:
            state.exit.learn(len(drafted.tree.follow(verdict.committed)), len(drafted.tree))


class LayerSkipSettings(StrictModel):
    """Settings of ``draft-verify``."""

    num_draft_tokens: int = Field(8, ge=0, le=64, description="maximum number of draft tokens per round")
    confidence: float = Field(
        0.6, ge=0.0, le=1.0, description="end a draft after the first token whose probability is lower"
    )
    wanted: float = Field(0.9, ge=0.0, le=1.0, description="acceptance rate to which the threshold is adjusted")
    step: float = Field(0.01, ge=0.0, le=1.0, description="step by which a round adjusts the threshold; 0: fixed")
    skips: str = Field(
        "", description="file of 'outpace tune draft-verify'; by default every other attention of the middle half"
    )
    attention: tuple[int, ...] | None = Field(None, description="layers whose attention is skipped, instead")
    mlp: tuple[int, ...] | None = Field(None, description="layers whose MLP is skipped, instead")


def default_skips(layers: int) -> Skips:
    """The attention of every other layer in the middle half: saves little, and costs an untuned model little too."""
    return Skips(attention=tuple(range(layers // 4, layers - layers // 4, 2)))


def skips_of(target: Target, settings: LayerSkipSettings) -> Skips:
    """The skips that the settings name. Raises BadInput for layers that do not exist and files of another model."""
    if settings.attention is not None or settings.mlp is not None:
        skips = Skips(settings.attention or (), settings.mlp or ())
    elif settings.skips:
        skips = read_skips(settings.skips)
    else:
        skips = default_skips(target.num_layers)
    skips.check(target)
    return skips


@register(
    "draft-verify",
    family="self-speculative",
    paper="Zhang et al. 2023, arXiv 2309.08168",
    summary="The model without a fixed set of its sublayers drafts for the complete model.",
    when_to_use="Deep models, with skipped layers tuned on prompts like yours (outpace tune draft-verify). Not "
    "for small models, where the remaining layers cost half a forward pass and agree too rarely.",
    aliases=("dv", "draft-and-verify"),
    tiny={"num_draft_tokens": 2, "confidence": 0.4, "step": 0.5},
)
def build(context: Context, settings: LayerSkipSettings) -> Parts:
    """The target under the chosen skips."""
    graph = skips_of(context.target, settings).graph
    drafter = LayerSkip(context.target, graph, settings.confidence, settings.wanted, settings.step)
    return Parts(drafter, Fixed(settings.num_draft_tokens, max_nodes=settings.num_draft_tokens))
