"""The drafter of ``auto``: each round the free part, the learned part, both or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget, Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.predictor import Predictor, nominal_costs
from outpace.controllers.row_allocation import mean_costs, most_rate, raised
from outpace.controllers.yields import HORIZON, Clock, Plan, Standing, Yield, after_toll, plan
from outpace.core.token_distribution import TokenDistribution
from outpace.core.tree import DETERMINISTIC, ROOT, TokenTree
from outpace.drafting.agreement import mixture
from outpace.drafting.base import Drafter
from outpace.drafting.combination import part_budget
from outpace.drafting.merged import NO_DRAFT, MergedTrees, MergeState, contributed, cut
from outpace.drafting.namespaces import Namespaces
from outpace.engine.rehearsal import draft_seconds
from outpace.targets.base import Sequence, Target

HOPE = 1.1
"""Tokens per time of a round whose draft tokens are all accepted, beside one without any, that make it worth asking
for."""
NOMINAL_DRAFT = 0.25
"""A learned draft's time in autoregressive steps, where costs are fixed."""
BESIDE = 16
"""Tokens of a text that the learned part reads in no more time than a draft takes."""
SOON_READ = 256
"""Tokens of a text that the learned part reads in little more time than it drafts."""


@dataclass(slots=True)
class _Shared:
    """What the greedy requests of a process have seen of a learned part beside a target."""

    standing: Standing = field(default_factory=Standing)
    clock: Clock = field(default_factory=Clock)


_SHARED: WeakKeyDictionary[Target, dict[str, _Shared]] = WeakKeyDictionary()
"""By the identity of the learned part."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A round in which the learned part was asked: the tokens there were, the draft that the round would have had
    without it, how likely that draft's first tokens are, and what the learned part has drafted."""

    at: int
    alone: TokenTree
    copied: float
    learned: TokenTree


@dataclass(slots=True)
class AutoState(MergeState):
    """What the namespace knows, and the round under way."""

    known: Yield = field(kw_only=True)
    free: TokenTree = field(default_factory=lambda: NO_DRAFT)
    asked: _Asked | None = None
    spent: float = 0.0
    """What the learned draft has taken, in autoregressive steps of the round."""
    read: int = 0
    """Tokens there were when the learned part drafted last: it reads those that came since before its next draft."""

    @property
    def unread(self) -> int:
        """Tokens that the learned part has yet to read, where they are more than it reads beside a draft."""
        count = len(self.sequence.tokens) - self.read
        return count if count > BESIDE else 0


class _Timing(NamedTuple):
    """What the time of a learned draft depends on: how many requests share the round, about how many tokens the longest
    one has, and whether all are greedy."""

    batch: int
    context: int
    live: bool


