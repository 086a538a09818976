"""Sequence and Scores: what a target decodes, and what one forward says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outpace.core.chance import ChanceSource, SeededChance
from outpace.core.errors import BadInput
from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.shared_noise import SharedNoise
from outpace.core.tree import TokenTree
from outpace.core.tree_distribution import TreeDistribution
from outpace.targets.states import States

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence: its committed tokens, the target's K/V for all of them but the last, and its own sampler.

    ``prompt_length`` in tokens. ``kv`` belongs to the target that opened it. ``references``: token ids of texts that
    drafters may copy from. ``namespace``: the owner of what drafters learn from it.
    """

    tokens: list[int]
    prompt_length: int
    kv: Any
    sampler: Sampler
    chance: ChanceSource = field(default_factory=lambda: SeededChance(0))
    references: tuple[tuple[int, ...], ...] = ()
    namespace: str = ""
    noise: SharedNoise | None = None
    """What drafters and the request's rule draw tokens with, where the rule shares its noise."""
    states: States | None = None
    """Auxiliary hidden states of all that ``kv`` holds, where they are kept for a drafter that reads them."""
    repeats: bool = True
    """Whether a sampled answer has to be the same again for its seed."""
    depends_on_drafts: bool = False
    """Whether what is drafted decides even a greedy answer, as under a lossy rule."""
    most_tokens: int | None = None
    """How many it may have in all, its prompt included; None where that is not known."""
    replayed: bool = False
    """Whether its answer is known, so that no forward runs between drafts: what these take says little of decoding."""

    @property
    def timed(self) -> bool:
        """Whether what is drafted may depend on a clock: where the answer is the same whatever is drafted, or need not
        be the same again."""
        return not self.repeats or (self.params.greedy and not self.depends_on_drafts)

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.sampler.params


class Scores:
    """One target forward over a batch of trees. It changes no sequence until it is committed.

    Indexing gives one sequence's :class:`TreeScores`. ``forward_state`` is what the target needs to commit or resume
    the forward: K/V of every row, in its own layout.
    """

    def __init__(self, parts: list[TreeScores], forward_state: Any) -> None:
        self.parts = parts
        self.forward_state = forward_state

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> TreeScores:
        return self.parts[index]


@dataclass(frozen=True, slots=True)
class SomeLogits:
    """Logits of some rows of a tree: ``known`` (n, V), and ``rows``, where each of them is. ``whole`` makes all."""

    known: Tensor
    rows: Mapping[int, int]
    whole: Callable[[], Tensor]


class TreeScores:
    """One tree's rows of a target forward.

    ``logits``: raw, (1 + nodes + auxiliary tokens, V). ``hidden_states``: (rows, hidden) for each layer that was asked
    for; those of layer ``i`` are the residual stream entering it (0: the embedding; ``num_layers``: what leaves the
    last layer, before the final norm). ``best``: the place of each row's largest logit, the first of equal ones, -1
    where it is not known; empty where the target does not tell. ``nodes``: how many nodes the tree had when it was
    scored; a drafter may have added others since. ``length``: how many tokens were committed then.
    """

    def __init__(
        self,
        sequence: Sequence,
        tree: TokenTree,
        logits: Tensor | SomeLogits,
        hidden_states: Mapping[int, Tensor],
        best: Seq[int] = (),
    ) -> None:
        self.sequence = sequence
        self.tree = tree
        self.nodes = len(tree)
        self.length = len(sequence.tokens)
        self._logits = logits
        self.hidden_states = hidden_states
        self._best = best if sequence.sampler.takes_largest else ()
        self._distribution: TreeDistribution | None = None

    @property
    def logits(self) -> Tensor:
        if isinstance(self._logits, SomeLogits):
            self._logits = self._logits.whole()
        return self._logits

    @property
    def device(self) -> torch.device:
        """Where the logits are."""
        return (self._logits.known if isinstance(self._logits, SomeLogits) else self._logits).device

    @property
    def distribution(self) -> TreeDistribution:
        if self._distribution is None:
            some = self._logits
            if isinstance(some, SomeLogits):
                read = (some.known, some.rows, lambda: self.logits)
                self._distribution = TreeDistribution(self.sequence.sampler, self.tree, *read)
            else:
                self._distribution = TreeDistribution(self.sequence.sampler, self.tree, some)
        return self._distribution

    def p(self, node: int) -> Tensor:
        """Processed target distribution after ``node``: (V,) float32; see :meth:`TreeDistribution.failure`."""
        return self.distribution.p(node)

    def auxiliary_rows(self, owner: object) -> list[int]:
        """Rows of ``logits`` of the auxiliary tokens that ``owner`` asked for, in its order."""
        return [row for row, one in enumerate(self.tree.auxiliary_tokens, 1 + len(self.tree)) if one.owner is owner]

    def argmax(self, node: int) -> int:
        """Greedy choice after ``node``, of the processed logits; see :meth:`TreeDistribution.failure`."""
        known = self._best[node + 1] if self._best else -1
        return known if known >= 0 else self.distribution.argmax(node)

    def failure(self, node: int) -> BadInput | None:
        """Why no token can follow ``node``, of which p or the argmax was asked; None: one can."""
        return None if self._distribution is None else self._distribution.failure(node)
