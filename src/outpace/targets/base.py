"""Target and Scores: what a target model does for the round, whatever runs underneath.

Rows: a forward over sequence i's tree has row 0 for the root (the first token whose K/V is not committed yet),
rows 1..n for the nodes and then the side nodes. Committed K/V of a :class:`Sequence` excludes its last token, so
after ``prefill`` and after every ``commit`` the root is the last committed token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from outpace.core.chance import ChanceSource, SeededChance
from outpace.core.errors import BadInput
from outpace.core.sampling import Sampler, SamplingParams, TreeDistribution
from outpace.core.tree import TokenTree
from outpace.targets.costs import ForwardCosts
from outpace.targets.states import States


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence: its committed tokens, the target's K/V for all of them but the last, and its own sampler.

    ``kv`` belongs to the target that opened it. ``references`` are texts that drafters may copy from.
    """

    tokens: list[int]
    prompt_length: int
    kv: Any
    sampler: Sampler
    chance: ChanceSource = field(default_factory=lambda: SeededChance(0))
    references: tuple[tuple[int, ...], ...] = ()
    namespace: str = ""
    states: States | None = None
    """Taps of all that ``kv`` holds, where the sequence is kept for a drafter that reads them."""

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.sampler.params


@dataclass(frozen=True, slots=True)
class SubGraph:
    """A cheaper forward through part of the target.

    Layers ``start <= i < stop`` run (``stop`` None: to the end; the final norm and LM head always follow).
    ``skip_attention`` and ``skip_mlp`` name layers whose sublayer adds nothing to the residual stream.
    ``kv`` maps a sequence's index in the batch to the committed positions that attention may read, (k,) long.
    """

    start: int = 0
    stop: int | None = None
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    kv: Mapping[int, Tensor] = field(default_factory=dict)

    def first_difference(self, layers: int) -> int:
        """Layers below this one are computed exactly as in the full forward."""
        if self.kv or self.start:
            return 0
        skipped = [*self.skip_attention, *self.skip_mlp, layers if self.stop is None else self.stop]
        return min(skipped)


FULL = SubGraph()


class Scores:
    """One target forward over a batch of trees: pure, and forgotten unless committed.

    Indexing gives one sequence's :class:`TreeScores`. ``side`` is the target's own record (K/V of every row).
    """

    def __init__(self, parts: list[TreeScores], side: Any) -> None:
        self.parts = parts
        self.side = side

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> TreeScores:
        return self.parts[index]


class TreeScores:
    """What the target said about one tree.

    ``logits``: raw, (1 + nodes + side nodes, V). ``hidden_states``: those that were asked for, by layer, (rows,
    hidden) each; tap ``i`` is the residual stream entering layer ``i`` (so 0 is the embedding and ``num_layers`` the
    output of the last layer, before the final norm). ``nodes``: how many nodes the tree had when it was scored; a
    drafter may have grown it since. ``length``: how many tokens were committed then.
    """

    def __init__(
        self, sequence: Sequence, tree: TokenTree, logits: Tensor, hidden_states: Mapping[int, Tensor]
    ) -> None:
        self.sequence = sequence
        self.tree = tree
        self.nodes = len(tree)
        self.length = len(sequence.tokens)
        self.logits = logits
        self.hidden_states = hidden_states
        self._distribution: TreeDistribution | None = None

    @property
    def distribution(self) -> TreeDistribution:
        """The processed distribution, lazily, for the nodes that are asked for."""
        if self._distribution is None:
            self._distribution = TreeDistribution(self.sequence.sampler, self.tree, self.logits)
        return self._distribution

    def p(self, node: int) -> Tensor:
        """Processed target distribution after ``node``: (V,) float32."""
        return self.distribution.p(node)

    def auxiliary_rows(self, owner: object) -> list[int]:
        """Rows of the side nodes that ``owner`` asked for, in its order."""
        first = 1 + len(self.tree)
        return [first + index for index, side in enumerate(self.tree.side) if side.owner is owner]

    def argmax(self, node: int) -> int:
        """Greedy choice after ``node`` (of the processed logits)."""
        return self.distribution.argmax(node)


HiddenStateChunk = Callable[[Sequence, int, Mapping[int, Tensor]], None]
"""Called during prefill with (sequence, position of the chunk's first token, taps by layer)."""


