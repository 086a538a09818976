"""Gumbel coupling (Daliri, Musco and Suresh 2024, arXiv 2408.07978): drafter and target draw with the same noise."""

from __future__ import annotations

from outpace.acceptance.base import TreeByTree, Verdict
from outpace.core.chance import Chance
from outpace.core.shared_noise import SharedNoise
from outpace.core.tree import ROOT
from outpace.targets.base import TreeScores


class GumbelCoupling(TreeByTree):
    """The token at a position is argmax(log p + G), and a draft that holds it is accepted. Lossless.

    G is Gumbel noise of the request and the position alone, and a sampled draft token is argmax(log q + G) under the
    same noise. Drafter-invariant: with one seed the output is the same whatever drafts, however far, or nothing at all.
    So a draft need not carry its q, and deterministic tokens and trees are taken as well.

    The paper shows P(draft token = target's token) >= (1 - TV(p, q)) / (1 + TV(p, q)), which is what no pair that does
    not communicate can exceed on all p and q; Gumbel noise gives sum_x 1 / sum_j max(p_j / p_x, q_j / q_x). A rule
    that sees q may reach 1 - TV(p, q), as ``rejection`` does: the independence of the drafter costs accepted tokens.
    """

    name = "gumbel-coupling"
    paper = "Daliri et al. 2024, arXiv 2408.07978"
    lossless = True
    shares_noise = True
    takes_without_replacement = True
    takes_unverified_draws = True

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        sequence, path = scores.sequence, list[int]()
        noise = SharedNoise() if sequence.noise is None else sequence.noise
        while True:
            node, position = path[-1] if path else ROOT, scores.length + len(path)
            token = noise.at(sequence.chance, position).race(scores.p(node))
            child = scores.tree.child(node, token)
            if child is None:
                noise.forget(position + 1)
                return Verdict(tuple(path), token)
            path.append(child)
