"""ControlledDrafter: a drafter under a controller that decides within drafts, and learns from their verdicts.

The controller's policy gets to limit every budget, is asked by the drafter before each draw, and is told of every
verdict. Where there is a companion, it scores the draft, and the policy says how much of it is verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.named import NamedController
from outpace.controllers.policy import DraftPolicy
from outpace.controllers.sv import VerificationPolicy
from outpace.core.metrics import CacheUse
from outpace.core.tree import DETERMINISTIC, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.companion import Companion, agreements, chain_prefix, overlap
from outpace.drafting.model_drafter import ModelDraftState
from outpace.drafting.namespaces import Namespaces
from outpace.targets.base import Scores, Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class ControlledState(DraftState):
    """``inner``: the drafter's own state. ``tree``: what was proposed in this round; ``whole``: uncut."""

    inner: Any
    policy: DraftPolicy
    companion: ModelDraftState | None = None
    tree: TokenTree = field(default_factory=TokenTree)
    whole: bool = True


class ControlledDrafter(Drafter[ControlledState]):
    """``inner`` under ``controller``. ``companion``: scores its drafts, for policies that are VerificationPolicy."""

    def __init__(self, inner: Drafter[Any], controller: NamedController, companion: Companion | None = None) -> None:
        self.inner, self.companion = inner, companion
        self._controller = controller
        self._memories: Namespaces[Any] = Namespaces(controller.memory)
        self.proposal = inner.proposal
        self.learns_from_rejected = inner.learns_from_rejected
        self.needs_target_internals = inner.needs_target_internals
        self.aux_hidden_state_layers = inner.aux_hidden_state_layers
        self.asks_policy, self.weighs_costs = inner.asks_policy, inner.weighs_costs
        self.states_draft_steps = inner.states_draft_steps
        self.nest(inner.purpose)

    @property
    def prefill_layers(self) -> tuple[int, ...]:
        return self.inner.prefill_layers

    def observed_layers(self, states: Seq[ControlledState], idle: int) -> Seq[int]:
        return self.inner.observed_layers([state.inner for state in states], idle)

    @property
    def remembers(self) -> bool:
        return self.inner.remembers or self._controller.memory() is not None

    def nest(self, purpose: str) -> None:
        self.purpose = purpose
        self.inner.nest(purpose)

    def begin(self, sequence: Sequence) -> ControlledState:
        policy = self._controller.policy(self._memories.open(sequence), sampled=not sequence.params.greedy)
        companion = None if self.companion is None else self.companion.begin(sequence)
        return ControlledState(sequence, self.inner.begin(sequence), policy or DraftPolicy(), companion)

    def on_prefill(self, state: ControlledState, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        self.inner.on_prefill(state.inner, position, hidden_states)

    def propose_batch(self, states: Seq[ControlledState], budgets: Seq[Budget]) -> list[TokenTree]:
        limited = [state.policy.budget(budget) for state, budget in zip(states, budgets, strict=True)]
        asked = [at for at, budget in enumerate(limited) if budget.depth > 0 and budget.max_nodes > 0]
        for state in states:
            state.tree, state.whole = TokenTree(), True
        if asked:
            mine = [replace(limited[at], policy=states[at].policy) for at in asked]
            trees = self.inner.propose_batch([states[at].inner for at in asked], mine)
            for at, tree in zip(asked, trees, strict=True):
                states[at].tree = tree
                if self.may_be_cut(tree, greedy=states[at].sequence.params.greedy) and len(tree):
                    states[at].policy.rated(tree)
            self._verify([states[at] for at in asked if len(states[at].tree)])
        return [state.tree for state in states]

    def _verify(self, states: Seq[ControlledState]) -> None:
        """Cut the drafts to what the companion expects to be accepted."""
        if self.companion is None or not states:
            return
        found = self.companion.score([one.companion for one in states if one.companion], [one.tree for one in states])
        for state, distribution in zip(states, found, strict=True):
            if distribution is not None:
                before = len(state.tree)
                state.tree = self._cut(state, distribution)
                state.whole = len(state.tree) == before

    def _cut(self, state: ControlledState, found: TreeDistribution) -> TokenTree:
        tree, policy, greedy = state.tree, state.policy, state.sequence.params.greedy
        assert isinstance(policy, VerificationPolicy)
        if self.may_be_cut(tree, greedy=greedy):
            return policy.kept(tree, agreements(tree, found, greedy=greedy))
        for kept, draw in enumerate(tree.draws):
            if draw.q_row == DETERMINISTIC:  # beside auxiliary tokens, or of a part of a drafter that also samples
                return tree
            after = found.at(draw.parent)
            # Of one draw at a time: whether it stays must not depend on it, nor on what follows it.
            if not policy.keeps(kept + 1, overlap(after, tree.q_rows[draw.q_row].distribution(after))):
                return chain_prefix(tree, kept)
        return tree

    def observe_batch(self, states: Seq[ControlledState], verdicts: Seq[Verdict]) -> None:
        self.inner.observe_batch([state.inner for state in states], verdicts)
        if self.companion is not None:
            self.companion.observe_batch([state.companion for state in states if state.companion], verdicts)
        for state, verdict in zip(states, verdicts, strict=True):
            state.policy.learn(state.tree, verdict.committed)
            state.tree = TokenTree()

    def observe(self, state: ControlledState, verdict: Verdict) -> None:
        self.observe_batch([state], [verdict])

    def reusable_forward(self, states: Seq[ControlledState]) -> Scores | None:
        if not all(state.whole for state in states):  # it is of trees that were cut since
            return None
        return self.inner.reusable_forward([state.inner for state in states])

    def may_be_cut(self, tree: TokenTree, *, greedy: bool) -> bool:
        return self.inner.may_be_cut(tree, greedy=greedy)

    def draft_steps(self, states: Seq[ControlledState]) -> float:
        known = self.inner.draft_steps([state.inner for state in states])
        return max([known, *(state.policy.spent for state in states)])

    def caches(self, state: ControlledState) -> tuple[CacheUse, ...]:
        return self.inner.caches(state.inner)

    def drafting(self, state: ControlledState) -> dict[str, int]:
        return self.inner.drafting(state.inner)

    def drafted_by(self, state: ControlledState, path: Seq[int]) -> list[str | None]:
        return self.inner.drafted_by(state.inner, path)

    def end(self, state: ControlledState) -> None:
        self.inner.end(state.inner)
        if self.companion is not None and state.companion is not None:
            self.companion.end(state.companion)

    def rewind(self, state: ControlledState, sequence: Sequence, kept: int) -> ControlledState:
        state.sequence, state.inner = sequence, self.inner.rewind(state.inner, sequence, kept)
        if self.companion is not None and state.companion is not None:
            state.companion = self.companion.rewind(state.companion, sequence, kept)
        return state
