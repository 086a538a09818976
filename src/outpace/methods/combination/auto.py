"""``auto``: a learned drafter, a copying one, both or neither, chosen each round by acceptance and measured costs.

Two parts at most. The *free* part (the suffix automaton) is asked in every round: it takes microseconds, and states how
likely its tokens are accepted. The *learned* part (a head, or a draft model) takes a share of a forward, so it is asked
only where rounds with it have brought more tokens per time than the free part promises now, or than an autoregressive
step gives. The trees of both are united, and as many nodes are scored as raise the expected tokens per time. A learned
part that does not is left out and tried again after growing intervals; where neither part gains, decoding is
autoregressive.

Rates are tokens over time in units of an autoregressive step. Times are those of ``targets/costs.py``. Beside them
greedy requests go by the clock; sampled ones by one rehearsal of the learned part's draft, kept with the target's
costs, so that a seed reproduces its answer. What is learned belongs to the request's namespace. Only whether a learned
part gains at all is remembered across greedy requests (:class:`~outpace.controllers.yields.Standing`): so one that does
not, such as a head without training, is tried ever less.

Choosing a round's drafter by what it yields for its time is what MetaSD's bandits do (Kim, Jung, Yun 2026, arXiv
2604.05417); here no arm is pulled at random, because the free part's promise is known before any time is spent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import Field

if TYPE_CHECKING:
    from outpace.heads.base import Head

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget, Controller
from outpace.controllers.combined import CombinedController
from outpace.controllers.cost_model import CostModel
from outpace.controllers.yields import PRIOR_COST, Clock, Round, Standing, Yield
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT, TokenTree
from outpace.core.validation import StrictModel
from outpace.drafting.base import Drafter
from outpace.drafting.merged import MergedTrees, MergeState
from outpace.drafting.namespaces import Namespaces
from outpace.engine.rehearsal import draft_seconds
from outpace.methods.registry import Context, Parts, find, methods, register
from outpace.targets.base import Sequence, Target
from outpace.targets.cost_table import digest

FREE = "sam"
DRAFT_MODEL = {"num_draft_tokens": 4, "topk": 3, "max_nodes": 12}
"""How a draft model that the user named drafts: a tree, which a match of the free part can join and be cut with."""

NOMINAL_DRAFT = 0.25
"""A learned draft's time in autoregressive steps, where costs are fixed."""

_STANDINGS: WeakKeyDictionary[Target, dict[str, Standing]] = WeakKeyDictionary()
"""What greedy requests of this process have seen of the learned parts beside a target, by the part's identity."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A round in which the learned part was asked: the tokens there were, and the draft and the cost, in autoregressive
    steps, of the round without it."""

    at: int
    alone: TokenTree
    steps: float

    def without(self, sequence: Sequence) -> Round:
        """The round as it would have been without the learned part, once the tokens are known."""
        committed = sequence.tokens[self.at :]
        return Round(min(len(committed), 1 + len(self.alone.follow(committed))), self.steps)


@dataclass(slots=True)
class AutoState(MergeState):
    """What the namespace knows, the round under way, and which part drafted in how many rounds."""

    known: Yield = field(kw_only=True)
    asked: _Asked | None = None
    steps: float = 1.0
    """What the round under way should cost, in autoregressive steps."""
    begun: bool = False
    """Whether the learned part has drafted: its first draft reads the prompt, which no later one does."""
    rounds: Counter[str] = field(default_factory=Counter)


