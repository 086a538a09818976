"""Lossy rules: settings, a promise about the committed token (:mod:`outpace.acceptance.bounds`), and common steps.

A lossy rule trades accuracy for accepted tokens by its settings. Above temperature 0 it never commits a token that the
request's sampling parameters exclude (at 0 they exclude nothing), and it is never a default. ``outpace certify METHOD
--rule RULE --level bound`` tests its promise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence as Seq
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel

from outpace.acceptance.base import TreeByTree, Verdict
from outpace.acceptance.bounds import Bound, NodeView
from outpace.acceptance.draws import draws_by_parent
from outpace.core.chance import Chance
from outpace.core.names import number_text
from outpace.core.tree import ROOT, Draw
from outpace.targets.base import TreeScores

S = TypeVar("S", bound=BaseModel)
Corners: TypeAlias = tuple[Mapping[str, Any], ...]


class LossyRule(TreeByTree, Generic[S]):
    """A rule that changes the output distribution, by an amount that its settings choose."""

    lossless = False
    takes_without_replacement = True
    corners: ClassVar[Corners] = ()
    """The settings at which its promise is certified; the defaults are among them."""

    settings: S

    def __init__(self, settings: S | None = None) -> None:
        self.settings = self.Settings() if settings is None else settings  # type: ignore[assignment]

    @property
    def described(self) -> str:
        values = ", ".join(f"{name}={_shown(value)}" for name, value in self.settings.model_dump().items())
        return f"{self.name}({values})"

    def __repr__(self) -> str:
        return self.described

    @property
    @abstractmethod
    def bound(self) -> Bound | None:
        """What it promises at every node; None: nothing."""

    @property
    def exact(self) -> bool:
        """Whether its settings leave the output distribution unchanged."""
        return False

    def limit(self, node: NodeView) -> float:
        """The limit of its bound at a node, at temperatures above 0."""
        raise NotImplementedError(f"rule '{self.name}' states no bound")

    def greedy_limit(self, node: NodeView) -> float:
        """The limit of the excess negative log-likelihood at a node, at temperature 0."""
        return 0.0


class NodeByNode(LossyRule[S]):
    """A lossy rule that walks down from the root and decides at every node by what is known there."""

    takes_unverified_draws = True
    by_node: Literal["", "chains", "trees", "drafts"] = "trees"

    def decide(self, scores: TreeScores, chance: Chance) -> Verdict:
        draws_at = draws_by_parent(scores.tree)
        path: list[int] = []
        while True:
            node = path[-1] if path else ROOT
            draws = draws_at.get(node)
            chosen = self.choose(scores, node, draws, chance) if draws else exact_token(scores, node, chance)
            if not isinstance(chosen, Draw):
                return Verdict(tuple(path), chosen)
            path.append(chosen.node)

    @abstractmethod
    def choose(self, scores: TreeScores, node: int, draws: Seq[Draw], chance: Chance) -> Draw | int:
        """The one of ``draws`` (at least one, made after ``node``) that is accepted, or the token to end with."""


def exact_token(scores: TreeScores, node: int, chance: Chance) -> int:
    """A token of the target's own distribution after ``node``."""
    if scores.sequence.params.greedy:
        return scores.argmax(node)
    return chance.categorical(scores.distribution.at(node))


def _shown(value: Any) -> str:
    return number_text(value) if isinstance(value, float) else str(value)
