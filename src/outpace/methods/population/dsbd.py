"""Dynamic-width speculative beam decoding (``dsbd``; Qin et al. 2025, arXiv 2409.16560).

A draft model continues all beams together: layer by layer it draws continuations of the whole group, without
replacement, from its own joint distribution over (beam, token). The target scores the forest in one forward, and its
beams are drawn layer by layer from its own joint distribution by rejection against these draws. A round goes on while
all beams that were drawn are in the forest. Beams have the law of stochastic beam sampling without a draft; at
temperature 0 the forest holds the draft model's likeliest continuations, and the beams are those of beam search.

A layer is drawn from the draft model's ``candidates`` likeliest continuations: sampling and rejection are then a matter
of so many numbers, not of whole vocabularies, and any distribution may be drafted from. It is as wide as the draft
model is unsure: the fewest continuations that have the share ``coverage`` of these, at least num_beams and at most
``max_width``. The width is set before a layer's draws are made.

Layers that are not accepted cost a forward of the draft model and rows of the target. How many there are follows from
how often layers were accepted in earlier rounds of the request, and from nothing in the round itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Self

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
    from outpace.engine.request import Request


_MEMORY = 0.95
"""What a round counts beside the one after it, in how often layers are accepted."""
_PAUSE = 16
"""Rounds after which a layer is drafted although it is not worth it, to see whether it has become so."""


class DsbdSettings(StrictModel):
    """Settings of ``dsbd``."""

    num_beams: int = Field(4, ge=1, le=128, description="beams of requests that do not say (num_beams)")
    num_draft_tokens: int = Field(3, ge=0, le=32, description="layers of the forest")
    layer_chance: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="layers are drafted where earlier rounds give at least this chance that all of their beams are "
        "accepted; 0: always",
    )
    coverage: float = Field(
        0.9, gt=0.0, le=1.0, description="share of the draft model's joint distribution that a layer's width covers"
    )
    max_width: int = Field(16, ge=1, le=512, description="most draws of a layer, where num_beams is not more")
    candidates: int = Field(
        64, ge=1, le=4096, description="likeliest continuations that a layer is drawn from, where it is not wider"
    )

    @model_validator(mode="after")
    def _wide_enough(self) -> Self:
        if self.max_width < self.num_beams:
            raise ValueError(f"max_width ({self.max_width}) is less than num_beams ({self.num_beams})")
        return self


class Candidate(NamedTuple):
    """A continuation that a layer may hold. ``log_weight``: the draft model's joint score."""

    place: JointDraw
    log_weight: float


@dataclass(slots=True)
class JointState:
    """What is kept of a group: the draft model's side of it, and how often layers were accepted."""

    members: DraftMembers
    held: float = 3.0
    tried: float = 4.0
    """Layers that were accepted whole, and those whose earlier ones were; older rounds count less. It begins with a
    guess."""
    pauses: int = 0
    """Rounds without a draft since the last with one."""

    def layers(self, most: int, chance: float) -> int:
        """How many layers are worth drafting; one in every so many rounds in any case."""
        rate = self.held / self.tried
        worth = most if chance <= 0.0 or rate >= 1.0 else min(most, int(math.log(chance) / math.log(rate) + 1e-9))
        if worth < 1 <= most and self.pauses + 1 >= _PAUSE:
            worth = 1
        self.pauses = 0 if worth else self.pauses + 1
        return worth

    def learn(self, drafted: int, accepted: int) -> None:
        """A round drafted so many layers, and so many were accepted."""
        if drafted:
            tried = min(drafted, accepted + 1)
            self.held = _MEMORY * self.held + min(drafted, accepted)
            self.tried = _MEMORY * self.tried + tried


