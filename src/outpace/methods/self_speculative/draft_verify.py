"""Draft & Verify: the target without some of its sublayers drafts for the whole of it.

``draft-verify`` (Zhang et al. 2023, arXiv 2309.08168) skips a fixed set of attention and MLP sublayers, the same for
every prompt. The set is found beforehand by Bayesian optimisation on the user's own prompts (``outpace tune
draft-verify``), saved to a file and named by the setting ``skips``. A draft ends with the first token whose largest
probability in the sub-graph is below a threshold, which follows the acceptance rate.
"""

from __future__ import annotations

from pydantic import Field

from outpace.controllers.fixed import Fixed
from outpace.drafting.layer_skips import Skips, read_skips
from outpace.drafting.self_draft import AdaptiveSelfDraft, AdaptiveState, DraftExit, ExitSettings
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, SubGraph, Target


class LayerSkip(AdaptiveSelfDraft[AdaptiveState]):
    """Drafts through one fixed sub-graph. ``threshold``, ``wanted``, ``step``: every request's :class:`DraftExit`."""

    def __init__(
        self, target: Target, graph: SubGraph, threshold: float = 0.6, wanted: float = 0.9, step: float = 0.01
    ) -> None:
        super().__init__(target)
        self.graph = graph
        self._exit = threshold, wanted, step

    def begin(self, sequence: Sequence) -> AdaptiveState:
        return AdaptiveState(sequence, DraftExit(*self._exit))

    def sub_graph(self, state: AdaptiveState) -> SubGraph:
        return self.graph


class LayerSkipSettings(ExitSettings):
    """Settings of ``dv``."""

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
    summary="The model without a fixed set of its sublayers drafts for the whole of it.",
    when_to_use="On deep models, skips tuned on prompts like yours (outpace tune draft-verify). Not on small ones, "
    "where the layers that are left cost half a forward and agree too seldom.",
    aliases=("dv", "draft-and-verify"),
    tiny={"num_draft_tokens": 2, "confidence": 0.4, "step": 0.5},
)
def build(context: Context, settings: LayerSkipSettings) -> Parts:
    """The target under the chosen skips."""
    graph = skips_of(context.target, settings).graph
    drafter = LayerSkip(context.target, graph, settings.confidence, settings.wanted, settings.step)
    return Parts(drafter, Fixed(settings.num_draft_tokens, max_nodes=settings.num_draft_tokens))
