"""Dynamic-width speculative beam decoding (``dsbd``; Qin et al. 2025, arXiv 2409.16560).

A draft model continues all beams together: layer by layer it draws continuations of the whole group, without
replacement, from its own joint distribution over (beam, token). The target scores the forest in one forward, and its
beams are drawn layer by layer from its own joint distribution by rejection against these draws. A round goes on while
all beams that were drawn are in the forest. Beams have the law of stochastic beam sampling without a draft; at
temperature 0 the forest holds the draft model's likeliest continuations, and the beams are those of beam search.

A layer is as wide as the draft model is unsure: the fewest continuations that have the share ``coverage`` of its joint
distribution, at least num_beams and at most ``max_width``. The width is set before a layer's draws are made.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.tree import ROOT, TokenTree
from outpace.core.validation import StrictModel
from outpace.engine.populations.base import Forest, GroupDrafter, Heir, JointDraw, Layer, Member, Population
from outpace.engine.populations.beam_options import BeamOptions
from outpace.engine.populations.beams import BeamRule
from outpace.methods.none import NoDraft
from outpace.methods.population.draft_members import DraftMembers
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.engine.request import Request


class DsbdSettings(StrictModel):
    """Settings of ``dsbd``."""

    num_beams: int = Field(4, ge=1, le=128, description="beams of requests that do not say (num_beams)")
    num_draft_tokens: int = Field(3, ge=0, le=32, description="layers of the forest")
    coverage: float = Field(
        0.9, gt=0.0, le=1.0, description="share of the draft model's joint distribution that a layer's width covers"
    )
    max_width: int = Field(16, ge=1, le=512, description="most draws of a layer, where num_beams is not more")

    @model_validator(mode="after")
    def _wide_enough(self) -> Self:
        if self.max_width < self.num_beams:
            raise ValueError(f"max_width ({self.max_width}) is less than num_beams ({self.num_beams})")
        return self


class JointBeams(GroupDrafter):
    """Drafts forests of ``depth`` layers for groups of ``beams``."""

    def __init__(self, draft: Target, request: Request, beams: int, settings: DsbdSettings) -> None:
        self.draft, self.params, self.beams = draft, request.params, beams
        self.stop_ids = request.stop_ids
        self.settings = settings

    def begin(self, prompt: Sequence) -> DraftMembers:
        return DraftMembers(self.draft, prompt)

    def propose(self, state: DraftMembers, members: Seq[Member], room: int, chance: Chance) -> Forest:
        forest = Forest([TokenTree() for _ in members])
        depth = min(self.settings.num_draft_tokens, room)
        if depth < 1 or not state.fits(members, depth):
            return forest
        state.start(members)
        state.run()
        parents = [(at, ROOT, one.log_weight) for at, one in enumerate(members)]
        for layer in range(depth):
            drawn, parents = self._layer(state, forest, parents, chance)
            forest.layers.append(drawn)
            if not parents or layer + 1 == depth:
                break
            state.run(
                (member, node, forest.trees[member].parents[node], forest.trees[member].tokens[node])
                for member, node, _ in parents
            )
        return forest

    def _layer(
        self, state: DraftMembers, forest: Forest, parents: Seq[tuple[int, int, float]], chance: Chance
    ) -> tuple[Layer, list[tuple[int, int, float]]]:
        """One layer after ``parents``, (member, node, joint score) each; and what can be drafted after."""
        import torch

        rows = torch.cat([state.logits(member, [node]) for member, node, _ in parents]).float().log_softmax(-1)
        weights = [weight for _, _, weight in parents]
        joint = rows + torch.tensor(weights, device=rows.device)[:, None]
        q = self._law(rows, weights)
        width = self._width(q)
        places = joint.flatten().topk(width).indices.tolist() if self.params.greedy else None
        if places is None:
            places = chance.ordered_sample(q.flatten(), width)
        draws, deeper = [], []
        for place in places:
            at, token = divmod(place, rows.shape[1])
            member, node, _ = parents[at]
            draws.append(JointDraw(member, node, token))
            if token not in self.stop_ids:  # nothing comes after it
                deeper.append((member, forest.trees[member].add(node, token), float(joint[at, token])))
        where = {(member, node): at for at, (member, node, _) in enumerate(parents)}
        return Layer(tuple(draws), None if self.params.greedy else q, where), deeper

    def _law(self, rows: Tensor, weights: Seq[float]) -> Tensor:
        """The draft model's joint distribution (parents, V); at temperature 0 that of temperature 1, which tells how
        sure it is."""
        from outpace.core.sampling import SamplingParams
        from outpace.engine.populations.joint import joint_probabilities

        return joint_probabilities(rows, weights, SamplingParams(temperature=self.params.temperature or 1.0))

    def _width(self, q: Tensor) -> int:
        """How many continuations are drafted, of a joint distribution (parents, V)."""
        most = min(max(self.settings.max_width, self.beams), q.numel())
        mass = q.flatten().topk(most).values.cumsum(0)
        enough = int((mass < self.settings.coverage).sum()) + 1
        return max(min(self.beams, most), min(enough, most))

    def observe(self, state: DraftMembers, forest: Forest, heirs: Seq[Heir]) -> None:
        state.follow(forest, heirs)

    def end(self, state: DraftMembers) -> None:
        state.close()


@register(
    "dsbd",
    family="population",
    paper="Qin et al. 2025, arXiv 2409.16560",
    needs=("draft model",),
    lossless=False,
    summary="Beam search, or stochastic beams, with a draft model's forest for all beams together.",
    when_to_use="Beam search with a draft model much faster than the target, where rows cost little. Not where one "
    "answer is enough: beams are another distribution than the model's own.",
    aliases=("speculative-beam", "dynamic-width-speculative-beam-decoding"),
    tiny={"num_beams": 2, "num_draft_tokens": 2, "max_width": 2},
)
def build(context: Context, settings: DsbdSettings) -> Parts:
    """The draft model that the caller named."""
    draft = context.draft()

    def population(request: Request) -> Population:
        options = request.beams or BeamOptions(settings.num_beams)
        drafter = JointBeams(draft, request, options.num_beams, settings)
        return Population(drafter, BeamRule(options), options.num_beams, "beams")

    return Parts(NoDraft(), Fixed(0), departs="answers are those of beam search", population=population)
