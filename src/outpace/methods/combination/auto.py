"""``auto``: a learned drafter, a copying one, both or neither, chosen each round by acceptance and measured costs.

Two parts at most. The *free* part (the suffix automaton) is asked in every round: it takes microseconds, and states how
likely its tokens are accepted. The *learned* part (a head, or a draft model) takes a share of a forward, so it is asked
only where rounds with it have brought more tokens per time than the free part promises now, or than an autoregressive
step gives. The trees of both are united, and as many nodes are scored as raise the expected tokens per time. A learned
part that does not is left out and tried again after growing intervals; where neither part gains, decoding is
autoregressive.

Rates are tokens over time in units of an autoregressive step. Times of greedy requests are measured: forwards by
``targets/costs.py`` when they are first needed, drafts by the clock as they happen. Sampled requests use nominal times,
so that a seed reproduces its answer. What is learned belongs to the request's namespace.

Choosing a round's drafter by what it yields for its time is what MetaSD's bandits do (Kim, Jung, Yun 2026, arXiv
2604.05417); here no arm is pulled at random, because the free part's promise is known before any time is spent.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.controllers.yields import PRIOR_COST, Clock, Yield
from outpace.core.errors import BadInput
from outpace.core.tree import TokenTree
from outpace.core.validation import StrictModel
from outpace.drafting.base import Drafter
from outpace.drafting.merged import MergedTrees, MergeState, contributed
from outpace.drafting.namespaces import Namespaces
from outpace.methods.bindings import Binding, split
from outpace.methods.registry import Context, Parts, find, methods, register
from outpace.targets.base import Sequence, Target

FREE = "sam"
DRAFT_MODEL = {"num_draft_tokens": 4, "topk": 3, "max_nodes": 12}
"""How a draft model that the user named drafts: a tree, which a match of the free part can join and be cut with."""

NOMINAL_DRAFT = 0.25
"""A learned draft's time in autoregressive steps, where no clock may be read or none was read yet."""


class _Asked(NamedTuple):
    """A round in which the learned part was asked: its cost in autoregressive steps, and the tokens there were."""

    steps: float
    at: int


@dataclass(slots=True)
class AutoState(MergeState):
    """What the namespace knows, and the round under way."""

    known: Yield = field(kw_only=True)
    asked: _Asked | None = None
    begun: bool = False
    """Whether the learned part has drafted: its first draft reads the prompt, which no later one does."""


class Auto(MergedTrees[AutoState]):
    """``parts``: the free one, and the learned one where there is one."""

    def __init__(self, parts: Seq[Drafter[Any]], names: Seq[str], target: Target, namespaces: int = 64) -> None:
        super().__init__(parts, names)
        self.target = target
        self.clock = Clock()
        self.autoregressive = Clock()
        """Whole rounds in which nothing was drafted: the unit of a round's time."""
        self._began: float | None = None
        self._memory = Namespaces(Yield, namespaces)

    def opened(self, sequence: Sequence, parts: list[Any]) -> AutoState:
        return AutoState(sequence, parts, known=self._memory.open(sequence))

    def rewind(self, state: AutoState, sequence: Sequence, kept: int) -> AutoState:
        state.asked = None
        return super().rewind(state, sequence, kept)

    # ------------------------------------------------------------------------------------------------- drafting

    def propose_batch(self, states: Seq[AutoState], budgets: Seq[Budget]) -> list[TokenTree]:
        self._began = perf_counter()
        drafts = [self._draft_steps(state.sequence, len(states)) for state in states]
        # With a draft's time spent anyway more tokens gain; the free part shows what it has for that case.
        after = [_after(budget, steps) for budget, steps in zip(budgets, drafts, strict=True)]
        free = self.ask(0, states, after)
        learned = []
        for at, (state, budget, tree) in enumerate(zip(states, budgets, free, strict=True)):
            state.asked = None
            count, rate = _alone(tree, budget)
            if self._may_ask_learned(budget) and state.known.wanted(rate, drafts[at]):
                learned.append(at)
            state.united = tree if count == len(tree) or tree.auxiliary_tokens else tree.first(count)
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
            steps = costs[min(len(whole), len(costs) - 1)] if costs else PRIOR_COST + drafts[at]
            state.asked, state.begun = _Asked(steps, len(state.sequence.tokens)), True
            for name, part in zip(self.names, (free[at], tree), strict=True):
                state.rounds[name] += contributed(part, whole)

    def _draft_steps(self, sequence: Sequence, count: int) -> float:
        """How long the learned part would take for ``count`` sequences, in autoregressive steps over them."""
        if len(self.parts) == 1:
            return 0.0
        seconds = self.clock.seconds(count) if sequence.params.greedy else None
        return NOMINAL_DRAFT if seconds is None else seconds / self.target.costs.seconds(count)

    def observe_batch(self, states: Seq[AutoState], verdicts: Seq[Verdict]) -> None:
        super().observe_batch(states, verdicts)
        # A round that it was not asked to draft in has no beginning here, and tells nothing.
        took = 0.0 if self._began is None else perf_counter() - self._began
        self._began, count = None, len(states)
        if took and not any(len(verdict.scores.tree) for verdict in verdicts):
            self.autoregressive.read(count, took)
        for state in states:
            if state.asked is not None:
                timed = state.sequence.params.greedy and took > 0.0
                steps = self._steps(took, count) if timed else state.asked.steps
                state.known.learn(len(state.sequence.tokens) - state.asked.at, steps)
                state.asked = None

    def _steps(self, took: float, count: int) -> float:
        """A round's time in autoregressive rounds of ``count`` requests, or in such forwards until one was timed.

        The whole round: beside its draft and its rows, a draft slows down what then runs with cold caches.
        """
        return took / (self.autoregressive.seconds(count) or self.target.costs.seconds(count))


