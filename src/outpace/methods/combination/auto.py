"""``auto``: a learned drafter, a copying one, both, or neither, as each round's text and the machine's costs have it.

Two parts at most. The *free* one (the suffix automaton) is asked in every round: it costs microseconds, and says how
likely its tokens are. The *learned* one (a head, or a draft model) takes a share of a forward to ask, so it is asked
only where a round with it has brought more tokens in its time than the free part promises now, or a plain step gives.
Then the trees of both are united, and what pays of them is scored. Where the learned part does not pay it is left in
peace, and tried again after ever longer waits; where neither pays, decoding is plain.

Paces are tokens over time, in plain steps. Times of greedy requests are measured: forwards by ``targets/costs.py`` when
they are first needed, drafts by the clock as they happen. Sampled requests go by nominal times, so that a seed
reproduces its answer. What is learned belongs to the request's namespace.

Choosing a round's drafter by what it yields for its time is what MetaSD's bandits do (Kim, Jung, Yun 2026, arXiv
2604.05417); here nothing is pulled blindly, for the free part's promise is known before anything is spent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.combined import CombinedController
from outpace.controllers.yields import PRIOR_PRICE, Clock, Yield
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.merged import Merge
from outpace.drafting.namespaces import Namespaces
from outpace.methods.registry import Context, Parts, find, methods, register
from outpace.targets.base import Sequence, Target, TreeScores

FREE = "sam"
DRAFT_MODEL = {"length": 4, "width": 3, "nodes": 12}
"""How a draft model that the user named drafts: a tree, which a match of the free part can join and be cut with."""
NOMINAL_DRAFT = 0.25
"""A learned draft's time in plain steps, where no clock may be asked or none was read yet."""


class _Asked(NamedTuple):
    """A round in which the learned part was asked: its price in plain steps, and the tokens there were before."""

    steps: float
    at: int


@dataclass(slots=True)
class _Request:
    """One request: what its namespace knows, the round under way, and who drafted in how many rounds."""

    known: Yield
    asked: _Asked | None = None
    begun: bool = False
    """Whether the learned part has drafted for it: its first draft reads the prompt, which no other will."""
    rounds: Counter[str] = field(default_factory=Counter)


class Auto(Merge):
    """``parts``: the free one, and the learned one where there is one."""

    def __init__(self, parts: Seq[Drafter], names: Seq[str], target: Target, namespaces: int = 64) -> None:
        super().__init__(parts, names)
        self.target = target
        self.clock = Clock()
        self.plain = Clock()
        """Whole rounds in which nothing was drafted: what a round's time is measured in."""
        self._began: float | None = None
        self._memory = Namespaces(Yield, namespaces)
        self._requests: dict[Sequence, _Request] = {}

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self._requests[sequence] = _Request(self._memory.open(sequence))

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        super().fork(sequence, twin)
        known, one = self._memory.open(twin), self._requests[sequence]
        if not twin.namespace:
            known = replace(one.known)
        self._requests[twin] = _Request(known, begun=one.begun)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        super().rewind(sequence, kept)
        self._requests[sequence].asked = None

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._requests.pop(sequence, None)
        self._memory.close(sequence)

    def drafting(self, sequence: Sequence) -> dict[str, int]:
        return {name: self._requests[sequence].rounds[name] for name in self.names}

    # ------------------------------------------------------------------------------------------------- drafting

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        self._began = perf_counter()
        drafts = [self._draft_steps(sequence, len(sequences)) for sequence in sequences]
        # With a draft's time spent anyway more tokens pay; the free part shows what it has for that case.
        priced = [_after(budget, steps) for budget, steps in zip(budgets, drafts, strict=True)]
        free = self.ask(0, sequences, priced)
        out, learned = [], []
        for at, (sequence, budget, tree) in enumerate(zip(sequences, budgets, free, strict=True)):
            one = self._requests[sequence]
            one.asked = None
            count, pace = _alone(tree, budget)
            if self._may_learn(budget) and one.known.wanted(pace, drafts[at]):
                learned.append(at)
            out.append(tree if count == len(tree) or tree.auxiliary_tokens else tree.first(count))
        if learned:
            self._join(learned, sequences, budgets, priced, drafts, free, out)
        for sequence, tree in zip(sequences, out, strict=True):
            self._proposed[sequence] = tree
        for at in range(len(sequences)):
            if at not in learned:
                self._requests[sequences[at]].rounds[self.names[0]] += len(out[at]) > 0
        return out

    def _may_learn(self, budget: Budget) -> bool:
        return len(self.parts) > 1 and (budget.parts[1] if budget.parts else budget).depth > 0

    def _join(
        self,
        learned: Seq[int],
        sequences: Seq[Sequence],
        budgets: Seq[Budget],
        priced: Seq[Budget],
        drafts: Seq[float],
        free: Seq[TokenTree],
        out: list[TokenTree],
    ) -> None:
        """Let the learned part draft for some of the sequences, and unite its trees with the free part's."""
        requests = [self._requests[sequences[at]] for at in learned]
        began = perf_counter()
        drafted = self.ask(1, [sequences[at] for at in learned], [budgets[at] for at in learned])
        if all(one.begun for one in requests):
            self.clock.read(len(learned), perf_counter() - began)
        for at, one, tree in zip(learned, requests, drafted, strict=True):
            whole = out[at] = self._unite((free[at], tree), priced[at])
            relative_costs = priced[at].relative_costs
            steps = (
                relative_costs[min(len(whole), len(relative_costs) - 1)] if relative_costs else PRIOR_PRICE + drafts[at]
            )
            one.asked, one.begun = _Asked(steps, len(sequences[at].tokens)), True
            for name, part in zip(self.names, (free[at], tree), strict=True):
                one.rounds[name] += _contributed(part, whole)

    def _draft_steps(self, sequence: Sequence, count: int) -> float:
        """How long the learned part would take for ``count`` sequences, in plain steps of a round over them."""
        if len(self.parts) == 1:
            return 0.0
        seconds = self.clock.seconds(count) if sequence.params.greedy else None
        return NOMINAL_DRAFT if seconds is None else seconds / self.target.costs.seconds(count)

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        super().observe(sequences, scores, verdicts)
        # A round that it was not asked to draft in has no beginning here, and tells nothing.
        took = 0.0 if self._began is None else perf_counter() - self._began
        self._began, count = None, len(sequences)
        if took and not any(len(one.tree) for one in scores):
            self.plain.read(count, took)
        for sequence in sequences:
            one = self._requests[sequence]
            if one.asked is not None:
                timed = sequence.params.greedy and took > 0.0
                steps = self._plain_steps(took, count) if timed else one.asked.steps
                one.known.learn(len(sequence.tokens) - one.asked.at, steps)
                one.asked = None

    def _plain_steps(self, took: float, count: int) -> float:
        """A round's time in plain rounds of ``count`` requests, or in such forwards until one was timed.

        The whole round: beside its draft and its rows, a draft has its price in all that then runs with cold caches.
        """
        return took / (self.plain.seconds(count) or self.target.costs.seconds(count))


