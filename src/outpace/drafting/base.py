"""The Drafter protocol: propose a tree per sequence, then learn from the verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.metrics import CacheUse
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.targets.base import Scores, Sequence, TreeScores


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
    aux_hidden_state_layers: tuple[int, ...] = ()
    """Target layers whose residual stream ``on_prefill`` and ``observe`` want to read."""

    def chance(self, sequence: Sequence) -> Chance:
        """This round's random numbers for one request."""
        return sequence.chance.at(len(sequence.tokens), self.purpose)

    def nest(self, purpose: str) -> None:
        """Become part of a combination, with a stream of one's own. Drafters with parts pass it on."""
        self.purpose = purpose

    def begin(self, sequence: Sequence) -> None:  # noqa: B027 - stateless drafters have nothing to do
        """A request joins; its prompt is ``sequence.tokens``. Called before the target's prefill."""

    def on_prefill(self, sequence: Sequence, position: int, hidden_states: Mapping[int, Tensor]) -> None:  # noqa: B027
        """Taps of one prefill chunk, (rows, hidden) per layer, starting at ``position``. Only called with
        ``aux_hidden_state_layers``."""

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        """One tree per sequence, within its budget. An empty tree is a plain step."""

    def reusable_forward(self, sequences: Seq[Sequence]) -> Scores | None:
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