class Auto(MergedTrees[AutoState]):
    """``parts``: the free one, and the learned one where there is one, whose budgets ``controller`` gives when its
    draft is timed. ``identity``: tells the learned part from others beside the target."""

    def __init__(
        self,
        parts: Seq[Drafter[Any]],
        names: Seq[str],
        target: Target,
        namespaces: int = 64,
        *,
        controller: Controller | None = None,
        identity: Callable[[], str] = str,
    ) -> None:
        super().__init__(parts, names)
        self.target = target
        self._controller = controller or CostModel(target.costs)
        self._identity = identity
        self.clock = Clock()
        self.step = Clock()
        """Seconds of an autoregressive step, by whole rounds without the learned part and what they should cost."""
        self._began: float | None = None
        self._memory = Namespaces(lambda: Yield(self._standing), namespaces)
        self._sampled_memory = Namespaces(Yield, namespaces)
        """Of sampled requests, whose drafts must not depend on what other requests' clocks have shown."""

    @cached_property
    def _standing(self) -> Standing:
        return _STANDINGS.setdefault(self.target, {}).setdefault(self._identity(), Standing())

    def opened(self, sequence: Sequence, parts: list[Any]) -> AutoState:
        memory = self._memory if sequence.params.greedy else self._sampled_memory
        return AutoState(sequence, parts, known=memory.open(sequence))

    def rewind(self, state: AutoState, sequence: Sequence, kept: int) -> AutoState:
        state.asked = None
        return super().rewind(state, sequence, kept)

    def drafting(self, state: AutoState) -> dict[str, int]:
        return {name: state.rounds[name] for name in self.names}

    # ------------------------------------------------------------------------------------------------- drafting

    def propose_batch(self, states: Seq[AutoState], budgets: Seq[Budget]) -> list[TokenTree]:
        drafts = [self._draft_steps(state.sequence, len(states)) for state in states]
        self._began = perf_counter()
        # With a draft's time spent anyway more tokens gain; the free part shows what it has for that case.
        after = [_after(budget, steps) for budget, steps in zip(budgets, drafts, strict=True)]
        free = self.ask(0, states, after)
        learned = []
        for at, (state, budget, tree) in enumerate(zip(states, budgets, free, strict=True)):
            state.asked = None
            count, alone = _alone(tree, budget)
            state.steps = alone.steps
            state.united = tree if count == len(tree) or tree.auxiliary_tokens else tree.first(count)
            if self._may_ask_learned(budget) and state.known.wanted(alone, drafts[at]):
                learned.append(at)
                state.asked = _Asked(len(state.sequence.tokens), state.united, alone.steps)
        if learned:
            self._join(learned, states, budgets, after, drafts, free)
        for at, state in enumerate(states):
            if at not in learned:
                state.rounds[self.names[0]] += len(state.united) > 0
        return [state.united for state in states]

    def _may_ask_learned(self, budget: Budget) -> bool:
        return len(self.parts) > 1 and (budget.parts[1] if budget.parts else budget).depth > 0

    def _join(
        self,
        learned: Seq[int],
        states: Seq[AutoState],
        budgets: Seq[Budget],
        after: Seq[Budget],
        drafts: Seq[float],
        free: Seq[TokenTree],
    ) -> None:
        """Let the learned part draft for some of the sequences, and unite its trees with the free part's."""
        asking = [states[at] for at in learned]
        began = perf_counter()
        drafted = self.ask(1, asking, [budgets[at] for at in learned])
        if all(state.begun for state in asking):
            self.clock.read(len(learned), perf_counter() - began)
        for at, state, tree in zip(learned, asking, drafted, strict=True):
            whole = state.united = self.unite((free[at], tree), after[at])
            costs = after[at].relative_costs
            state.steps = costs[min(len(whole), len(costs) - 1)] if costs else 1.0 + PRIOR_COST + drafts[at]
            state.begun = True
            for name, part in zip(self.names, (free[at], tree), strict=True):
                state.rounds[name] += _contributed(part, whole)

    def _draft_steps(self, sequence: Sequence, count: int) -> float:
        """How long the learned part would take for ``count`` sequences, in autoregressive steps over them."""
        if len(self.parts) == 1:
            return 0.0
        # A sampled answer must not depend on this clock: it goes by one rehearsal, kept with the target's costs.
        live = self.clock.seconds(count) if sequence.params.greedy else None
        return self.target.costs.steps(lambda: self._rehearsed(count) if live is None else live, NOMINAL_DRAFT, count)

    def _rehearsed(self, count: int) -> float:
        size = 1 << (count - 1).bit_length()
        return self.target.costs.once(
            f"draft of {self.names[1]} {self._identity()} for {size} sequences",
            lambda: draft_seconds(self.target, self.parts[1], self._controller, size),
        )

    def observe_batch(self, states: Seq[AutoState], verdicts: Seq[Verdict]) -> None:
        super().observe_batch(states, verdicts)
        # A round that it was not asked to draft in has no beginning here, and tells nothing.
        took = 0.0 if self._began is None else perf_counter() - self._began
        self._began, count = None, len(states)
        if took and all(state.asked is None for state in states):
            self.step.read(count, took / mean(state.steps for state in states))
        for state in states:
            if state.asked is not None:
                timed = state.sequence.params.greedy and took > 0.0 and not self.target.costs.fixed
                # The whole round: beside its draft and its rows, a draft slows down what then runs with cold caches.
                steps = took / (self.step.seconds(count) or self.target.costs.seconds(count)) if timed else state.steps
                found = Round(len(state.sequence.tokens) - state.asked.at, steps)
                state.known.learn(state.asked.without(state.sequence), found)
                state.asked = None


def _after(budget: Budget, steps: float) -> Budget:
    """The budget of a round in which a draft has already taken ``steps``: all costs are that much higher."""
    if not steps:
        return budget
    costs = tuple(cost + steps for cost in budget.relative_costs)
    parts = tuple(replace(part, relative_costs=costs) for part in budget.parts)
    return replace(budget, relative_costs=costs, parts=parts)


def _alone(tree: TokenTree, budget: Budget) -> tuple[int, Round]:
    """The best size of the free part's draft by itself, and what is expected of such a round."""
    count = budget.best_draft_size(tree.path_acceptance_probs)
    expected = 1.0 + sum(tree.path_acceptance_probs[:count])
    return count, Round(expected, budget.relative_costs[count] if budget.relative_costs else 1.0)


