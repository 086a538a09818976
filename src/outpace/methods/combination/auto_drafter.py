"""The drafter of ``auto``: each round the free part, the learned part, both or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import partial
from time import perf_counter
from typing import Any

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget, Controller
from outpace.controllers.learned_plan import Plan, after_toll, plan
from outpace.controllers.predictor import best_count, nominal_costs
from outpace.controllers.row_allocation import mean_costs, most_rate, raised
from outpace.controllers.yields import Yield
from outpace.core.tree import TokenTree
from outpace.drafting.agreement import mixed
from outpace.drafting.base import Drafter
from outpace.drafting.combination import part_budget
from outpace.drafting.merged import NO_DRAFT, MergedTrees, contributed
from outpace.drafting.namespaces import Namespaces
from outpace.methods.combination.auto_state import AutoState, first_chance
from outpace.methods.combination.learned_record import Asked, learn, learn_by_target
from outpace.methods.combination.learned_times import HOPELESS, BatchRests, LearnedTimes, Shared, Timing
from outpace.targets.base import Sequence, Target

HOPE = 1.1
"""Tokens per time of a round whose draft tokens are all accepted, beside one without any, that make it worth asking
for."""
TRIED = 0.05
"""What reading a text may take of the time that its answer has taken, where the learned part is tried against
expectation: a long prompt is read for a long answer alone."""
LEAST_AHEAD = 0.05
"""Least share of the rounds to come that is taken to draft."""
PATIENT, MOST_QUIET = 2, 10
"""Where the learned part is not asked although nothing is copied, the next rounds of a request that is alone do not
decide again, as that takes time: one more for each of so many rounds that it has not been asked in, so many at most.
Batches rest longer (:class:`~outpace.methods.combination.learned_times.BatchRest`)."""
_KEPT = 64
"""Budgets that are kept, at most."""


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
        self.states_draft_steps = parts[0].states_draft_steps  # the learned part's are known
        self.times = LearnedTimes(target, parts[-1], names[-1], controller, identity, proven=proven)
        self._asked = False
        """Whether the round under way asks for drafts."""
        self._after: dict[tuple[int, int, float], tuple[Budget, tuple[float, ...], Budget]] = {}
        """The free part's budgets beside drafts, last in each value; by the identities of what they were made of, which
        the values hold, and by what the drafts take."""
        self._memory = {timed: Namespaces(partial(Yield, proven=proven), namespaces) for timed in (False, True)}
        """By whether drafts may depend on what the clocks of other requests show."""

    def _shared(self, states: Seq[AutoState]) -> Shared:
        return self.times.shared(_sampled(states))

    def measure(self, batch: int, *, sampled: bool | None = None) -> None:
        super().measure(batch, sampled=sampled)
        if len(self.parts) > 1:
            self.times.measure(batch, sampled=sampled)

    def opened(self, sequence: Sequence, parts: list[Any]) -> AutoState:
        known = self._memory[sequence.timed].open(sequence)
        if sequence.timed:  # it may begin with what others like it have seen
            known.join(self.times.shared(not sequence.params.greedy).standings.of(len(sequence.tokens)))
        most_read = self.parts[-1].recent_tokens
        return AutoState(sequence, parts, known=known, began=len(sequence.tokens), most_read=most_read)

    def rewind(self, state: AutoState, sequence: Sequence, kept: int) -> AutoState:
        state.asked = None
        state = super().rewind(state, sequence, kept)
        state.began, state.read = len(sequence.tokens), min(state.read, kept)
        state.quiet = None
        state.drafted = state.rest = None  # what lies between two turns is no round
        return state

    # ------------------------------------------------------------------------------------------------- drafting

    def propose_batch(self, states: Seq[AutoState], budgets: Seq[Budget]) -> list[TokenTree]:
        alone = states[0] if len(states) == 1 and states[0].sequence.timed else None
        for state in states:
            state.asked, state.spent, state.drafted, state.steps, state.batch_rest = None, 0.0, None, None, None
            if alone is None:
                state.rest = None
        if len(self.parts) == 1:
            return self._alone(states, self.ask(0, states, budgets))
        if _hopeless(budgets):
            for state in states:
                state.batch_rest = HOPELESS
            return self._alone(states, [TokenTree() for _ in states])
        self._asked = True
        self._choose(states, budgets, _timing(states, budgets))
        for state, budget in zip(states, budgets, strict=True):
            costs = budget.relative_costs
            if costs and budget.base_tokens <= 1.0:  # of the request alone, whoever else is in the batch
                cost = costs[min(len(state.united), len(costs) - 1)]
                state.steps = cost + state.spent
                if state is alone:
                    state.drafted = perf_counter(), cost, state.asked is not None
        return [state.united for state in states]

    def _choose(self, states: Seq[AutoState], budgets: Seq[Budget], timed: Timing) -> None:
        """Draft with the free part, and with the learned one for those requests with which that gains."""
        batch = max([int(one.base_tokens) for one in budgets])
        if batch > 1:
            self._choose_in_batch(states, budgets, timed, batch)
            return
        self._alone(states, self.ask_within(0, states, self._free_budgets(states, budgets, timed)))
        for state, budget in zip(states, budgets, strict=True):  # costs do not depend on others, nor may the decision
            self._choose_for(state, budget, timed if len(states) == 1 else _timing([state], [budget]))

    def _choose_in_batch(self, states: Seq[AutoState], budgets: Seq[Budget], timed: Timing, batch: int) -> None:
        rounds = self.times.shared(timed.sampled).rounds if timed.live else self._rounds_together(states)
        rest = rounds.rest_of(batch)
        for state in states:
            state.quiet, state.batch_rest = None, rest
        resting = rest.left > 0
        self._alone(states, self.ask_within(0, states, self._free_budgets(states, budgets, timed, asking=not resting)))
        if resting:
            for state in states:
                state.known.passed(asked=False)
            return
        self._decide(states, budgets, timed)
        if any(self.parts[1].ready(state.parts[1]) for state in states):  # else hidden states were left out, no more
            rest.decided(asked=any(state.asked is not None for state in states))

    @staticmethod
    def _rounds_together(states: Seq[AutoState]) -> BatchRests:
        """The count since their batch began, where an answer must repeat."""
        found = next((state.rounds_together for state in states if state.rounds_together is not None), None)
        if found is None:
            found = BatchRests()
        for state in states:
            state.rounds_together = found
        return found

    def observed_layers(self, states: Seq[AutoState], idle: int) -> Seq[int]:
        if len(self.parts) == 1:
            return super().observed_layers(states, idle)
        # This round may be one that rests, but more follow.
        rests = [0 if one.batch_rest is None else one.batch_rest.left for one in states]
        return (*self.part_layers(0, states, idle), *self.part_layers(1, states, max(idle, min(rests) - 1)))

    def _free_budgets(
        self, states: Seq[AutoState], budgets: Seq[Budget], timed: Timing, *, asking: bool = True
    ) -> list[Budget]:
        """With a draft's time spent anyway more tokens gain: the free part shows what it has for that case, where the
        learned one may be asked."""
        steps = 0.0
        if asking and any(state.quiet is None for state in states):
            steps = self.times.draft_steps(timed, 1)
        return [
            self._free_after(budget, steps if state.quiet is None else 0.0)
            for state, budget in zip(states, budgets, strict=True)
        ]

    def _free_after(self, budget: Budget, steps: float) -> Budget:
        """The free part's budget in a round in which a draft has already taken ``steps``."""
        own, costs = part_budget(budget, 0), budget.relative_costs
        if not costs or (not steps and own.relative_costs is costs):
            return own
        key = id(own), id(costs), steps
        found = self._after.get(key)
        if found is None:  # requests share budgets, and have the same ones for many rounds
            if len(self._after) >= _KEPT:
                self._after.clear()
            found = self._after[key] = own, costs, own.costing(raised(costs, steps))
        return found[2]

    def _choose_for(self, state: AutoState, budget: Budget, timed: Timing) -> None:
        """The same for one request, which shares its round with nobody."""
        if state.undecided():
            self._decide([state], [budget], timed)
            return
        assert state.quiet is not None
        state.quiet = max(0, state.quiet - 1)
        state.known.passed(asked=False, read=state.read > 0)

    def _compare(self, state: AutoState, made: float, cost: float, asked: bool) -> None:
        """The rest of this round beside that of the round before, where one of the two had a learned draft."""
        rest, before = (perf_counter() - made) / cost, state.rest
        state.rest = rest, asked
        if before is not None and before[1] is not asked:
            with_draft, without = (rest, before[0]) if asked else (before[0], rest)
            self._shared([state]).after.saw(with_draft, without)

    @staticmethod
    def _alone(states: Seq[AutoState], trees: list[TokenTree]) -> list[TokenTree]:
        """The free part's drafts, as if nothing else drafted."""
        for state, tree in zip(states, trees, strict=True):
            state.free = state.united = tree
        return trees

    def _decide(self, states: Seq[AutoState], budgets: Seq[Budget], timed: Timing) -> None:
        """Choose the drafts of requests that share a round, or of one alone."""
        costs = mean_costs([budget.relative_costs for budget in budgets])
        if not costs:  # the parts' lengths are fixed
            costs = nominal_costs(max(one.max_nodes for one in budgets))
        base = max([budget.base_tokens for budget in budgets])
        ranked, probs, copied = list[list[int]](), list[list[float]](), list[float]()
        tolls, offers, due, shares = list[float](), list[list[float]](), list[bool](), list[Seq[float]]()
        # Drafts of a request that is alone for a moment, or of a batch that tries them, end soon.
        shared = self.times.shared(timed.sampled)
        ahead = max(LEAST_AHEAD, shared.drafting) if timed.live else 1.0
        alone = timed.batch == 1
        for state, budget in zip(states, budgets, strict=True):
            order, reachable = state.free.likeliest_first()
            ranked.append(order)
            probs.append(reachable)
            first = first_chance(state.free)
            able = part_budget(budget, 1).depth > 0 and self.parts[1].ready(state.parts[1])
            reading = self.times.reading(state.unread, timed) if able else 0.0
            toll = reading * base / (state.drafts_to_come * ahead)
            copied.append(first)
            tolls.append(toll)
            known = state.known
            # A draft to find out what drafts add is paid for by all requests of its round.
            offer = known.hoped(first, self.times.draft_steps(timed, 1)) if alone else known.expected(first)
            offers.append(after_toll(offer, toll) if able else [])
            shares.append(known.shares if able else ())
            due.append(able and known.due() and reading <= TRIED * ahead * state.written)

        pace = states[0].pace if alone and budgets[0].relative_costs else None
        after = shared.after.share if timed.live and alone else 0.0

        def drafting(size: int) -> float:
            return self.times.draft_steps(timed, size) + after

        def chosen() -> Plan:
            return plan(probs, offers, costs, base, drafting, shares, pace)

        found = chosen()
        trial = not found.asked and any(due)
        if trial:
            hoped = zip(states, copied, tolls, due, strict=True)
            offers = [after_toll(one.known.at_best(first), toll) if tried else [] for one, first, toll, tried in hoped]
            shares = []
            found = chosen()
        for at, (state, count) in enumerate(zip(states, found.counts, strict=True)):
            asked = at in found.asked
            state.known.passed(asked=asked, trial=trial and asked, read=timed.batch == 1 and state.read > 0)
            wanted = ranked[at] if state.free.auxiliary_tokens else ranked[at][:count]
            if asked:
                state.quiet = None
                state.asked = Asked(len(state.sequence.tokens), state.free, frozenset(wanted), copied[at], trial)
                state.spent = found.drafting
                continue
            if alone and not state.free and budgets[at].relative_costs:
                state.quiet = min(1 + state.known.waited // PATIENT, MOST_QUIET)
            if len(wanted) < len(state.free):
                state.united = state.free.only(wanted)
        if found.asked:
            self._join([states[at] for at in found.asked], [budgets[at] for at in found.asked])

    def _join(self, asking: Seq[AutoState], budgets: Seq[Budget]) -> None:
        """Let the learned part draft for some of the sequences, and unite its trees with the free part's."""
        unread = sum([state.unread for state in asking])
        began = perf_counter()
        drafted = self.ask(1, asking, budgets)
        if all(state.sequence.timed and not state.sequence.replayed for state in asking):
            self.times.took(len(asking), unread, perf_counter() - began, sampled=_sampled(asking))
        for state, budget, tree in zip(asking, budgets, drafted, strict=True):
            assert state.asked is not None
            state.united = self._united(state, tree, budget)
            state.asked.learned = tree
            state.read = len(state.sequence.tokens)

    def _united(self, state: AutoState, learned: TokenTree, budget: Budget) -> TokenTree:
        """The round's draft, of the free part's and of what the learned one has drafted after it."""
        free, greedy = state.free, state.sequence.params.greedy
        if not free and not free.auxiliary_tokens:
            return learned  # its drafter has chosen its size
        within = budget.costing(raised(budget.relative_costs, state.spent))
        if not learned or free.auxiliary_tokens or learned.auxiliary_tokens:
            return self.unite((free, learned), within, greedy=greedy)
        if self.parts[1].may_be_cut(learned, greedy=greedy):
            return mixed(free, learned, within)
        # A draw that is judged before deterministic tokens is accepted most often.
        beside = _beside_draws(free, within, state.known)
        return TokenTree.merge((learned, beside)) if beside else learned

    def draft_steps(self, states: Seq[AutoState]) -> float:
        return max((state.spent for state in states), default=0.0)

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
        # Not when the next draft begins: others may have had their rounds until then.
        if len(states) == 1 and states[0].drafted is not None and not states[0].sequence.replayed:
            self._compare(states[0], *states[0].drafted)
        if len(self.parts) > 1:
            self._saw_round(states, drafting=self._asked)
            self._asked = False
        for state, verdict in zip(states, verdicts, strict=True):
            state.paced(len(verdict.committed))
            scored, asked = verdict.scores.tree, state.asked
            if scored:
                for name, tree in zip(self.names, self.part_trees(state), strict=False):
                    state.rounds[name] += contributed(tree, scored)
            if asked is not None and state.sequence.params.greedy:
                learn(state.known, asked, state.sequence.tokens[asked.at :], scored)
            elif asked is not None:
                learn_by_target(state.known, asked, scored, verdict.target_row(0))
            state.free, state.asked, state.spent = NO_DRAFT, None, 0.0

    def rested(self, states: Seq[AutoState], verdicts: Seq[Verdict]) -> None:
        for index, part in enumerate(self.parts):
            part.rested([state.parts[index] for state in states], verdicts)
        if len(self.parts) > 1:
            for state in states:
                state.batch_rest = None  # of the round that drafted last
            self._saw_round(states, drafting=False)

    def _saw_round(self, states: Seq[AutoState], *, drafting: bool) -> None:
        if all(state.sequence.timed for state in states):
            for state in states:
                state.rounds_together = None  # of a batch that has ended
            self._shared(states).saw_round(drafting=drafting)
        else:
            self._rounds_together(states).now += 1


def _beside_draws(free: TokenTree, budget: Budget, known: Yield) -> TokenTree:
    """What of the free part's draft is worth its rows beside draws. These count as the drafts of before had them,
    whatever they are: where the choice depended on them, a draw's chance of being accepted would."""
    first, costs = first_chance(free), budget.relative_costs
    order, probs = free.likeliest_first()
    if not costs:
        return free.only(order[: budget.max_nodes])
    expected = budget.base_tokens + sum(known.expected(first))
    taken = min(round(sum(known.shares)), len(costs) - 1)
    most = probs[: budget.max_nodes]
    count, _ = best_count([first * prob for prob in most], costs, expected, taken=taken)
    return free.only(order[:count])


def _hopeless(budgets: Seq[Budget]) -> bool:
    """Whether a round of a batch would gain too little even if every draft token in it were accepted."""
    base = max([budget.base_tokens for budget in budgets])
    if base <= 1.0:
        return False
    costs = mean_costs([budget.relative_costs for budget in budgets])
    return bool(costs) and most_rate(costs, base) < HOPE * base / costs[0]


def _timing(states: Seq[AutoState], budgets: Seq[Budget]) -> Timing:
    longest = max([len(state.sequence.tokens) for state in states])
    live = all(state.sequence.timed for state in states)
    return Timing(int(budgets[0].base_tokens), 1 << longest.bit_length(), live, _sampled(states))


def _sampled(states: Seq[AutoState]) -> bool:
    return any(not state.sequence.params.greedy for state in states)