class JointBeams(GroupDrafter):
    """Drafts forests for groups of ``beams``."""

    def __init__(self, draft: Target, request: Request, beams: int, settings: DsbdSettings) -> None:
        self.draft, self.params, self.beams = draft, request.params, beams
        self.stop_ids = request.stop_ids
        self.settings = settings

    def begin(self, prompt: Sequence) -> JointState:
        return JointState(DraftMembers(self.draft, prompt))

    def propose(self, state: JointState, members: Seq[Member], room: int, chance: Chance) -> Forest:
        forest, drafted = Forest([TokenTree() for _ in members]), state.members
        depth = state.layers(min(self.settings.num_draft_tokens, room), self.settings.layer_chance)
        if depth < 1 or not drafted.fits(members, depth):
            return forest
        drafted.start(members)
        drafted.run()
        parents = [(at, ROOT, one.log_weight) for at, one in enumerate(members)]
        for layer in range(depth):
            drawn, parents = self._layer(drafted, forest, parents, chance)
            forest.layers.append(drawn)
            if not parents or layer + 1 == depth:
                break
            drafted.run(
                (member, node, forest.trees[member].parents[node], forest.trees[member].tokens[node])
                for member, node, _ in parents
            )
        return forest

    def _layer(
        self, drafted: DraftMembers, forest: Forest, parents: Seq[tuple[int, int, float]], chance: Chance
    ) -> tuple[Layer, list[tuple[int, int, float]]]:
        """One layer after ``parents``, (member, node, joint score) each; and what can be drafted after."""
        import torch

        found = self._candidates(drafted, parents)
        if not found:
            return Layer(()), []
        # At temperature 0, how sure the draft model is at temperature 1 says how wide the layer is.
        heat = self.params.temperature or 1.0
        q = [math.exp((one.log_weight - found[0].log_weight) / heat) for one in found]
        width = self._width(q)
        chosen: Seq[int] = range(width)
        if not self.params.greedy:
            chosen = chance.ordered_sample(torch.tensor(q, dtype=torch.float64), width)
        draws, deeper = [], []
        for at in chosen:
            (member, node, token), log_weight = place, _ = found[at]
            draws.append(place)
            if token not in self.stop_ids:  # nothing comes after it
                deeper.append((member, forest.trees[member].add(node, token), log_weight))
        law = None if self.params.greedy else {one.place: weight for one, weight in zip(found, q, strict=True)}
        return Layer(tuple(draws), law), deeper

    def _candidates(self, drafted: DraftMembers, parents: Seq[tuple[int, int, float]]) -> list[Candidate]:
        """The likeliest continuations of all parents, best first."""
        from outpace.targets.top import top_and_totals

        most = max(self.settings.candidates, self.settings.max_width, self.beams)
        after: dict[int, list[tuple[int, float]]] = {}
        for member, node, log_weight in parents:
            after.setdefault(member, []).append((node, log_weight))
        found = []
        for member, some in after.items():
            best = top_and_totals(drafted.logits(member, [node for node, _ in some]), most)
            for (node, log_weight), (values, ids, total) in zip(some, best, strict=True):
                found += [
                    Candidate(JointDraw(member, node, token), log_weight + value - total)
                    for value, token in zip(values, ids, strict=True)
                    if math.isfinite(value)
                ]
        return sorted(found, key=lambda one: -one.log_weight)[:most]

    def _width(self, q: Seq[float]) -> int:
        """How many continuations are drafted, of those with weights ``q``, largest first."""
        most = min(max(self.settings.max_width, self.beams), len(q))
        enough = 1 + sum(mass < self.settings.coverage * math.fsum(q) for mass in accumulate(q[:most]))
        return max(min(self.beams, most), min(enough, most))

    def observe(self, state: JointState, forest: Forest, heirs: Seq[Heir]) -> None:
        state.learn(len(forest.layers), len(heirs[0].path))
        state.members.follow(forest, heirs)

    def end(self, state: JointState) -> None:
        state.members.close()

    def kv_bytes(self, tokens: int) -> int:
        return self.draft.kv_bytes(None, min(tokens, self.draft.context_length))

    def most_nodes(self, members: int) -> int:
        return self.settings.num_draft_tokens * max(self.settings.max_width, members)


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
    tiny={"num_beams": 2, "num_draft_tokens": 2, "max_width": 2, "layer_chance": 0.0},
)
def build(context: Context, settings: DsbdSettings) -> Parts:
    """The draft model that the caller named."""
    draft = context.draft()

    def population(request: Request) -> Population:
        options = request.beams or BeamOptions(settings.num_beams)
        drafter = JointBeams(draft, request, options.num_beams, settings)
        return Population(drafter, BeamRule(options), options.num_beams, "beams", options)

    return Parts(NoDraft(), Fixed(0), departs="answers are those of beam search", population=population)