class Target(ABC):
    """A model that scores trees. Implementations state their numerics; none keeps state outside ``Sequence.kv``."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    dtype: str
    """Name of the precision that scores are computed in, as torch has it ("float32", "bfloat16", ...)."""
    context_length: int
    whole: bool = True
    """Whether it takes sub-graphs, side nodes and taps of its prefill."""
    context_note: str = ""
    """Why the context ends where it does, when that is not the model's own limit."""
    origin: Callable[[], Any] | None = None
    """Loads the transformers model that it was made of once more, for heads that begin with some of its weights."""

    @cached_property
    def costs(self) -> ForwardCosts:
        """What its forwards cost on this machine, measured when asked."""
        return ForwardCosts(self)

    def round(self) -> AbstractContextManager[None]:
        """What a round of decoding runs in."""
        return nullcontext()

    @abstractmethod
    def open(self) -> Any:
        """An empty K/V state for one sequence."""

    @abstractmethod
    def length(self, kv: Any) -> int:
        """How many tokens' K/V are committed."""

    @abstractmethod
    def prefill(
        self, sequences: Seq[Sequence], aux_hidden_state_layers: Seq[int] = (), on_chunk: HiddenStateChunk | None = None
    ) -> None:
        """Commit K/V for every token of each sequence but its last, in chunks. Continues where K/V ends."""

    @abstractmethod
    def score(
        self,
        batch: Seq[tuple[Sequence, TokenTree]],
        aux_hidden_state_layers: Seq[int] = (),
        graph: SubGraph = FULL,
        resume: Scores | None = None,
    ) -> Scores:
        """One forward over all trees. Pure: no sequence changes.

        ``resume`` holds an earlier pass over the same sequences and over trees of which these are extensions.
        Rows it ran to the end of the same graph are not run again; rows of another graph are taken up where that
        graph first left the full forward, and recomputed above.
        """

    @abstractmethod
    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        """Keep the K/V of the root and of ``paths[i]`` (nodes from the root down) per sequence; None: nothing."""

    @abstractmethod
    def fork(self, kv: Any, length: int | None = None) -> Any:
        """An independent copy of the first ``length`` tokens' K/V (all of them by default)."""

    def truncate(self, kv: Any, length: int) -> Any:
        """The first ``length`` tokens' K/V, the others given up; ``kv`` itself must not be used again.

        For sequences that go on differently: no round needs it, a decoder inside a drafter does. Where a state cannot
        be shortened in place it is copied.
        """
        shorter = self.fork(kv, length)
        self.close(kv)
        return shorter

    def close(self, kv: Any) -> None:  # noqa: B027 - most targets have nothing to release
        """Release the state; it must not be used again."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings (n, hidden) of token ids (n,), as the first layer sees them."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) from residual-stream states (n, hidden) that left the last layer that ran: norm and LM head."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The norm before the LM head alone, (n, hidden): ``head(x) = head_rows(all) @ final_norm(x)`` up to a cap."""
        raise BadInput(f"{type(self).__name__} does not show its final norm: heads cannot be trained for it")

    def head_rows(self, tokens: Tensor) -> Tensor:
        """The LM head's weights for token ids (n,), (n, hidden) in float32."""
        raise BadInput(f"{type(self).__name__} does not show its LM head: heads cannot be trained for it")

    def sequence(
        self,
        prompt: Seq[int],
        params: SamplingParams | None = None,
        *,
        chance: ChanceSource | None = None,
        references: tuple[tuple[int, ...], ...] = (),
        namespace: str = "",
        stop_ids: frozenset[int] = frozenset(),
        kv: Any = None,
    ) -> Sequence:
        """A sequence of this target, ready for ``prefill``. Raises BadInput for an empty or too long prompt."""
        params = params or SamplingParams()
        if not prompt:
            raise BadInput("the prompt is empty; give at least one token")
        if len(prompt) >= self.context_length:  # the answer needs room for a token at least
            note = f" ({self.context_note})" if self.context_note else ""
            raise BadInput(
                f"the prompt has {len(prompt)} tokens; the model's context holds {self.context_length}{note}; "
                "shorten it"
            )
        outside = next((token for token in prompt if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise BadInput(f"the prompt holds token {outside}; the vocabulary has {self.vocab_size}")
        return Sequence(
            tokens=list(prompt),
            prompt_length=len(prompt),
            kv=self.open() if kv is None else kv,
            sampler=Sampler(params, prompt, self.vocab_size, stop_ids),
            chance=chance or SeededChance(params.seed),
            references=references,
            namespace=namespace,
        )
