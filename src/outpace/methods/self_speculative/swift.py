"""SWIFT: the set of skipped sublayers is searched for while the text is being generated.

``swift`` (Xia et al. 2025, arXiv 2410.06916): the target without a fixed share of its sublayers drafts, as in
``draft-verify``, but which sublayers these are is found online. Every few rounds another set is tried on the first
``window`` tokens of the answer, the same for all sets: one parallel pass through the sub-graph, scored by the share of
them that it predicts. Most sets are random, some come from Bayesian optimisation; the best one so far drafts. The
search ends after ``steps`` sets, after ``patience`` sets without a better one, or when a set predicts ``enough``.

A draft is a chain, each token with siblings (:class:`~outpace.drafting.chain_with_siblings.ChainWithSiblings`); it ends
with the first chain token whose probability is below a fixed threshold. Its length, its threshold and the numbers of
siblings are those of the authors' code. They skip 0.45 of the sublayers and try a set every round, on models of 13
billion parameters; the defaults here are for small ones, which bear less.

What was learned belongs to the request's namespace. When a set is tried depends on counts of rounds and tokens, never
on a clock, so that a seed reproduces a sampled answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.metrics import CacheUse
from outpace.core.proposal import Proposal
from outpace.core.tree import TokenTree
from outpace.core.validation import StrictModel
from outpace.drafting.chain_with_siblings import CandidateCounts, ChainWithSiblings
from outpace.drafting.layer_skips import Mask, Skips
from outpace.drafting.namespaces import Namespaces
from outpace.drafting.self_draft import DraftPass, SelfDraft, SelfDraftState, stopping
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target
from outpace.targets.sub_graph import SubGraph

if TYPE_CHECKING:
    from outpace.drafting.skip_search import MaskSearch

Counts = tuple[Annotated[int, Field(ge=1, le=64)], ...]


class SwiftSettings(StrictModel):
    """Settings of ``swift``."""

    num_draft_tokens: int = Field(
        25, ge=0, le=64, description="maximum number of steps in a draft, one token of the chain each"
    )
    confidence: float = Field(
        0.8, ge=0.0, le=1.0, description="end a draft after the first chain token whose probability is lower"
    )
    candidates: Counts = Field(
        (3, 5, 8, 10),
        min_length=4,
        max_length=4,
        description="candidates per step at temperature 0 if its chain token's probability is above 0.95, above "
        "0.8, above 0.5, and lower",
    )
    sampled_candidates: Counts = Field(
        (1, 3, 5, 10), min_length=4, max_length=4, description="candidates per step at other temperatures"
    )
    ratio: float = Field(
        0.2, gt=0.0, lt=1.0, description="share of the sublayers between first and last layer that are skipped"
    )
    window: int = Field(32, ge=1, le=512, description="number of generated tokens on which a set is tried")
    every: int = Field(8, ge=1, description="rounds between two trials")
    steps: int = Field(200, ge=0, description="maximum number of sets to try per namespace; 0 keeps the first")
    patience: int = Field(60, ge=1, description="number of trials without a better set that ends the search")
    enough: float = Field(0.95, ge=0.0, le=1.0, description="share of correctly predicted tokens that ends the search")
    interval: int = Field(
        5, ge=1, description="number of trials after which the next set comes from Bayesian optimization"
    )
    namespaces: int = Field(64, ge=1, description="maximum number of namespaces whose best set is kept")


@dataclass(slots=True)
class SkipMemory:
    """What one namespace has found out about skipping: the search, and the best sub-graph so far."""

    search: MaskSearch
    graph: SubGraph
    rounds: int = 0
    stale: int = 0
    """Tries since the best set was found."""
    done: bool = False


@dataclass(slots=True)
class SwiftState(SelfDraftState):
    """A request, and the memory of its namespace."""

    memory: SkipMemory


class Swift(SelfDraft[SwiftState]):
    """Drafts through the best sub-graph found so far, and looks for better ones."""

    proposal = Proposal(tree=True, sampled=True, replacement=False)
    asks_policy = False

    def __init__(self, target: Target, settings: SwiftSettings) -> None:
        super().__init__(target)
        layers = target.num_layers
        # The first and the last layer stay, as in the paper.
        self._free = [index for index in range(2 * layers) if index % layers not in (0, layers - 1)]
        self._count = round(settings.ratio * len(self._free))
        if not 0 < self._count < len(self._free):
            raise BadInput(
                f"a share of {settings.ratio:g} of the {len(self._free)} sublayers between first and last layer skips "
                f"{self._count} of them; choose another ratio, or another model"
            )
        # The paper's start: skips spread evenly over the free sublayers.
        chosen = {self._free[index * len(self._free) // self._count] for index in range(self._count)}
        self._first: Mask = tuple(index in chosen for index in range(2 * layers))
        self.settings = settings
        self.counts = CandidateCounts(settings.candidates, settings.sampled_candidates)
        self.memories = Namespaces(self._fresh_memory, settings.namespaces)

    def _fresh_memory(self) -> SkipMemory:
        from outpace.drafting.skip_search import MaskSearch

        settings = self.settings
        search = MaskSearch(len(self._first), self._free, self._count, self._count, interval=settings.interval)
        return SkipMemory(search, Skips.of(self._first).graph, done=settings.steps == 0)

    def begin(self, sequence: Sequence) -> SwiftState:
        return SwiftState(sequence, self.memories.open(sequence))

    def caches(self, state: SwiftState) -> tuple[CacheUse, ...]:
        return (CacheUse("skip sets tried", len(state.memory.search.tries), self.settings.steps),)

    def plan(self, state: SwiftState, budget: Budget) -> tuple[SubGraph, Budget]:
        return state.memory.graph, stopping(budget, self.settings.confidence)

    def builder(self, state: SwiftState, budget: Budget) -> ChainWithSiblings:
        return ChainWithSiblings(state.sequence, budget, self.chance(state.sequence), self.counts)

    def learn(self, state: SwiftState, verdict: Verdict, drafted: DraftPass | None) -> None:
        memory, sequence = state.memory, state.sequence
        memory.rounds += 1
        written = len(sequence.tokens) - sequence.prompt_length
        if not memory.done and memory.rounds % self.settings.every == 0 and written > self.settings.window:
            self._try(memory, sequence)

    def _try(self, memory: SkipMemory, sequence: Sequence) -> None:
        """One step of the search."""
        search, settings = memory.search, self.settings
        mask = search.suggest() if search.told else self._first
        matched = self.matched(sequence, Skips.of(mask).graph)
        memory.stale += 1
        if search.tell(mask, matched):
            assert search.best is not None
            memory.graph, memory.stale = Skips.of(search.best).graph, 0
        best = search.tries[search.best] if search.best is not None else 0.0
        memory.done = best >= settings.enough or memory.stale >= settings.patience or search.told >= settings.steps

    def matched(self, sequence: Sequence, graph: SubGraph) -> float:
        """The share of ``window`` tokens, from the answer's second on, that the sub-graph predicts, each from all
        tokens before it."""
        first = sequence.prompt_length
        expected = sequence.tokens[first + 1 : first + 1 + self.settings.window]
        kv = self.target.fork(sequence.kv, first)
        past = Sequence(sequence.tokens[: first + 1], first, kv, sequence.sampler)
        scores = self.target.score([(past, TokenTree.chain(expected[:-1]))], graph=graph)
        self.target.close(kv)
        guesses = scores[0].logits.argmax(-1).tolist()
        return sum(map(int.__eq__, guesses, expected)) / len(expected)


@register(
    "swift",
    family="self-speculative",
    paper="Xia et al. 2025, arXiv 2410.06916",
    summary="Skips sublayers to draft; the set of skipped sublayers is searched for during generation.",
    when_to_use="Long outputs of deep models, long enough for the search to finish. Not for small models, nor for "
    "short answers without a namespace that keeps the set.",
    tiny={
        "num_draft_tokens": 2, "confidence": 0.5, "candidates": [1, 1, 2, 3], "sampled_candidates": [1, 1, 2, 1],
        "window": 1, "every": 1, "ratio": 0.3, "interval": 1,
    },
)  # fmt: skip
def build(context: Context, settings: SwiftSettings) -> Parts:
    """The target under sub-graphs that it finds itself."""
    drafter, steps = Swift(context.target, settings), settings.num_draft_tokens
    return Parts(drafter, Fixed(steps, topk=drafter.counts.most, max_nodes=steps * drafter.counts.most))
