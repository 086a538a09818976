"""Proposal: what kind of trees a drafter builds. Acceptance rules are checked against it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposal:
    """What kind of trees a drafter builds; rules are checked against it when a Method is built."""

    tree: bool = False
    """Whether a node may have several children (or draws)."""
    sampled: bool = False
    """Whether draws may be random, each with the q row that it was sampled from."""
    replacement: bool = True
    """Whether sibling draws are sampled with replacement."""
    one_sampled_sibling: bool = False
    """Whether a node has at most one sampled draw, its siblings being functions of the path to the node alone: were
    they chosen with a look at the sample, rules that weigh a node's draws as one set would be biased."""

    shares_noise: bool = False
    """Whether sampled draws are made with the noise of their position where the request's rule shares it
    (``outpace.drafting.draft_token``)."""

    keeps_unverified_draws: bool = False
    """Whether draws that the verdict did not reach live on into later rounds: then no rule may have looked at them."""

    mixed: bool = False
    """Whether siblings may come from several rows, or some of them be deterministic: drafters that are combined."""

    def __str__(self) -> str:
        shape = "trees" if self.tree else "chains"
        if self.tree and self.one_sampled_sibling:
            return f"{shape} of deterministic draft tokens with one sampled sibling each"
        if not self.sampled:
            return f"{shape} of deterministic draft tokens"
        return f"{shape} of sampled draft tokens" + ("" if self.replacement else " without replacement")
