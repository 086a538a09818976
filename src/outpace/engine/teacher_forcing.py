"""How much of a draft model's chains is accepted, from one forward of it over answers that are known.

Let the output continue with a_1, a_2, ..., and let q_i and p_i be the probabilities of a_i under draft model and
target, given the tokens before it. Of a chain that is drawn from the draft model, the probability that the first k
draft tokens are accepted, given this output, is

    w_k = min(w_{k-1}, q_1 ... q_k / (p_1 ... p_k))        block verification (Sun et al. 2024, arXiv 2403.10444)
    w_k = w_{k-1} min(1, q_k / p_k)                        rejection (Leviathan et al. 2023, arXiv 2211.17192)

with w_0 = 1, since a lossless rule that passes the prefix a_1 ... a_k with probability P(tau >= k, a_1 ... a_k) makes
the output go through it with p_1 ... p_k. Block verification passes the most that q and the shorter prefix allow. So no
draw is made: the expected number of rounds follows exactly, for every length of the chain, from the ratios q_i / p_i.
At temperature 0 a ratio is 1 where the draft model's argmax is a_i, else 0.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from outpace.core.tree import ROOT, TokenTree
from outpace.engine.known_answers import KnownAnswer
from outpace.targets.base import Target

_ROWS = 64
"""Tokens of an answer that one forward scores: their logits are held in memory."""


class ChainRounds(NamedTuple):
    """Expected ``rounds`` of an answer, those after the first one, the draft tokens in them, and their ``tokens``."""

    rounds: float
    draft_tokens: float
    tokens: float


def likelihood_ratios(draft: Target, answers: Seq[KnownAnswer]) -> list[list[float]]:
    """q_i / p_i of every token of every answer, for a draft model over the target's vocabulary."""
    return [_ratios(draft, one) for one in answers]


def _ratios(draft: Target, answer: KnownAnswer) -> list[float]:
    if len(answer.prompt) >= draft.context_length:  # nothing is drafted
        return [0.0] * len(answer.tokens)
    found: list[float] = []
    sequence = draft.sequence(answer.prompt, answer.params)
    try:
        with draft.round():
            draft.prefill([sequence])
            while len(found) < len(answer.tokens):
                at = len(found)
                tokens = answer.tokens[at : at + _ROWS]
                room = draft.context_length - len(sequence.tokens)
                if room < len(tokens):  # beyond its context nothing is drafted
                    return found + [0.0] * (len(answer.tokens) - at)
                tree = TokenTree.chain(tokens[:-1])
                scores = draft.score([(sequence, tree)])
                nodes = (ROOT, *range(len(tree)))
                if answer.params.greedy:
                    found += [float(scores[0].argmax(node) == token) for node, token in zip(nodes, tokens, strict=True)]
                else:
                    whole = scores[0].distribution
                    whole.ensure(nodes)
                    probs = answer.probs[at : at + _ROWS]
                    found += [
                        whole.at(node)[token] / p if p > 0.0 else 0.0
                        for node, token, p in zip(nodes, tokens, probs, strict=True)
                    ]
                draft.commit(scores, [list(range(len(tree)))])
                sequence.tokens.extend(tokens)
                sequence.sampler.extend(tokens)
    finally:
        draft.close(sequence.kv)
    return found


def path_acceptance(ratios: Seq[float], *, block: bool = True) -> list[float]:
    """w_1, w_2, ... of a chain that begins before the first of ``ratios``."""
    found, before, product = [], 1.0, 1.0
    for ratio in ratios:
        product *= ratio
        before = min(before, product) if block else before * min(1.0, ratio)
        found.append(before)
    return found


def chain_rounds(ratios: Seq[float], length: int, *, block: bool = True) -> ChainRounds:
    """What decoding an answer is expected to take with chains of ``length`` draft tokens, its first round left out.

    ``ratios``: of the answer's tokens. A draft is never longer than what is left of the answer.
    """
    total = len(ratios)
    arrive = [0.0] * (total + 1)
    """How likely a round begins after so many tokens of the answer."""
    arrive[0] = 1.0
    rounds = drafted = first = 0.0
    for at in range(total):
        if arrive[at] <= 0.0:
            continue
        count = min(length, total - at - 1)
        if at:
            rounds += arrive[at]
            drafted += arrive[at] * count
        reached = [1.0, *path_acceptance(ratios[at : at + count], block=block), 0.0]
        for accepted in range(count + 1):
            arrive[at + accepted + 1] += arrive[at] * (reached[accepted] - reached[accepted + 1])
        if not at:
            first = sum(reached)
    return ChainRounds(rounds, drafted, total - first)
