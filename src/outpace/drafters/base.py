"""The Drafter protocol: propose a tree per sequence, then learn from the verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.chance import Chance
from outpace.controllers.base import Budget
from outpace.metrics import CacheUse
from outpace.targets.base import Scores, Sequence, TreeScores
from outpace.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Proposal:
    """What kind of trees a drafter builds; rules are checked against it when a Method is built."""

    tree: bool = False
    """Whether a node may have several children (or draws)."""
    sampled: bool = False
    """Whether draws may be random, each with the q row that it was sampled from."""
    replacement: bool = True
    """Whether sibling draws are sampled with replacement."""
    single: bool = False
    """Whether a node has at most one sampled draw, its siblings being functions of the path to the node alone: were
    they chosen with a look at the sample, rules that weigh a node's draws as one set would be biased."""

    carried: bool = False
    """Whether draws that the verdict did not reach live on into later rounds: then no rule may have looked at them."""

    mixed: bool = False
    """Whether siblings may come from several rows, or some of them be deterministic: drafters that are combined."""

    def __str__(self) -> str:
        shape = "trees" if self.tree else "chains"
        if self.tree and self.single:
            return f"{shape} of deterministic draft tokens with one sampled sibling each"
        if not self.sampled:
            return f"{shape} of deterministic draft tokens"
        return f"{shape} of sampled draft tokens" + ("" if self.replacement else " without replacement")


class Drafter(ABC):
    """Proposes draft tokens. State is kept per sequence, from ``begin`` to ``end``.

    A drafter samples with :meth:`chance` and nothing else, gives every sampled draw the row it came from, and never
    drops a sampled draw for its token or its q.

    Drafters combine: the tree that was scored may hold more than was proposed, or come from another drafter, and
    ``propose`` may be left out in a round, ``observe`` never is.
    """

    proposal: Proposal = Proposal()
    purpose: str = "draft"
    """Names its stream of random numbers; parts of a combination have one each."""
    reads_all: bool = False
    """Whether it learns from every row that was scored, those of other drafters' rejected draft tokens included."""
    needs_whole: bool = False
    """Whether it needs more of the target than scores of trees: sub-graphs, side nodes, taps."""
    taps: tuple[int, ...] = ()
    """Target layers whose residual stream ``on_prefill`` and ``observe`` want to read."""

    def chance(self, sequence: Sequence) -> Chance:
        """This round's random numbers for one request."""
        return sequence.chance.at(len(sequence.tokens), self.purpose)

    def nest(self, purpose: str) -> None:
        """Become part of a combination, with a stream of one's own. Drafters with parts pass it on."""
        self.purpose = purpose

    def begin(self, sequence: Sequence) -> None:  # noqa: B027 - stateless drafters have nothing to do
        """A request joins; its prompt is ``sequence.tokens``. Called before the target's prefill."""

    def on_prefill(self, sequence: Sequence, position: int, taps: Mapping[int, Tensor]) -> None:  # noqa: B027
        """Taps of one prefill chunk, (rows, hidden) per layer, starting at ``position``. Only called with ``taps``."""

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        """One tree per sequence, within its budget. An empty tree is a plain step."""

    def head_start(self, sequences: Seq[Sequence]) -> Scores | None:
        """A pass of the very target over beginnings of the trees just proposed for exactly these sequences, if any.

        Its layers below the first that was skipped need not run again; see ``Target.score(resume=)``.
        """
        return None

    def observe(  # noqa: B027
        self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]
    ) -> None:
        """The round is over: ``sequence.tokens`` already holds what was committed; ``scores`` are the round's."""

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """``twin`` starts as a copy of ``sequence``. The default starts afresh."""
        self.begin(twin)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        """Tokens from index ``kept`` on were taken back, and perhaps others committed instead.

        Only requests of a decoder inside a drafter live through this. The default starts afresh.
        """
        self.end(sequence)
        self.begin(sequence)

    def caches(self, sequence: Sequence) -> tuple[CacheUse, ...]:
        """What it keeps for this request's namespace, and how much of it. Asked before ``end``."""
        return ()

    def drafting(self, sequence: Sequence) -> dict[str, int]:
        """In how many rounds of this request each of its parts drafted, where it chooses. Asked before ``end``."""
        return {}

    def end(self, sequence: Sequence) -> None:  # noqa: B027
        """The request left; forget it."""