class Auto(MergedTrees[AutoState]):
    """``parts``: the free one, and the learned one where there is one, whose budgets ``controller`` gives when its
    draft is timed. ``identity``: tells the learned part from others beside the target. ``proven``: whether that was
    measured to make decoding faster."""

    def __init__(
        self,
        parts: Seq[Drafter[Any]],
        names: Seq[str],
        target: Target,
        namespaces: int = 64,
        *,
        controller: Controller | None = None,
        identity: Callable[[], str] = str,
        proven: bool = False,
    ) -> None:
        super().__init__(parts, names)
        self.target = target
        self._predictor = Predictor(target.costs)
        self._controller = controller or CostModel(target.costs)
        self._identity, self._proven = identity, proven
        self._steps: dict[tuple[int, int, int, bool], float] = {}
        """Of learned drafts, by their number, the batch, the context and whether requests are greedy."""
        self._version = target.costs.version
        self._memory = Namespaces(lambda: Yield(self._shared.standing), namespaces)
        self._sampled_memory = Namespaces(lambda: Yield(proven=proven), namespaces)
        """Of sampled requests, whose drafts must not depend on what other requests' clocks have shown."""

    @cached_property
    def _name(self) -> str:
        """The learned part beside this target; a digest of its weights takes a while."""
        return self._identity()

    @cached_property
    def _shared(self) -> _Shared:
        return _SHARED.setdefault(self.target, {}).setdefault(self._name, _Shared(Standing(self._proven)))

    def opened(self, sequence: Sequence, parts: list[Any]) -> AutoState:
        memory = self._memory if sequence.params.greedy else self._sampled_memory
        return AutoState(sequence, parts, known=memory.open(sequence))

    def rewind(self, state: AutoState, sequence: Sequence, kept: int) -> AutoState:
        state.asked = None
        return super().rewind(state, sequence, kept)

    # ------------------------------------------------------------------------------------------------- drafting

    def propose_batch(self, states: Seq[AutoState], budgets: Seq[Budget]) -> list[TokenTree]:
        for state in states:
            state.asked, state.spent = None, 0.0
        if len(self.parts) == 1:
            return self._alone(states, self.ask(0, states, budgets))
        if _hopeless(budgets):
            return self._alone(states, [TokenTree() for _ in states])
        # With a draft's time spent anyway more tokens gain; the free part shows what it has for that case.
        timed = _timing(states, budgets)
        steps = self._drafting(timed, 1)
        later = {key: _free_after(one, steps) for key, one in {id(one): one for one in budgets}.items()}
        self._alone(states, self.ask_within(0, states, [later[id(one)] for one in budgets]))
        # Where costs do not depend on the batch, neither may the decision.
        if len(states) == 1 or any(one.base_tokens > 1.0 for one in budgets):
            self._decide(states, budgets, timed)
        else:
            for state, budget in zip(states, budgets, strict=True):
                self._decide([state], [budget], _timing([state], [budget]))
        return [state.united for state in states]

    @staticmethod
    def _alone(states: Seq[AutoState], trees: list[TokenTree]) -> list[TokenTree]:
        """The free part's drafts, as if nothing else drafted."""
        for state, tree in zip(states, trees, strict=True):
            state.free = state.united = tree
        return trees

    def _decide(self, states: Seq[AutoState], budgets: Seq[Budget], timed: _Timing) -> None:
        """Choose the drafts of requests that share a round, or of one alone."""
        ranked = [state.free.likeliest_first() for state in states]
        probs = [one for _, one in ranked]
        copied = [_first(state.free) for state in states]
        able = [(budget.parts[1] if budget.parts else budget).depth > 0 for budget in budgets]
        costs = mean_costs([budget.relative_costs for budget in budgets])
        if not costs:  # the parts' lengths are fixed
            costs = nominal_costs(max(one.max_nodes for one in budgets))
        base = max([budget.base_tokens for budget in budgets])

        def chosen(offers: Seq[Seq[float]]) -> Plan:
            return plan(probs, offers, costs, base, lambda size: self._drafting(timed, size))

        tolls = [self._toll(state, timed, base) if state.unread else 0.0 for state in states]
        offers = [_offer(s, c) if a else [] for s, c, a in zip(states, copied, able, strict=True)]
        found = chosen([after_toll(offer, toll) for offer, toll in zip(offers, tolls, strict=True)])
        due = [a and state.known.due() for state, a in zip(states, able, strict=True)]
        trial = not found.asked and any(due)
        if trial:
            offers = [s.known.at_best(c) if d else [] for s, c, d in zip(states, copied, due, strict=True)]
            found = chosen([after_toll(offer, toll) for offer, toll in zip(offers, tolls, strict=True)])
        for at, (state, count) in enumerate(zip(states, found.counts, strict=True)):
            asked = at in found.asked
            state.known.passed(asked=asked, trial=trial and asked)
            if count < len(state.free) and not state.free.auxiliary_tokens:
                state.united = state.free.only(ranked[at][0][:count])
            if asked:
                state.asked = _Asked(len(state.sequence.tokens), state.united, copied[at], TokenTree())
                state.spent = found.drafting
        if found.asked:
            self._join([states[at] for at in found.asked], [budgets[at] for at in found.asked])

    def _join(self, asking: Seq[AutoState], budgets: Seq[Budget]) -> None:
        """Let the learned part draft for some of the sequences, and unite its trees with the free part's."""
        unread = sum([state.unread for state in asking])
        began = perf_counter()
        drafted = self.ask(1, asking, budgets)
        self._timed(asking, unread, perf_counter() - began)
        for state, budget, tree in zip(asking, budgets, drafted, strict=True):
            assert state.asked is not None
            state.united = self.unite(
                (state.free, tree), budget.after(state.spent), greedy=state.sequence.params.greedy
            )
            state.asked = replace(state.asked, learned=tree)
            state.read = len(state.sequence.tokens)

    def unite(self, trees: Seq[TokenTree], budget: Budget, *, greedy: bool) -> TokenTree:
        free, learned = trees
        if not free and self.parts[1].may_be_cut(learned, greedy=greedy):
            return learned  # its drafter has chosen its size
        if not free or not learned or free.auxiliary_tokens or learned.auxiliary_tokens:
            return super().unite(trees, budget, greedy=greedy)
        if self.parts[1].may_be_cut(learned, greedy=greedy):
            whole = TokenTree.merge(trees)
            whole.path_acceptance_probs = mixture(whole, free, learned)
            return cut(whole, budget)
        # A draw that is judged before deterministic tokens is accepted most often.
        return TokenTree.merge((learned, _beside_draws(free, budget)))

    def draft_steps(self, states: Seq[AutoState]) -> float:
        return max((state.spent for state in states), default=0.0)

    # --------------------------------------------------------------------------------------------------- time

    def _drafting(self, timed: _Timing, count: int) -> float:
        """What a learned draft for ``count`` of the sequences takes, in autoregressive steps of the round."""
        version = self.target.costs.version
        if self._version != version:
            self._version = version
            self._steps.clear()
        known = count, *timed
        found = self._steps.get(known)
        if found is None:  # asked several times in every round
            found = self._steps[known] = self._predictor.draft_steps(
                lambda: self._draft_seconds(count, timed.live), NOMINAL_DRAFT, *timed[:2], live=timed.live
            )
        return found

    def _draft_seconds(self, count: int, live: bool) -> float:
        """A sampled answer must not depend on this clock: it goes by one rehearsal, kept with the target's costs."""
        usual = self._shared.clock.seconds(count) if live else None
        return self._rehearsed(count, not live) if usual is None else usual

    def _rehearsed(self, count: int, sampled: bool) -> float:
        size = 1 << (count - 1).bit_length()
        return self.target.costs.once(
            self._rehearsal(size, sampled),
            lambda: draft_seconds(self.target, self.parts[1], self._controller, size, sampled=sampled),
        )

    def measure(self, batch: int) -> None:
        super().measure(batch)
        if len(self.parts) > 1 and not self.target.costs.fixed:
            for sampled in (False, True):
                self._rehearsed(batch, sampled)

    def _rehearsal(self, size: int, sampled: bool) -> str:
        kind = "sampled sequences" if sampled else "sequences"
        return f"draft of {self.names[1]} {self._name} for {size} {kind}"

    def _toll(self, state: AutoState, timed: _Timing, base_tokens: float) -> float:
        """Tokens that the target gives in the time in which the learned part reads a text, for each draft after it."""
        if not timed.live:
            return 0.0
        seconds = self._shared.clock.reading(state.unread)
        steps = self._predictor.draft_steps(lambda: seconds, 0.0, *timed[:2], live=True)
        return steps * base_tokens / HORIZON

    def _timed(self, asking: Seq[AutoState], unread: int, seconds: float) -> None:
        """A draft took so long, which read ``unread`` tokens first. A recorded time that proves too long was measured
        while the machine was busy."""
        if not _greedy(asking):
            return
        clock, count = self._shared.clock, len(asking)
        if unread:
            clock.read_text(unread, count, seconds)
        if unread or not clock.read(count, seconds):
            return
        self._steps.clear()
        usual = clock.settled(count)
        if usual is not None:
            self.target.costs.correct(self._rehearsal(1 << (count - 1).bit_length(), False), usual)

    # ------------------------------------------------------------------------------------------------- learning

    def part_trees(self, state: AutoState) -> Seq[TokenTree]:
        return (state.free,) if state.asked is None else (state.free, state.asked.learned)

    def drafting(self, state: AutoState) -> dict[str, int]:
        found = super().drafting(state)
        if state.sequence.sampler.grammar is None:
            return found
        return found | self.parts[0].drafting(state.parts[0])  # what the grammar drafted stands beside the free part

    def observe_batch(self, states: Seq[AutoState], verdicts: Seq[Verdict]) -> None:
        super().observe_batch(states, verdicts)
        for state, verdict in zip(states, verdicts, strict=True):
            scored, asked = verdict.scores.tree, state.asked
            if scored:
                for name, tree in zip(self.names, self.part_trees(state), strict=False):
                    state.rounds[name] += contributed(tree, scored)
            if asked is not None and state.sequence.params.greedy:
                _learn(state.known, asked, state.sequence.tokens[asked.at :], scored)
            elif asked is not None:
                _learn_by_target(state.known, asked, scored, verdict.target_row(0))
            state.free, state.asked = NO_DRAFT, None


