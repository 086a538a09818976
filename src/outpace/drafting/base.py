"""The Drafter protocol: propose a tree per sequence, then learn from the verdict.

A drafter that looks at one sequence at a time writes three methods, and the engine keeps the state between them::

    class MyDrafter(Drafter[MyState]):
        def begin(self, sequence: Sequence) -> MyState: ...
        def propose(self, state: MyState, budget: Budget) -> TokenTree: ...
        def observe(self, state: MyState, verdict: Verdict) -> None: ...

A drafter that runs a model for all sequences at once overrides ``propose_batch`` and ``observe_batch`` instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.chance import Chance
from outpace.core.metrics import CacheUse
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.drafting.namespaces import EarlierRequests, Namespaces
from outpace.targets.base import Scores, Sequence

if TYPE_CHECKING:
    from torch import Tensor

S = TypeVar("S")
"""What a drafter keeps of one request, whatever that is."""


@dataclass(slots=True)
class DraftState:
    """A beginning for states: the sequence, from which a drafter reads tokens, sampling parameters and references."""

    sequence: Sequence


class Drafter(ABC, Generic[S]):
    """Proposes draft tokens.

    A drafter samples with :meth:`chance` and nothing else, gives every sampled draw the row that it was drawn from, and
    never drops a sampled draw for its token or its q. It may be part of a combination: the tree that was scored may
    hold more than it proposed, or come from another drafter; ``propose`` may be left out in a round, ``observe`` never
    is.
    """

    proposal: Proposal = Proposal()
    """Which trees it builds; acceptance rules are checked against it when a Method is built."""
    purpose: str = "draft"
    """Names its stream of random numbers; parts of a combination have one each."""
    learns_from_rejected: bool = False
    """Whether it learns from every row that was scored, those of other drafters' rejected draft tokens included."""
    asks_policy: bool = False
    """Whether it asks the budget's policy before each draw, with the row that it would draw from."""
    weighs_costs: bool = False
    """Whether it estimates how likely its draft tokens are accepted, and drafts by the budget's relative costs."""
    states_draft_steps: bool = False
    """Whether :meth:`draft_steps` is what its drafts took, 0 of those that are as good as free. Where it is not known,
    batches of answers that must repeat, which read no clock, do not rest."""
    needs_target_internals: bool = False
    """Whether it needs more of the target than scores of trees: sub-graphs, auxiliary tokens, hidden states."""
    aux_hidden_state_layers: tuple[int, ...] = ()
    """Target layers whose input hidden states ``on_prefill`` and ``observe`` read; the number of layers is the last
    layer's output."""

    recent_tokens: int | None = None
    """How many tokens it reads at most before a draft, the newest of those that it has not read; None: all."""

    @property
    def prefill_layers(self) -> tuple[int, ...]:
        """Those of ``aux_hidden_state_layers`` whose states of the prompt ``on_prefill`` reads: all, where nothing else
        is said. K/V of an earlier turn can be continued only where these were kept with it."""
        return self.aux_hidden_state_layers

    def observed_layers(self, states: Seq[S], idle: int) -> Seq[int]:
        """Those of ``aux_hidden_state_layers`` whose states ``observe`` reads in the round under way.

        All, where nothing else is said. ``idle``: so many rounds at least follow before the next draft, unless the
        batch changes; 0: the next round may have one. A drafter that leaves layers out may still get them, where
        others read them; then, and where it is asked sooner, it drafts with what it has (:meth:`ready`).
        """
        return self.aux_hidden_state_layers

    @cached_property
    def earlier(self) -> EarlierRequests:
        """Its requests so far, by namespace and seed: they live as long as what it keeps of the namespaces."""
        return EarlierRequests()

    @property
    def remembers(self) -> bool:
        """Whether it keeps anything of a request for later ones of its namespace. Drafters with parts ask these too."""
        return any(isinstance(one, Namespaces) for one in vars(self).values())

    @abstractmethod
    def begin(self, sequence: Sequence) -> S:
        """A request joins; its prompt is ``sequence.tokens``. Returns its state. Called before the target's prefill."""

    def ready(self, state: S) -> bool:
        """Whether it has what it needs of the last round for a draft."""
        return True

    def propose(self, state: S, budget: Budget) -> TokenTree:
        """A tree for one sequence, within its budget. An empty tree is an autoregressive step."""
        raise NotImplementedError(f"{type(self).__name__} has neither propose nor propose_batch")

    def observe(self, state: S, verdict: Verdict) -> None:
        """The round is over: ``state.sequence.tokens`` holds what was committed; ``verdict.scores`` are the round's."""

    def propose_batch(self, states: Seq[S], budgets: Seq[Budget]) -> list[TokenTree]:
        """One tree per sequence. The default asks :meth:`propose` for each."""
        return [self.propose(state, budget) for state, budget in zip(states, budgets, strict=True)]

    def observe_batch(self, states: Seq[S], verdicts: Seq[Verdict]) -> None:
        """The round's verdicts, one per sequence. The default hands each to :meth:`observe`."""
        for state, verdict in zip(states, verdicts, strict=True):
            self.observe(state, verdict)

    def rested(self, states: Seq[S], verdicts: Seq[Verdict]) -> None:
        """Called in place of :meth:`observe_batch` after a round of a batch in which drafts do not pay: nobody was
        asked for one, and no hidden states were read. A drafter that learns nothing of such rounds does without."""
        self.observe_batch(states, verdicts)

    def on_prefill(self, state: S, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        """Hidden states of one prefill chunk that starts at ``position``: (rows, hidden) by layer.

        Only called with ``prefill_layers``.
        """

    def reusable_forward(self, states: Seq[S]) -> Scores | None:
        """A forward of the target over beginnings of the trees just proposed for exactly these sequences, if any.

        Its layers below the first that was skipped need not run again; see ``Target.score(resume=)``.
        """
        return None

    def may_be_cut(self, tree: TokenTree, *, greedy: bool) -> bool:
        """Whether nodes of one of its trees may be left out: not where it samples, nor beside auxiliary tokens.

        Where the request samples, by what the drafter declares: whether a sampled tree came out deterministic may
        depend on its draws.
        """
        if tree.auxiliary_tokens:
            return False
        return tree.is_deterministic if greedy else not self.proposal.sampled

    def draft_steps(self, states: Seq[S]) -> float:
        """What the drafts just proposed for these sequences took, in autoregressive steps of the round; 0 where that is
        little or not known. Rows are allotted to draft tokens with this time already spent."""
        return 0.0

    def expected_seconds(self, prompt: Seq[int], length: int, *, greedy: bool) -> float | None:
        """What an answer of ``length`` tokens to ``prompt`` is expected to take if it is asked for now, prefill
        included; None: this drafter does not predict it."""
        return None

    def measure(self, batch: int, *, sampled: bool | None = None) -> None:
        """Measure now what it would measure when ``batch`` requests first draft together: ``sampled`` ones, or greedy
        ones; None: both."""

    def caches(self, state: S) -> tuple[CacheUse, ...]:
        """What it keeps for this request's namespace, and how much of it. Asked before ``end``."""
        return ()

    def drafting(self, state: S) -> dict[str, int]:
        """In how many rounds of this request each of its parts drafted, where it has parts. Asked before ``end``."""
        return {}

    def drafted_by(self, state: S, path: Seq[int]) -> list[str | None]:
        """Which part drafted each token of ``path``, tokens from the root of the round's tree down; None: no part, but
        the drafter itself. Asked before ``observe``, for requests with ``sources``."""
        return [None] * len(path)

    def end(self, state: S) -> None:
        """The request left: release what the garbage collector does not (K/V, a place in a namespace)."""

    def rewind(self, state: S, sequence: Sequence, kept: int) -> S:
        """Tokens of ``sequence`` from index ``kept`` on were replaced; returns the state to go on with.

        Only requests of a decoder inside a drafter live through this. The default starts afresh; drafters whose
        K/V would be expensive to compute again keep what still holds.
        """
        self.end(state)
        return self.begin(sequence)

    def chance(self, sequence: Sequence) -> Chance:
        """This round's random numbers for one request."""
        return sequence.chance.at(len(sequence.tokens), self.purpose)

    def nest(self, purpose: str) -> None:
        """Become part of a combination, with a stream of one's own. Drafters with parts pass it on."""
        self.purpose = purpose
