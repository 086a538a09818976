"""Sequential Monte Carlo speculative decoding (``smcsd``; Emara et al. 2026, arXiv 2604.15672). Lossy.

A draft model samples ``num_draft_tokens`` tokens for each of ``num_particles`` particles, one forward of the target
scores all, and weights p / q take the place of rejection (:mod:`outpace.engine.populations.particles`). All forwards
have one shape: no particle falls behind.

The draft model's distribution has the request's temperature and nothing else: q must be above 0 wherever p is. A draft
model over part of the vocabulary cannot draw the other tokens, so a share of the draws is uniform over these
(:func:`whole_logits`), and q is the mixture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.core.validation import StrictModel
from outpace.engine.populations.base import Forest, GroupDrafter, Heir, Member, Population
from outpace.engine.populations.particles import ParticleRule
from outpace.engine.populations.resampling import SCHEMES
from outpace.methods.none import NoDraft
from outpace.methods.population.draft_members import DraftMembers
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.engine.request import Request

MOST_PARTICLES = 1024


class SmcsdSettings(StrictModel):
    """Settings of ``smcsd``."""

    num_particles: int = Field(8, ge=1, le=MOST_PARTICLES, description="particles (N)")
    num_draft_tokens: int = Field(4, ge=0, le=32, description="tokens that each particle is drafted in a round (K)")
    resampling: Literal["systematic", "multinomial", "residual"] = Field(
        "systematic", description="how particles are resampled"
    )
    ess_threshold: float = Field(
        0.5, ge=0.0, le=1.0, description="resample when the effective sample size is below this share of the particles"
    )
    missing_share: float = Field(
        0.1,
        gt=0.0,
        lt=1.0,
        description="share of the draws for tokens that the draft model lacks, where it covers a part of the "
        "vocabulary: without them no average would be unbiased",
    )


class Chains(GroupDrafter):
    """Drafts a chain of ``depth`` tokens for every particle, sampled from the draft model at a temperature.

    ``missing_share``: of the draws, for tokens that the draft model lacks.
    """

    def __init__(self, draft: Target, temperature: float, depth: int, missing_share: float) -> None:
        self.draft, self.depth, self.missing_share = draft, depth, missing_share
        self._params = SamplingParams(temperature=temperature)

    def begin(self, prompt: Sequence) -> DraftMembers:
        return DraftMembers(self.draft, prompt)

    def propose(self, state: DraftMembers, members: Seq[Member], room: int, chance: Chance) -> Forest:
        import torch

        trees = [TokenTree() for _ in members]
        depth = min(self.depth, room)
        if depth < 1 or not state.fits(members, depth):
            return Forest(trees)
        state.start(members)
        added: list[tuple[int, int, int, int]] = []
        for at in range(depth):
            state.run(added)
            last = at - 1 if at else ROOT
            rows = torch.cat([state.logits(member, [last]) for member in range(len(members))])
            rows = whole_logits(rows, self._params.temperature, self.missing_share)
            laws = self.draft.open_rows(rows, range(len(rows)), self._params)
            added = []
            for member, (tree, law) in enumerate(zip(trees, laws, strict=True)):
                if law is None:
                    raise BadInput("no token can be drafted: the draft model's logits are NaN; take another one")
                token = chance.categorical(law)
                added.append((member, tree.add(last, token, QRow(law)), last, token))
        return Forest(trees)

    def observe(self, state: DraftMembers, forest: Forest, heirs: Seq[Heir]) -> None:
        state.follow(forest, heirs)

    def end(self, state: DraftMembers) -> None:
        state.close()

    def kv_bytes(self, tokens: int) -> int:
        return self.draft.kv_bytes(None, min(tokens, self.draft.context_length))

    def most_nodes(self, members: int) -> int:
        return self.depth * members


def whole_logits(logits: Tensor, temperature: float, share: float) -> Tensor:
    """Logits (n, V) that have, at ``temperature``, the distribution (1 - ``share``) * the draft model's + ``share`` * a
    uniform one over the tokens that it lacks (-inf). Where it lacks none, they are returned as they are."""
    lacks = logits == -math.inf
    counts = lacks.sum(-1, keepdim=True)
    if not int(counts.max()):
        return logits
    best = logits.amax(-1, keepdim=True)
    total = best + temperature * ((logits - best) / temperature).logsumexp(-1, keepdim=True)
    uniform = total + temperature * (math.log(share / (1.0 - share)) - counts.clamp(min=1).log())
    return logits.where(~lacks, uniform)


@register(
    "smcsd",
    family="population",
    paper="Emara et al. 2026, arXiv 2604.15672",
    needs=("draft model",),
    lossless=False,
    summary="Particles that a draft model continues and the target weighs: no token is rejected. Approximate.",
    when_to_use="Weighted samples of the model's distribution for estimates (answer votes, expected scores), with a "
    "fast draft model that is near the target. Not for a single exact sample.",
    aliases=("smc", "smc-sd", "sequential-monte-carlo"),
    tiny={"num_particles": 2, "num_draft_tokens": 1},
)
def build(context: Context, settings: SmcsdSettings) -> Parts:
    """The draft model that the caller named."""
    draft = context.draft()
    rule = ParticleRule(settings.num_particles, SCHEMES[settings.resampling], settings.ess_threshold)
    departs = f"{settings.num_particles} weighted particles"

    def population(request: Request) -> Population:
        if request.beams is not None and request.beams.num_beams > 1:
            raise BadInput(
                "num_beams asks for beams, and 'smcsd' decodes particles; leave it out, and set num_particles"
            )
        chains = Chains(draft, request.params.temperature, settings.num_draft_tokens, settings.missing_share)
        return Population(chains, rule, settings.num_particles, "particles")

    return Parts(NoDraft(), Fixed(0), departs=departs, population=population)