def _offer(state: AutoState, copied: float) -> list[float]:
    """What the learned part is expected to add. Of a request that it has not drafted for its own probabilities tell
    more than other requests do: one look is worth it where the prompt is soon read."""
    unseen = not state.read and len(state.sequence.tokens) <= SOON_READ
    return state.known.at_best(copied) if unseen and state.known.hopeful else state.known.expected(copied)


def _learn(known: Yield, asked: _Asked, committed: Seq[int], scored: TokenTree) -> None:
    """What a learned draft has added to the round, and had promised to."""
    without = min(len(committed), 1 + len(asked.alone.follow(committed)))
    learned = asked.learned
    own = set(range(len(learned))) if scored is learned else _shared_nodes(learned, scored)
    own -= _shared_nodes(learned, asked.alone) if asked.alone.tokens else set()
    promised = (1.0 - min(1.0, asked.copied)) * sum([learned.path_acceptance_probs[node] for node in own])
    known.learn(sorted(learned.path_acceptance_probs, reverse=True), promised, len(committed) - without)


def _learn_by_target(known: Yield, asked: _Asked, scored: TokenTree, p: TokenDistribution) -> None:
    """The same of a request that samples, for the first level: how likely its tokens would have been accepted, by the
    target's distribution ``p`` after the root. Whether one was varies much more."""
    own = _shared_nodes(asked.learned, scored) - _shared_nodes(asked.learned, asked.alone)
    first = [node for node in asked.learned.children(ROOT) if node in own]
    drawn = {draw.node: draw.q_row for draw in asked.learned.draws_at(ROOT) if draw.q_row != DETERMINISTIC}
    promised = added = 0.0
    for node in first:
        token = asked.learned.tokens[node]
        promised += asked.learned.path_acceptance_probs[node]
        q = asked.learned.q_rows[drawn[node]].prob(token) if node in drawn else 1.0
        added += min(1.0, p[token] / q) if q > 0.0 else 0.0
    probs = sorted(asked.learned.path_acceptance_probs, reverse=True)
    known.learn(probs, (1.0 - min(1.0, asked.copied)) * promised, min(1.0, added))