def _after(budget: Budget, steps: float) -> Budget:
    """The budget of a round in which a draft has already taken ``steps``: all prices are that much higher."""
    if not steps:
        return budget
    relative_costs = tuple(relative_cost + steps for relative_cost in budget.relative_costs)
    parts = tuple(replace(part, relative_costs=relative_costs) for part in budget.parts)
    return replace(budget, relative_costs=relative_costs, parts=parts)


def _alone(tree: TokenTree, budget: Budget) -> tuple[int, float]:
    """How much of the free part's draft pays by itself, and the pace of such a round."""
    count = budget.best_draft_size(tree.path_acceptance_probs)
    if not budget.relative_costs:
        return count, 1.0 + sum(tree.path_acceptance_probs[:count])
    return count, (1.0 + sum(tree.path_acceptance_probs[:count])) / budget.relative_costs[count]


def _contributed(part: TokenTree, whole: TokenTree) -> bool:
    """Whether anything of a part's tree is in the tree that was made of both."""
    return any(whole.child(ROOT, part.tokens[node]) is not None for node in part.children(ROOT))


class AutoSettings(BaseModel):
    """Settings of ``auto``."""

    model_config = ConfigDict(extra="forbid")

    free: str = Field(FREE, description="the method that is asked in every round: one that takes next to no time")
    learned: tuple[str, ...] | None = Field(
        None, description="learned methods: the first that there is a head for drafts; by default all, [] for none"
    )
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description='settings of the parts by name: {"eagle3": {"nodes": 8}}'
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
    summary="A learned drafter, the suffix automaton, both or neither, as costs and acceptance have it.",
    when_to_use="Everywhere, with a head for the model; without one where text repeats. What does not pay is left "
    "out: then "
    "it is plain decoding.",
    tiny={"settings": {"eagle3": {"nodes": 3, "depth": 2, "width": 2}}},
)
def build(context: Context, settings: AutoSettings) -> Parts:
    """The free part, and the learned one that there is."""
    known = {settings.free, "draft-model", *(learned_methods() if settings.learned is None else settings.learned)}
    stray = next((name for name in settings.settings if name not in known), None)
    if stray is not None:
        raise BadInput(f"settings are given for '{stray}', which is none of auto's parts ({', '.join(sorted(known))})")
    free = context.parts(settings.free, settings.settings.get(settings.free))
    if free.drafter.proposal.sampled or free.drafter.needs_whole or find(settings.free).trained:
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
