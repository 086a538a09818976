"""The protocol of populations: who drafts for a group of sequences, and who decides about all of them together.

A verdict names *heirs*: each goes on from a member (its ancestor) along a path of that member's tree, with a
log-weight of its own. A member may have several heirs, or none; K/V is gathered by ancestor
(:mod:`outpace.engine.populations.gather`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outpace.core.chance import Chance
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.engine.populations.beam_options import BeamOptions
from outpace.engine.populations.ends import Ends
from outpace.targets.base import Sequence, TreeScores


@dataclass(eq=False, slots=True)
class Member:
    """A sequence of a group that still grows. ``log_weight``: of a beam the log-probability of its tokens, of a
    particle its importance weight."""

    sequence: Sequence
    log_weight: float = 0.0

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Its tokens after the prompt."""
        return tuple(self.sequence.tokens[self.sequence.prompt_length :])


@dataclass(frozen=True, slots=True)
class Heir:
    """A sequence after a round: that of member ``ancestor``, then the accepted nodes ``path`` of its tree, then
    ``token``."""

    ancestor: int
    path: tuple[int, ...]
    token: int
    log_weight: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence of a group that has ended.

    ``tokens``: after the prompt, a stop token included. ``score``: what it is ranked by, of a beam its log-probability
    divided by its length to the power of the length penalty, of a particle its share of all weights.
    """

    tokens: tuple[int, ...]
    log_weight: float
    score: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """What a rule decides about a group. ``layers``: draft tokens that were accepted on every heir's path; ``tokens``:
    by how many tokens the group grew. ``ended``: set in the last round, all hypotheses, the answer first."""

    heirs: tuple[Heir, ...]
    layers: int
    tokens: int
    ended: tuple[Hypothesis, ...] | None = None


class JointDraw(NamedTuple):
    """``token`` proposed after ``node`` of the tree of ``member``."""

    member: int
    node: int
    token: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Draws of one depth over a whole group, in order: without replacement from ``q``, or deterministic.

    ``q``: weights of all that could be drawn; None: nothing was drawn at random.
    """

    draws: tuple[JointDraw, ...]
    q: Mapping[JointDraw, float] | None = None


@dataclass(slots=True)
class Forest:
    """What is drafted for a group in one round: a tree for each member, and how its nodes were drawn, layer by layer.

    Where each sequence is drafted for by itself the trees' own draws and q rows tell, and there are no layers.
    """

    trees: list[TokenTree]
    layers: list[Layer] = field(default_factory=list)


class GroupDrafter(ABC):
    """Drafts for all sequences of a group together."""

    def begin(self, prompt: Sequence) -> Any:
        """A group joins; returns what is kept of it."""
        return None

    @abstractmethod
    def propose(self, state: Any, members: Seq[Member], room: int, chance: Chance) -> Forest:
        """A forest of at most ``room`` layers. The rule's numbers are another stream than ``chance``."""

    def observe(self, state: Any, forest: Forest, heirs: Seq[Heir]) -> None:  # noqa: B027 - some keep nothing
        """The round is over: ``heirs`` are the members of the next one."""

    def end(self, state: Any) -> None:  # noqa: B027 - some hold nothing
        """The group left: release what is held of it."""

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K/V that it holds for a member of so many tokens."""
        return 0

    def most_nodes(self, members: int) -> int:
        """Nodes of a forest for so many members, at most."""
        return 0


class NoForest(GroupDrafter):
    """Drafts nothing: a round is an autoregressive step of every member."""

    def propose(self, state: Any, members: Seq[Member], room: int, chance: Chance) -> Forest:
        return Forest([TokenTree() for _ in members])


class GroupRule(ABC):
    """Decides which sequences a group consists of after a round."""

    first_members: int = 1
    """Sequences that a group begins with, all of them the prompt."""

    def check(self, params: SamplingParams, limit: int) -> None:  # noqa: B027 - some take all
        """Raise BadInput for what it cannot honour in answers of up to ``limit`` tokens."""

    @abstractmethod
    def begin(self, ends: Ends) -> Any:
        """Its own state of one group; ``ends`` tells when its sequences end."""

    @abstractmethod
    def judge(
        self, state: Any, members: Seq[Member], forest: Forest, scores: Seq[TreeScores], chance: Chance
    ) -> GroupVerdict:
        """The verdict on one forest. Raises OutpaceError where the group cannot go on."""


@dataclass(frozen=True, slots=True)
class Population:
    """How the group of one request is decoded. ``size``: sequences that it may own at the same time; ``called``: what
    they are, in messages. ``beams``: the options of its beam search; None: it is none."""

    drafter: GroupDrafter
    rule: GroupRule
    size: int
    called: str
    beams: BeamOptions | None = None
