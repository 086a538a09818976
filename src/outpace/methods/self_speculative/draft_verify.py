"""Draft & Verify: the target without some of its sublayers drafts for the whole of it.

``dv`` (Zhang et al. 2023, arXiv 2309.08168) skips a fixed set of attention and MLP sublayers, the same for every
prompt. Which set is found beforehand by Bayesian optimisation on the user's own prompts (``outpace tune dv``), saved to
a file and named by the setting ``skips``. A draft ends with the first token that the sub-graph is less sure of than a
threshold, which follows the acceptance rate.
"""

from __future__ import annotations

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.drafting.layer_skips import Skips, read_skips
from outpace.drafting.self_draft import Adapting, DraftExit, ExitSettings, Pass, SelfDraft, accepted, stopping
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, SubGraph, Target, TreeScores


class LayerSkip(SelfDraft[Adapting]):
    """Drafts through one fixed sub-graph. ``exit``: the threshold that every request starts with."""

    def __init__(
        self, target: Target, graph: SubGraph, threshold: float = 0.6, wanted: float = 0.9, step: float = 0.01
    ) -> None:
        super().__init__(target)
        self.graph = graph
        self._exit = threshold, wanted, step

    def opened(self, sequence: Sequence) -> Adapting:
        return Adapting(DraftExit(*self._exit))

    def plan(self, sequence: Sequence, budget: Budget) -> tuple[SubGraph, Budget]:
        return self.graph, stopping(budget, self._own[sequence].exit.threshold)

    def learn(self, sequence: Sequence, scores: TreeScores, verdict: Verdict, drafted: Pass | None) -> None:
        if drafted is not None:
            self._own[sequence].exit.learn(accepted(drafted, sequence), len(drafted.tree))


class LayerSkipSettings(ExitSettings):
    """Settings of ``dv``."""

    skips: str = Field(
        "", description="file that 'outpace tune dv' wrote; by default every other attention of the middle half"
    )
    attention: tuple[int, ...] | None = Field(None, description="layers whose attention is skipped, instead")
    mlp: tuple[int, ...] | None = Field(None, description="layers whose MLP is skipped, instead")


def default_skips(layers: int) -> Skips:
    """The attention of every other layer in the middle half: little is saved, but an untuned model bears it."""
    return Skips(attention=tuple(range(layers // 4, layers - layers // 4, 2)))


def chosen_skips(target: Target, settings: LayerSkipSettings) -> Skips:
    """The set that the settings name. Raises BadInput for layers that do not exist and files of another model."""
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
    summary="The model without a fixed set of its sublayers drafts for the whole of it.",
    when_to_use="on deep models with layers to spare and a set tuned on prompts like yours (outpace tune dv); "
    "not on small ones, where what is left of the model costs half of it and agrees too seldom",
    aliases=("dv", "draft-and-verify"),
    tiny={"length": 2, "confidence": 0.4, "step": 0.5},
)
def build(context: Context, settings: LayerSkipSettings) -> Parts:
    """The target under the chosen skips."""
    graph = chosen_skips(context.target, settings).graph
    drafter = LayerSkip(context.target, graph, settings.confidence, settings.wanted, settings.step)
    return Parts(drafter, Fixed(settings.length, nodes=settings.length))