def _shared_nodes(tree: TokenTree, other: TokenTree) -> set[int]:
    """Nodes of ``tree`` that ``other`` has too."""
    where = {ROOT: ROOT}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        at = where.get(parent)
        found = None if at is None else other.child(at, token)
        if found is not None:
            where[node] = found
    return where.keys() - {ROOT}


def _beside_draws(free: TokenTree, budget: Budget) -> TokenTree:
    """What of the free part's draft is worth its rows beside draws, whatever those turn out to be: where the choice
    depended on them, a draw's chance of being accepted would."""
    discounted = free.only(range(len(free)))
    first = _first(free)
    discounted.path_acceptance_probs = [first * prob for prob in free.path_acceptance_probs]
    return cut(discounted, budget)


def _hopeless(budgets: Seq[Budget]) -> bool:
    """Whether a round of a batch would gain too little even if every draft token in it were accepted."""
    base = max([budget.base_tokens for budget in budgets])
    costs = mean_costs([budget.relative_costs for budget in budgets])
    return base > 1.0 and bool(costs) and most_rate(costs, base) < HOPE * base / costs[0]


def _free_after(budget: Budget, steps: float) -> Budget:
    """The free part's budget in a round in which a draft has already taken ``steps``."""
    return part_budget(budget, 0).costing(raised(budget.relative_costs, steps)) if steps else part_budget(budget, 0)


def _timing(states: Seq[AutoState], budgets: Seq[Budget]) -> _Timing:
    longest = max([len(state.sequence.tokens) for state in states])
    return _Timing(int(budgets[0].base_tokens), 1 << longest.bit_length(), _greedy(states))


def _greedy(states: Seq[AutoState]) -> bool:
    return all(state.sequence.params.greedy for state in states)


def _first(tree: TokenTree) -> float:
    """How likely one of the first draft tokens is accepted."""
    if not tree.tokens:
        return 0.0
    return min(1.0, sum(tree.path_acceptance_probs[node] for node in tree.children(ROOT)))
