"""The AcceptanceRule protocol: from a scored tree to a path and the next token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from outpace.acceptance.bounds import IDENTICAL, Bound, NodeView
from outpace.acceptance.draws import draws_by_parent
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import ROOT, Draw, TokenTree
from outpace.core.validation import StrictModel
from outpace.targets.base import Sequence, Target, TreeScores

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decides about one tree: ``path``, the accepted nodes from the root down, and the token after them.

    ``token`` is the recovered token after a rejection, or the bonus token after a whole path. For drafters the engine
    adds the ``scores`` that were judged, and ``committed``: the tokens that stay of path and token, fewer where a stop
    token, a stop string or the length limit ended the answer.
    """

    path: tuple[int, ...]
    token: int
    scores: TreeScores = field(default=None, repr=False, compare=False)  # type: ignore[assignment]
    committed: tuple[int, ...] = field(default=(), compare=False)

    @property
    def rows(self) -> list[int]:
        """Rows of ``scores`` that hold committed tokens: the root's and the accepted path's. The newest has none."""
        return [0, *(1 + node for node in self.path[: max(0, len(self.committed) - 1)])]

    def target_row(self, index: int) -> TokenDistribution:
        """The target's distribution after ``index`` committed tokens."""
        return self.scores.distribution.at(self.path[index - 1] if index else ROOT)

    def hidden_states(self, layers: Seq[int]) -> Tensor:
        """Hidden states of :attr:`rows`, those of ``layers`` side by side: (rows, layers * hidden)."""
        import torch

        rows = self.rows
        found = [self.scores.hidden_states[layer] for layer in layers]
        if rows[-1] == len(rows) - 1:  # the first rows need no gathering
            picked = [states[: len(rows)] for states in found]
        else:
            chosen = torch.tensor(rows, device=found[0].device)
            picked = [states.index_select(0, chosen) for states in found]
        return torch.cat(picked, -1)


class AcceptanceRule(ABC):
    """Reads the tree's draws and the target's distribution, and decides. Stateless but for ``begin``'s state.

    Class attributes state what the rule is and takes; :meth:`check` refuses what does not fit, with the reason.
    """

    name: str
    aliases: tuple[str, ...] = ()
    paper: str
    lossless: bool
    greedy_only: bool = False
    """Whether the rule keeps the distribution at temperature 0 alone."""
    shares_noise: bool = False
    """Whether it draws the target's tokens with noise (``Sequence.noise``) that sampled draft tokens must be drawn
    with as well."""
    takes_trees: bool = True
    takes_sampled: bool = True
    takes_without_replacement: bool = False
    takes_unverified_draws: bool = False
    """Whether a draw is judged without a look at later ones, so that these may live on into the next round."""
    by_node: Literal["", "chains", "trees", "drafts"] = ""
    """Where what it commits after a node depends on the target's scores and the draws there alone, whatever was drafted
    below: on chains, on all trees, or nowhere. There the committed token's distribution can be computed. "drafts": it
    depends on what was drafted below as well, and is computed given that."""
    aux_hidden_state_layers: tuple[int, ...] = ()
    """Target layers whose hidden states it reads of the scores, counted as drafters count them."""
    keeps_greedy: bool = False
    """Of a lossy rule: whether requests at temperature 0 are answered as in greedy decoding."""
    Settings: type[BaseModel] = StrictModel
    """What can be set; the rule is built from an instance of it where there are fields."""

    @property
    def described(self) -> str:
        """Its name, with its settings where it has any."""
        return self.name

    @property
    def bound(self) -> Bound | None:
        """What it promises about the committed token at every node; None: nothing."""
        return IDENTICAL

    @property
    def exact(self) -> bool:
        """Whether the output distribution is the target's with these settings."""
        return self.lossless

    def limit(self, node: NodeView) -> float:
        """The limit of its bound at a node, at temperatures above 0."""
        return 0.0

    def greedy_limit(self, node: NodeView) -> float:
        """The limit of the excess negative log-likelihood at a node, at temperature 0."""
        return 0.0

    def for_target(self, target: Target) -> AcceptanceRule:
        """This rule, with what it reads of the target beside its scores. Asked when a method is built."""
        return self

    def begin(self, sequence: Sequence) -> Any:
        """The rule's own state for one request (None for most)."""
        return None

    @abstractmethod
    def accept(self, scores: Seq[TreeScores], states: Seq[Any], chances: Seq[Chance]) -> list[Verdict]:
        """One verdict per scored tree. ``chances[i]`` is sequence i's stream of this round for purpose "accept"."""

    def check(self, drafter_name: str, proposal: Proposal) -> None:
        """Raise BadInput when this rule cannot judge what the drafter proposes."""
        if proposal.tree and not self.takes_trees:
            raise BadInput(f"rule '{self.name}' takes chains, but '{drafter_name}' drafts {proposal}; use a tree rule")
        if proposal.sampled and not self.takes_sampled:
            raise BadInput(
                f"rule '{self.name}' takes deterministic draft tokens, but '{drafter_name}' drafts {proposal}"
            )
        if proposal.sampled and not proposal.replacement and not self.takes_without_replacement:
            raise BadInput(f"rule '{self.name}' takes draws with replacement, but '{drafter_name}' drafts {proposal}")
        if self.shares_noise and proposal.sampled and not proposal.shares_noise:
            raise BadInput(
                f"rule '{self.name}' needs draft tokens that are drawn with the noise that it draws with itself, but "
                f"'{drafter_name}' draws {proposal} with numbers of its own; use a method that drafts sampled chains "
                "or deterministic tokens, or another rule"
            )
        if proposal.keeps_unverified_draws and not self.takes_unverified_draws:
            raise BadInput(
                f"rule '{self.name}' looks at all draft tokens to judge each, but '{drafter_name}' keeps those that it "
                "did not reach; use 'rejection' or 'recursive-rejection'"
            )

    def check_params(self, params: SamplingParams) -> None:
        """Raise BadInput when this rule does not fit the request's sampling parameters."""
        if self.greedy_only and not params.greedy:
            raise BadInput(
                f"rule '{self.name}' is for temperature 0, but the temperature is {params.temperature:g}; "
                "use a sampling rule such as 'rejection'"
            )


class TreeByTree(AcceptanceRule):
    """A rule that decides each tree by itself, which is nearly every rule."""

    def accept(self, scores: Seq[TreeScores], states: Seq[Any], chances: Seq[Chance]) -> list[Verdict]:
        return [self.decide(one, chance) for one, chance in zip(scores, chances, strict=True)]

    @abstractmethod
    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        """The verdict on one tree."""


class TopDown(TreeByTree):
    """A rule that walks down from the root, choosing at every node among the draws made after it."""

    by_node = "trees"

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        draws_at = draws_by_parent(scores.tree)
        path: list[int] = []
        while True:
            node = path[-1] if path else ROOT
            p, draws = scores.distribution.at(node), draws_at.get(node)
            chosen = self.choose(scores.tree, draws, p, chance) if draws else chance.categorical(p)
            if not isinstance(chosen, Draw):
                return Verdict(tuple(path), chosen)
            path.append(chosen.node)

    @abstractmethod
    def choose(self, tree: TokenTree, draws: Seq[Draw], p: TokenDistribution, chance: Chance) -> Draw | int:
        """The one of ``draws`` (at least one) that is accepted, or the token to end with; ``p``: the target's."""
