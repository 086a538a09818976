"""Target: what a target model does for the round, whatever runs underneath.

A forward over a sequence's tree has row 0 for the root (the first token whose K/V is not committed yet), rows 1..n
for the nodes and then one for each auxiliary token. Committed K/V of a :class:`Sequence` excludes its last token, so
after ``prefill`` and after every ``commit`` the root is the last committed token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from outpace.core.chance import ChanceSource, SeededChance
from outpace.core.errors import BadInput
from outpace.core.processors import ProcessorFailure
from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.token_distribution import OpenRows, dense_distributions
from outpace.core.tree import TokenTree
from outpace.targets.costs import Costs, ForwardCosts
from outpace.targets.scores import Scores, Sequence, SomeLogits, TreeScores
from outpace.targets.sub_graph import FULL, SubGraph

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outpace.targets.dense.decoder_spec import DecoderSpec


__all__ = ["HiddenStateChunk", "Scores", "Sequence", "SomeLogits", "Target", "TreeScores", "Trees"]

Trees = Seq[tuple[Sequence, TokenTree]]
"""Sequences, and the tree to score after each."""
HiddenStateChunk: TypeAlias = "Callable[[Sequence, int, Mapping[int, Tensor]], None]"
"""Called during prefill with (sequence, position of the chunk's first token, (rows, hidden) by layer)."""


class Target(ABC):
    """A model that scores trees. Implementations state their numerics; none keeps state outside ``Sequence.kv``."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    dtype: str
    """Name of the precision that scores are computed in ("float32", "bfloat16", ..., "int8", "int4")."""
    kv_dtype: str = "auto"
    """How committed K/V is kept: "float32", "bfloat16", "int8"; "auto": as the model itself keeps it."""
    kv_bytes_per_token: int = 0
    """Bytes of one token's keys and values in all layers; 0 where the target does not know."""
    batch_invariant: bool = False
    """Whether a row's scores are the same bits whatever rows, trees and sequences are scored beside it."""
    context_length: int
    """In tokens."""
    context_note: str = ""
    """Why the context ends where it does, when that is not the model's own limit."""
    whole: bool = True
    """Whether it takes sub-graphs, auxiliary tokens and ``aux_hidden_state_layers`` in prefill."""
    origin: Callable[[], DecoderSpec | None] | None = None
    """Reads the weights that it was made of once more."""

    @property
    def arithmetic(self) -> str:
        """Tells apart what its forwards compute in: the precision, and how K/V is kept where there is a choice."""
        return self.dtype

    @cached_property
    def device(self) -> torch.device:
        """Where logits and hidden states are, and heads beside it run: the CPU, unless it says otherwise."""
        import torch

        return torch.device("cpu")

    @property
    def open_rows(self) -> OpenRows:
        """What makes distributions of its sequences' logits, and of their drafts'."""
        return dense_distributions

    @cached_property
    def costs(self) -> Costs:
        """Seconds that its forwards take on this machine, measured when asked. ``load`` gives it a table that is kept,
        or fixed costs."""
        return ForwardCosts(self)

    def round(self) -> AbstractContextManager[None]:
        """The context manager that a round of decoding runs in."""
        return nullcontext()

    def lasted(self, seconds: float, drafting: float) -> float:
        """What a round took of which a clock read ``seconds``, ``drafting`` of them for its draft. Targets whose
        forwards do not run say what these would have taken."""
        return seconds

    @abstractmethod
    def open(self) -> Any:
        """An empty K/V state for one sequence."""

    @abstractmethod
    def length(self, kv: Any) -> int:
        """How many tokens' K/V are committed in ``kv``."""

    @abstractmethod
    def prefill(
        self,
        sequences: Seq[Sequence],
        aux_hidden_state_layers: Seq[int] = (),
        on_chunk: HiddenStateChunk | None = None,
        most: int | None = None,
    ) -> None:
        """Commit K/V for every token of each sequence but its last, in chunks, from where its K/V ends.

        ``on_chunk`` is called with every chunk's hidden states of ``aux_hidden_state_layers``. ``most``: run so many
        rows at most, of the first sequences first, and leave the rest to later calls; None: all.
        """

    @abstractmethod
    def score(
        self, batch: Trees, aux_hidden_state_layers: Seq[int] = (), graph: SubGraph = FULL, resume: Scores | None = None
    ) -> Scores:
        """One forward over all trees. Pure: no sequence changes.

        ``resume`` holds an earlier pass over the same sequences and over trees of which these are extensions. Rows
        that it ran through the same graph are not run again; of rows of another graph the layers below
        :meth:`SubGraph.first_difference` are kept and those above are computed. Raises BadInput for what the target
        does not take, ValueError for a ``resume`` that does not fit.
        """

    @abstractmethod
    def commit(self, scores: Scores, paths: Seq[Seq[int] | None]) -> None:
        """Commit the K/V of the root and of ``paths[i]`` (nodes from the root down) per sequence; None: nothing.

        Raises ValueError for stale scores, those of a sub-graph, and nodes that are not a path of the tree.
        """

    @abstractmethod
    def fork(self, kv: Any, length: int | None = None) -> Any:
        """A copy of the first ``length`` tokens' K/V (None: all). Raises ValueError where there are fewer."""

    def truncate(self, kv: Any, length: int) -> Any:
        """The first ``length`` tokens' K/V, the others given up; ``kv`` itself must not be used again.

        No round needs it; a draft model whose text goes on differently does. Raises ValueError where there are fewer.
        """
        shorter = self.fork(kv, length)
        self.close(kv)
        return shorter

    def close(self, kv: Any) -> None:  # noqa: B027 - some targets have nothing to release
        """Release the K/V, which must not be used again."""

    kv_blocks: bool = False
    """Whether parts of K/V can be copied with :meth:`kv_block` and :meth:`append_kv`, as a prefix cache does."""

    def kv_block(self, kv: Any, start: int, stop: int) -> Any:
        """A copy of the K/V of committed tokens ``start`` to ``stop``, multiples of 16, for :meth:`append_kv` alone."""
        raise BadInput(f"{type(self).__name__} does not copy parts of its K/V: there is no prefix cache for it")

    def append_kv(self, kv: Any, block: Any, rows: int) -> None:
        """Commit a block of ``rows`` tokens, copied. ``kv`` must hold the K/V of what came before the block."""
        raise BadInput(f"{type(self).__name__} does not copy parts of its K/V: there is no prefix cache for it")

    def reserve_kv(self, kv: Any, rows: int) -> None:  # noqa: B027 - some targets take memory with each token
        """Make room for ``rows`` more tokens at once, so that none of them moves the K/V that is there."""

    def kv_bytes(self, kv: Any | None, rows: int = 0) -> int:
        """Bytes of memory that ``kv`` (None: an empty one) would take with ``rows`` more tokens; 0 where the target
        does not know."""
        return self.kv_bytes_per_token * (rows if kv is None else self.length(kv) + rows)

    def limit_kv(self, most: int | None, planned: int = 0) -> None:  # noqa: B027 - most targets keep no idle memory
        """From now on hold ``most`` bytes for K/V, memory that no sequence uses included (None: any number).
        ``planned``: what the sequences will need of that, as :meth:`kv_bytes` counts."""

    def lengthen(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Append committed tokens to a sequence that is only measured: its K/V may hold anything."""
        sequence.tokens.extend(tokens)
        self.prefill([sequence])

    def keys(self, kv: Any, start: int, stop: int) -> Tensor:
        """Committed keys, rotated: (layers, kv_heads, n, width) float32. Raises BadInput where it shows none."""
        raise BadInput(f"{type(self).__name__} does not give access to its keys: no part of them can be chosen")

    def queries(self, sequences: Seq[Sequence]) -> list[Tensor]:
        """Queries of every last token in a full forward: (layers, heads, width) float32 each. Raises BadInput, too."""
        raise BadInput(f"{type(self).__name__} does not give access to its queries: K/V cannot be chosen by them")

    def check_skips(self, graph: SubGraph) -> None:  # noqa: B027 - most targets can skip every sublayer
        """Raise BadInput when a sublayer that ``graph`` skips cannot be skipped."""

    def decoder_spec(self) -> DecoderSpec | None:
        """Its weights, loaded again where it keeps them packed (seconds, and the model's memory); None: no spec."""
        return None if self.origin is None else self.origin()

    def runner_for(self, spec: DecoderSpec) -> Any:
        """A RowTarget that runs a head's layers on this target's own kernels, in a precision that suits its own.

        None: it has no kernels of its own, and heads beside it run in plain PyTorch on ``device``.
        """
        return None

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings (n, hidden) of token ids (n,), as the first layer sees them."""

    @abstractmethod
    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (n, V) of residual-stream states (n, hidden) that left a layer: final norm and LM head."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The norm before the LM head alone, (n, hidden) to (n, hidden): ``lm_head(x)`` is ``lm_head_rows(all) @
        final_norm(x)``, up to a soft cap. Raises BadInput where it is not accessible."""
        raise BadInput(f"{type(self).__name__} does not give access to its final norm: heads cannot be trained for it")

    def lm_head_rows(self, tokens: Tensor) -> Tensor:
        """The LM head's weights for token ids (n,), (n, hidden) float32. Raises BadInput where not accessible."""
        raise BadInput(f"{type(self).__name__} does not give access to its LM head: heads cannot be trained for it")

    def check_prompt(self, prompt: Seq[int]) -> None:
        """Raise BadInput for a prompt that is empty, too long or outside the vocabulary."""
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

    def sequence(
        self,
        prompt: Seq[int],
        params: SamplingParams | None = None,
        *,
        chance: ChanceSource | None = None,
        earlier: int = 0,
        references: tuple[tuple[int, ...], ...] = (),
        namespace: str = "",
        stop_ids: frozenset[int] = frozenset(),
        kv: Any = None,
    ) -> Sequence:
        """A sequence of this target, ready for ``prefill``; ``kv``: of a beginning of the prompt, if there is any.

        ``earlier``: how many requests of the namespace had this seed before (:mod:`outpace.core.chance`).
        Raises BadInput for a prompt that is empty, too long or outside the vocabulary, and where one of the user's
        processors cannot begin.
        """
        params = params or SamplingParams()
        self.check_prompt(prompt)
        sampler = Sampler(params, prompt, self.vocab_size, stop_ids, self.open_rows)
        if isinstance(sampler.states, ProcessorFailure):
            raise sampler.states
        return Sequence(
            tokens=list(prompt),
            prompt_length=len(prompt),
            kv=self.open() if kv is None else kv,
            sampler=sampler,
            chance=chance or SeededChance(params.fixed_seed, (tuple(prompt), *references), earlier),
            references=references,
            namespace=namespace,
        )
