"""Beam search and stochastic beam sampling, with or without a draft.

At temperature 0 it is the beam search of transformers, step for step: the (1 + number of stop tokens) x num_beams best
continuations of all beams are ranked; those among the first num_beams that end are hypotheses, and the first num_beams
that do not end are the next beams. Above temperature 0 the continuations are drawn one after the other
(:mod:`outpace.engine.populations.joint`).

A drafted forest changes nothing of what is chosen: layer by layer, beams are drawn from the target's own joint
distribution by rejection against the forest's draws (Qin et al. 2025, "Dynamic-Width Speculative Beam Decoding", arXiv
2409.16560), and a round goes on for as long as every beam that was chosen is in the forest, where it has been scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT
from outpace.engine.populations.base import (
    Forest,
    GroupRule,
    GroupVerdict,
    Heir,
    Hypothesis,
    Layer,
    Member,
    NoForest,
    Population,
)
from outpace.engine.populations.beam_options import BeamOptions
from outpace.engine.populations.ends import Ends
from outpace.targets.base import TreeScores

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.core.sampling import SamplingParams


_LARGEST = 600.0
"""Logarithm of the largest power of a length that is divided by: far below that of the largest float."""


class Place(NamedTuple):
    """A beam whose last token has been scored: ``node`` of the tree of ``member``."""

    member: int
    node: int
    log_weight: float
    tokens: tuple[int, ...]


class Chosen(NamedTuple):
    """A continuation: ``token`` after the beam ``parent``."""

    parent: int
    token: int
    log_weight: float


@dataclass(slots=True)
class BeamState:
    """What a beam search keeps from round to round."""

    ends: Ends
    sampled: bool
    finished: list[Hypothesis] = field(default_factory=list)
    """At most num_beams, best first."""
    improvable: bool = True
    """Whether a running beam may still become better than a finished one."""


class BeamRule(GroupRule):
    """Keeps the beams of :class:`BeamOptions`."""

    def __init__(self, options: BeamOptions) -> None:
        self.options = options

    def check(self, params: SamplingParams, limit: int) -> None:
        # Scores are log-probabilities over length ** length_penalty, which must be a number.
        most = math.floor(_LARGEST / math.log(max(2, limit)))
        if abs(self.options.length_penalty) > most:
            raise BadInput(
                f"length_penalty {self.options.length_penalty:g} gives answers of {limit:,} tokens no score that is a "
                f"number; it must be between -{most} and {most}"
            )

    def begin(self, ends: Ends) -> BeamState:
        return BeamState(ends, not ends.request.params.greedy)

    def judge(
        self, state: BeamState, members: Seq[Member], forest: Forest, scores: Seq[TreeScores], chance: Chance
    ) -> GroupVerdict:
        beams = [Place(at, ROOT, one.log_weight, one.new_tokens) for at, one in enumerate(members)]
        depth = 0
        while True:
            layer = forest.layers[depth] if depth < len(forest.layers) else None
            chosen = self._chosen(state, beams, layer, scores, chance)
            if self._over(state, chosen, len(beams[0].tokens) + 1):
                return GroupVerdict((), depth, depth + 1, tuple(state.finished))
            deeper = []
            for one in chosen:
                beam = beams[one.parent]
                node = scores[beam.member].tree.child(beam.node, one.token)
                if node is not None:
                    deeper.append(Place(beam.member, node, one.log_weight, (*beam.tokens, one.token)))
            if len(deeper) < len(chosen):
                return GroupVerdict(tuple(self._heir(scores, beams, one) for one in chosen), depth, depth + 1)
            beams, depth = deeper, depth + 1

    @staticmethod
    def _heir(scores: Seq[TreeScores], beams: Seq[Place], one: Chosen) -> Heir:
        beam = beams[one.parent]
        path = tuple(scores[beam.member].tree.path(beam.node))
        return Heir(beam.member, path, one.token, one.log_weight)

    def _chosen(
        self, state: BeamState, beams: Seq[Place], layer: Layer | None, scores: Seq[TreeScores], chance: Chance
    ) -> list[Chosen]:
        """The next beams, best first; what ends is put among the finished."""
        import torch

        from outpace.engine.populations.joint import likeliest, log_probs

        width, ends = self.options.num_beams, state.ends
        last = len(beams[0].tokens) + 1 >= ends.limit
        rows = torch.cat([log_probs(scores[member], nodes) for member, nodes in _by_member(beams)])
        weights = torch.tensor([one.log_weight for one in beams], device=rows.device)
        most = max(2, 1 + len(ends.request.stop_ids)) * width
        if state.sampled:
            order = self._drawn(state, beams, layer, rows, scores[beams[0].member], chance)
        else:
            order = likeliest(rows + weights[:, None], most)
        running: list[Chosen] = []
        ended: list[Hypothesis] = []
        for rank, place in enumerate(islice(order, most)):
            parent, token = divmod(place, rows.shape[1])
            weight = float(rows[parent, token] + weights[parent])  # in float32, as transformers adds them
            tokens = (*beams[parent].tokens, token)
            reason = ends.reason(tokens)
            if reason is None and len(running) < width:
                running.append(Chosen(parent, token, weight))
            elif reason is not None and rank < width:
                ended.append(Hypothesis(tokens, weight, weight / len(tokens) ** self.options.length_penalty, reason))
            if rank + 1 >= width and (last or len(running) == width):
                break
        if not running and not ended and not state.finished:
            raise BadInput("no token can follow any beam: logit_bias or a processor bans every one (or logits are NaN)")
        self._finish(state, ended)
        return sorted(running, key=lambda one: -one.log_weight)

    @staticmethod
    def _drawn(
        state: BeamState, beams: Seq[Place], layer: Layer | None, rows: Tensor, one: TreeScores, chance: Chance
    ) -> Iterator[int]:
        """Continuations, drawn one after the other without replacement."""
        from outpace.engine.populations import joint

        params, open_rows = state.ends.request.params, one.sequence.sampler.open_rows
        weights = [beam.log_weight for beam in beams]
        p = joint.joint_distribution(rows, weights, params, open_rows)
        proposed, q = list[int](), dict[int, float]()
        if layer is not None and layer.q is not None:
            # Draws after beams that were not chosen are passed over. Whether a draw is one of these is known without
            # its token, so the others are draws from q over the chosen beams alone.
            begins = {(beam.member, beam.node): at * rows.shape[1] for at, beam in enumerate(beams)}
            proposed = [begins[draw[:2]] + draw.token for draw in layer.draws if draw[:2] in begins]
            q = {begins[draw[:2]] + draw.token: weight for draw, weight in layer.q.items() if draw[:2] in begins}
        return joint.ordered_draws(p, chance, proposed, q, joint.renewing(p, rows, weights, params, open_rows))

    def _finish(self, state: BeamState, ended: Seq[Hypothesis]) -> None:
        width = self.options.num_beams
        full = self.options.early_stopping is True and len(state.finished) >= width
        if ended and not full:
            state.finished = sorted([*state.finished, *ended], key=lambda one: -one.score)[:width]

    def _over(self, state: BeamState, running: Seq[Chosen], length: int) -> bool:
        """Whether the search ends here, ``length`` tokens after the prompt."""
        options, full = self.options, len(state.finished) >= self.options.num_beams
        if not running:
            return True
        longest = options.early_stopping == "never" and options.length_penalty > 0.0
        possible = running[0].log_weight / (state.ends.limit if longest else length) ** options.length_penalty
        if full and possible <= state.finished[-1].score:
            state.improvable = False
        return not state.improvable or (full and options.early_stopping is True)


def _by_member(beams: Seq[Place]) -> list[tuple[int, list[int]]]:
    """Runs of beams of one member, and their nodes, in order."""
    found: list[tuple[int, list[int]]] = []
    for one in beams:
        if found and found[-1][0] == one.member:
            found[-1][1].append(one.node)
        else:
            found.append((one.member, [one.node]))
    return found


def beam_search(options: BeamOptions) -> Population:
    """Beams without a draft."""
    return Population(NoForest(), BeamRule(options), options.num_beams, "beams", options)