def _contributed(part: TokenTree, whole: TokenTree) -> bool:
    """Whether anything of a part's tree is in the tree that was made of both."""
    return any(whole.child(ROOT, part.tokens[node]) is not None for node in part.children(ROOT))


class AutoSettings(StrictModel):
    """Settings of ``auto``."""

    free: str = Field(FREE, description="the method that is asked in every round: one that takes next to no time")
    learned: tuple[str, ...] | None = Field(
        None, description="learned methods: the first that there is a head for drafts; by default all, [] for none"
    )
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description='settings of the parts by name: {"eagle3": {"max_nodes": 8}}'
    )
    namespaces: int = Field(64, ge=1, description="most namespaces whose statistics are kept")


def learned_methods() -> tuple[str, ...]:
    """Names of all registered methods that draft with a trained head, those named like their head first."""
    trained = [info for info in methods() if info.trained and info.lossless]
    return tuple(info.name for info in sorted(trained, key=lambda info: info.name != info.head))


def learned_part(context: Context, settings: AutoSettings) -> tuple[str, Parts] | None:
    """The learned part: with a head that was named, with a draft model that was, or with a shipped head; else None.

    Of several the one that has measured best, as ``outpace eval-head --record`` has written it beside the head. Raises
    BadInput for a head or draft model that the user named and that does not fit.
    """
    infos = [find(name) for name in (learned_methods() if settings.learned is None else settings.learned)]
    if not infos:
        return None
    if settings.learned is None:
        measured = {info.name: context.measured(info.name, info.head or "") for info in infos}
        infos.sort(key=lambda info: -(measured[info.name] or 0.0))
    if context.heads:
        for info in infos:
            if info.head in context.heads:
                return info.name, context.parts(info.name, settings.settings.get(info.name))
        raise BadInput(
            f"none of the methods that auto chooses from ({', '.join(info.name for info in infos)}) drafts with a head "
            f"of kind {' or '.join(context.heads)}"
        )
    if context.has_draft and settings.learned is None:
        return "draft-model", context.parts("draft-model", {**DRAFT_MODEL, **settings.settings.get("draft-model", {})})
    for info in infos:
        try:
            return info.name, context.parts(info.name, settings.settings.get(info.name))
        except BadInput:  # no head is shipped for this model, or none that loads
            if settings.learned is not None and info is infos[-1]:
                raise
    return None


@register(
    "auto",
    family="combination",
    paper="outpace's own; after Kim, Jung, Yun 2026, arXiv 2604.05417",
    summary="A learned drafter, the suffix automaton, both or neither, chosen by acceptance and measured costs.",
    when_to_use="The default: on any text with a head for the model, without one where text repeats. A part "
    "that does not gain is left out; without any gain it decodes autoregressively.",
    tiny={"settings": {"eagle3": {"max_nodes": 3, "depth": 2, "topk": 2}}},
)
def build(context: Context, settings: AutoSettings) -> Parts:
    """The free part, and the learned one that there is."""
    known = {settings.free, "draft-model", *(learned_methods() if settings.learned is None else settings.learned)}
    stray = next((name for name in settings.settings if name not in known), None)
    if stray is not None:
        raise BadInput(f"settings are given for '{stray}', which is none of auto's parts ({', '.join(sorted(known))})")
    free = context.parts(settings.free, settings.settings.get(settings.free))
    if free.drafter.proposal.sampled or free.drafter.needs_target_internals or find(settings.free).trained:
        raise BadInput(f"auto asks its free part in every round; '{settings.free}' samples, or runs a model for it")
    built = {settings.free: free}
    used: list[Any] = []

    def head(*kinds: str) -> Head:
        found = context.head(*kinds)
        used.append(found)
        return found

    def draft() -> Target:
        found = context.draft()
        used.append(found)
        return found

    learned = learned_part(replace(context, head=head, draft=draft), settings)
    if learned is not None:
        built[learned[0]] = learned[1]
    for name, parts in built.items():
        if parts.rule is not None and not parts.rule.lossless:
            raise BadInput(f"'{name}' brings its own acceptance rule '{parts.rule.name}', which changes the output")
    drafter = Auto(
        [one.drafter for one in built.values()],
        list(built),
        context.target,
        settings.namespaces,
        controller=None if learned is None else learned[1].controller,
        identity=lambda: f"{identity(used)} {settings.settings.get(list(built)[-1], {})}",
    )
    return Parts(drafter, CombinedController([one.controller for one in built.values()], united=True))


def identity(used: Seq[Any]) -> str:
    """Tells heads and draft models, by their weights and sizes, from others that a method could draft with."""
    return " ".join(
        f"{one.num_layers}x{one.hidden_size} {one.dtype}" if isinstance(one, Target) else digest(one.named_parameters())
        for one in used[-1:]  # of several that were tried the last one fits
    )
