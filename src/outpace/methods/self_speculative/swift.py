"""SWIFT: the set of skipped sublayers is searched for while the text is being written.

``swift`` (Xia et al. 2025, arXiv 2410.06916): the target without a fixed share of its sublayers drafts, as in ``dv``,
but which sublayers these are is found online. Every few rounds another set is tried on the last ``window`` tokens that
the target wrote: one parallel pass through the sub-graph, scored by the share of them that it predicts. Most sets are
random, some come from Bayesian optimisation; the best one so far drafts. The search ends after ``steps`` sets, after
``patience`` sets without a better one, or when a set predicts ``enough``.

What was learned belongs to the request's namespace. When a set is tried depends on counts of rounds and tokens, never
on a clock, so that a seed reproduces a sampled answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.metrics import CacheUse
from outpace.core.tree import TokenTree
from outpace.drafting.layer_skips import Mask, Skips
from outpace.drafting.namespaces import Namespaces
from outpace.drafting.self_draft import Adapting, DraftExit, ExitSettings, Pass, SelfDraft, accepted, stopping
from outpace.drafting.skip_search import MaskSearch
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, SubGraph, Target, TreeScores


class SwiftSettings(ExitSettings):
    """Settings of ``swift``."""

    ratio: float = Field(
        0.2, gt=0.0, lt=1.0, description="share of the sublayers between first and last layer that are skipped"
    )
    window: int = Field(32, ge=1, le=512, description="generated tokens that a set is tried on")
    every: int = Field(8, ge=1, description="rounds between two tries")
    steps: int = Field(200, ge=0, description="most sets to try in a namespace; 0 keeps the first")
    patience: int = Field(60, ge=1, description="tries without a better set that end the search")
    enough: float = Field(0.95, ge=0.0, le=1.0, description="share of predicted tokens that ends the search")
    interval: int = Field(5, ge=1, description="every so many tries the set comes from Bayesian optimisation")
    namespaces: int = Field(64, ge=1, description="namespaces to remember the best set of")


@dataclass(slots=True)
class Learned:
    """What one namespace knows about skipping."""

    search: MaskSearch
    graph: SubGraph
    rounds: int = 0
    stale: int = 0
    """Tries since the best set was found."""
    done: bool = False


class Swift(SelfDraft[Adapting]):
    """Drafts through the best sub-graph found so far, and looks for better ones."""

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
        self.learned = Namespaces(self._nothing_learned, settings.namespaces)

    def _nothing_learned(self) -> Learned:
        settings = self.settings
        search = MaskSearch(len(self._first), self._free, self._count, self._count, interval=settings.interval)
        return Learned(search, Skips.of(self._first).graph, done=settings.steps == 0)

    def opened(self, sequence: Sequence) -> Adapting:
        self.learned.open(sequence)
        settings = self.settings
        return Adapting(DraftExit(settings.confidence, settings.wanted, settings.step))

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self.learned.close(sequence)

    def caches(self, sequence: Sequence) -> tuple[CacheUse, ...]:
        return (CacheUse("skip sets tried", len(self.learned[sequence].search.tries), self.settings.steps),)

    def plan(self, sequence: Sequence, budget: Budget) -> tuple[SubGraph, Budget]:
        return self.learned[sequence].graph, stopping(budget, self._own[sequence].exit.threshold)

    def learn(self, sequence: Sequence, scores: TreeScores, verdict: Verdict, drafted: Pass | None) -> None:
        if drafted is not None:
            self._own[sequence].exit.learn(accepted(drafted, sequence), len(drafted.tree))
        learned = self.learned[sequence]
        learned.rounds += 1
        written = len(sequence.tokens) - sequence.prompt_length
        if not learned.done and learned.rounds % self.settings.every == 0 and written >= self.settings.window:
            self._try(learned, sequence)

    def _try(self, learned: Learned, sequence: Sequence) -> None:
        """One step of the search."""
        search, settings = learned.search, self.settings
        mask = search.suggest() if search.told else self._first
        matched = self.matched(sequence, Skips.of(mask).graph)
        learned.stale += 1
        if search.tell(mask, matched):
            assert search.best is not None
            learned.graph, learned.stale = Skips.of(search.best).graph, 0
        best = search.tries[search.best] if search.best is not None else 0.0
        learned.done = best >= settings.enough or learned.stale >= settings.patience or search.told >= settings.steps

    def matched(self, sequence: Sequence, graph: SubGraph) -> float:
        """Which share of the last ``window`` tokens the sub-graph predicts, each after the true ones before it."""
        start = len(sequence.tokens) - 1 - self.settings.window
        kv = self.target.fork(sequence.kv, start)
        past = Sequence(sequence.tokens[: start + 1], sequence.prompt_length, kv, sequence.sampler)
        scores = self.target.score([(past, TokenTree.chain(sequence.tokens[start + 1 : -1]))], graph=graph)
        self.target.close(kv)
        guesses = scores[0].logits.argmax(-1).tolist()
        return sum(map(int.__eq__, guesses, sequence.tokens[start + 1 :])) / self.settings.window


@register(
    "swift",
    family="self-speculative",
    paper="Xia et al. 2025, arXiv 2410.06916",
    summary="Skips sublayers to draft; which ones is searched for while the text is written.",
    when_to_use="on long outputs of deep models, where the search is paid back; "
    "not on small models, and not for short answers without a namespace that remembers the set",
    tiny={"length": 2, "confidence": 0.3, "window": 1, "every": 1, "ratio": 0.3, "interval": 1, "step": 0.5},
)
def build(context: Context, settings: SwiftSettings) -> Parts:
    """The target under sub-graphs that it finds itself."""
    return Parts(Swift(context.target, settings), Fixed(settings.length, nodes=settings.length))