def _after(budget: Budget, steps: float) -> Budget:
    """The budget of a round in which a draft has already taken ``steps``: all costs are that much higher."""
    if not steps:
        return budget
    costs = tuple(cost + steps for cost in budget.relative_costs)
    parts = tuple(replace(part, relative_costs=costs) for part in budget.parts)
    return replace(budget, relative_costs=costs, parts=parts)


def _alone(tree: TokenTree, budget: Budget) -> tuple[int, float]:
    """The best size of the free part's draft by itself, and the tokens per time of such a round."""
    count = budget.best_draft_size(tree.path_acceptance_probs)
    expected = 1.0 + sum(tree.path_acceptance_probs[:count])
    return count, expected / budget.relative_costs[count] if budget.relative_costs else expected


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

    Of several the one that has measured best, as ``outpace eval-head --record`` has written it beside the head; none
    that was no faster than autoregressive decoding. Raises BadInput for a head or draft model that the user named and
    that does not fit.
    """
    labels = learned_methods() if settings.learned is None else settings.learned
    if not labels:
        return None
    heads = context.bindings.heads
    has_draft = settings.learned is None and bool(context.bindings.draft_models)
    offered = {label: found[0] for label in labels if (found := _heads_for(context, label))}
    if heads and not offered:
        raise BadInput(
            f"none of the methods that auto chooses from ({', '.join(labels)}) drafts with a head of kind "
            f"{' or '.join(one.kind for one in heads)}"
        )
    if has_draft and not heads:
        labels = ()
    elif settings.learned is None:
        speed = {label: head.speedup(find(label).name) for label, head in offered.items()}
        gains = (label for label, known in speed.items() if known is None or known > 1.0)
        labels = tuple(sorted(gains, key=lambda label: -(speed[label] or 0.0)))
    elif heads:
        labels = tuple(offered)
    if has_draft and not labels:
        return "draft-model", context.parts("draft-model", {**DRAFT_MODEL, **settings.settings.get("draft-model", {})})
    for label in labels:
        try:
            return label, context.parts(label, settings.settings.get(label))
        except BadInput:  # no head is shipped for this model, or none that loads
            if heads or (settings.learned is not None and label == labels[-1]):
                raise
    return None


def _heads_for(context: Context, label: str) -> list[Binding]:
    """The heads that a learned method may draft with."""
    kind = find(label).head
    return [] if kind is None else context.bindings.find(kind, split(label)[1])


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
    learned = learned_part(context, settings)
    if learned is not None:
        built[learned[0]] = learned[1]
    for name, parts in built.items():
        if parts.rule is not None and not parts.rule.lossless:
            raise BadInput(f"'{name}' brings its own acceptance rule '{parts.rule.name}', which changes the output")
    drafter = Auto([one.drafter for one in built.values()], list(built), context.target, settings.namespaces)
    return Parts(drafter, CombinedController([one.controller for one in built.values()], united=True))
