"""Drafts of parallel heads: what the target's last known state says of the positions to come, one forward a round.

The newest state is that of the token before the last: the last committed token came out of it and has none yet. So the
first head, which says what stands two positions behind its state, says the first draft token.

``medusa`` (Cai et al. 2024, arXiv 2401.10774) spans a tree over the heads' likeliest tokens. The paper's tree is chosen
once, node by node, by how often the i-th choice of each head was right; ``tree="sparse"`` chooses it by those rates as
the request itself has them. By default it is chosen in every round, by the rates that candidates as sure as these have
had. ``bpd`` (Stern et al. 2018, arXiv 1811.03115) drafts the chain of every head's likeliest token. Judged exactly,
both: the papers' looser criteria are another matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Controller
from outpace.controllers.cost_model import CostModel
from outpace.controllers.fixed import Fixed
from outpace.drafters.calibration import Calibration
from outpace.drafters.marginals import FromMarginals
from outpace.drafters.memory import Namespaces
from outpace.heads.lm_head import LmHead, Product
from outpace.heads.medusa import Bpd, Medusa, ParallelHeads
from outpace.method import Context, Parts, register
from outpace.targets.base import Sequence, Target, TreeScores

RECENT = 32
"""States of a request's last tokens that are kept: a decoder inside a drafter takes some of its tokens back."""


class LastStates:
    """The states of the last tokens that have one. ``end``: the first token without."""

    def __init__(self) -> None:
        self.end = 0
        self._rows: list[Tensor] = []

    def put(self, position: int, rows: Tensor) -> None:
        """States (n, hidden) of the tokens from ``position`` on; what was kept of these is replaced."""
        self.cut(position)
        if self.end != position:
            self._rows.clear()
        self._rows = [*self._rows, *rows][-RECENT:]
        self.end = position + len(rows)

    def cut(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        if length < self.end:
            del self._rows[max(0, len(self._rows) - (self.end - length)) :]
            self.end = length

    def at(self, position: int) -> Tensor | None:
        """(hidden,), or None where it is not known."""
        index = position - self.end + len(self._rows)
        return self._rows[index] if 0 <= index < len(self._rows) else None

    def copy(self) -> LastStates:
        """The same states, kept apart."""
        twin = LastStates()
        twin.end, twin._rows = self.end, list(self._rows)
        return twin


Network = Callable[[Tensor], Tensor]
"""States (n, hidden) behind the final norm to (n, heads, hidden): a head's own part, as it runs beside a target."""


def network(head: ParallelHeads, target: Target) -> Network:
    """The head's blocks, or its feed-forward layer, with their matrices packed as the target's are."""
    if isinstance(head, Bpd):
        return _layer(head, target)
    assert isinstance(head, Medusa)
    return _blocks(head, target)


def _blocks(head: Medusa, target: Target) -> Network:
    # All heads' first blocks read the same rows: they are one product.
    layers = list(zip(*head.chains(), strict=True))
    first = Product(head.config, torch.cat([one.weight for one in layers[0]]), target)
    later = [[Product(head.config, one.weight, target) for one in layer] for layer in layers[1:]]
    biases = [torch.stack([one.bias.detach().float() for one in layer]).to(first.device) for layer in layers]

    def run(normed: Tensor) -> Tensor:
        added = first(normed).view(len(normed), *biases[0].shape)
        states = normed[:, None] + functional.silu(added + biases[0])
        for products, bias in zip(later, biases[1:], strict=True):
            added = torch.stack([one(states[:, index].contiguous()) for index, one in enumerate(products)], 1)
            states = states + functional.silu(added + bias)
        return states

    return run


def _layer(head: Bpd, target: Target) -> Network:
    inner, outer = (Product(head.config, one.weight, target) for one in (head.inner, head.outer))
    first, second = (one.bias.detach().float().to(inner.device) for one in (head.inner, head.outer))

    def run(normed: Tensor) -> Tensor:
        added = outer(functional.relu(inner(normed) + first)) + second
        return normed[:, None] + added.view(len(normed), -1, normed.shape[1])

    return run


class HeadsDrafter(FromMarginals):
    """Drafts what parallel heads say of the target's newest state: trees of ``k`` tokens a head, or chains."""

    def __init__(self, head: ParallelHeads, target: Target, k: int, *, by_rank: bool = False) -> None:
        super().__init__(head.words.ids, k)
        self.target = target
        self.heads: int = head.options.heads
        (self._tap,) = self.taps = head.config.taps
        self._network, self._lm_head = network(head, target), LmHead(head, target)
        self._states: dict[Sequence, LastStates] = {}
        if by_rank:
            self._calibrations = Namespaces(lambda: ByRank(rank_prior))

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        self._states[sequence] = LastStates()

    def on_prefill(self, sequence: Sequence, position: int, taps: Mapping[int, Tensor]) -> None:
        rows = taps[self._tap]
        last = rows[-RECENT:].clone()  # what is kept must not keep the whole chunk
        self._states[sequence].put(position + len(rows) - len(last), last)

    @torch.inference_mode()
    def rows(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Tensor | None]:
        states = [self._states[one].at(len(one.tokens) - 2) for one in sequences]
        known = [state for state in states if state is not None]
        if not known:
            return [None] * len(states)
        count = min(self.heads, max(depths))
        said = self._network(self.target.final_norm(torch.stack(known)).float())[:, :count]
        logits = iter(torch.split(self._lm_head(said.flatten(0, 1)), count))
        return [None if state is None else next(logits) for state in states]

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        super().observe(sequences, scores, verdicts)
        for sequence, part, verdict in zip(sequences, scores, verdicts, strict=True):
            # An answer that ended may have been cut short of the path; its last token has no state.
            path = verdict.path[: max(0, len(sequence.tokens) - part.length - 1)]
            self._states[sequence].put(part.length - 1, part.taps[self._tap][[0, *(1 + node for node in path)]])

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        super().fork(sequence, twin)
        self._states[twin] = self._states[sequence].copy()

    def rewind(self, sequence: Sequence, kept: int) -> None:
        super().rewind(sequence, kept)
        self._states[sequence].cut(kept)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._states.pop(sequence, None)


class ByRank(Calibration):
    """Rates by head and rank alone, however sure the head is: what the paper chooses its tree by."""

    def rate(self, kind: Any) -> float:
        return super().rate(kind[:2])

    def learn(self, kind: Any, hit: bool) -> None:
        super().learn(kind[:2], hit)


def rank_prior(kind: Any) -> float:
    """Of a head (from 0) and a rank, before anything is known."""
    depth, rank = kind
    return float(0.5 * 0.85**depth * 0.4**rank)


class MedusaSettings(BaseModel):
    """Settings of ``medusa``."""

    model_config = ConfigDict(extra="forbid")

    nodes: int | None = Field(None, ge=0, le=512, description="draft tokens a round; by default what pays")
    k: int = Field(8, ge=1, le=64, description="likeliest tokens of each head that are looked at")
    tree: Literal["dynamic", "sparse"] = Field(
        "dynamic", description="chosen by how sure the heads are, or by the rank of their tokens alone"
    )


@register(
    "medusa",
    family="trained",
    paper="Cai et al. 2024, arXiv 2401.10774",
    summary="Heads on the target's last state each say one of the next tokens; a tree is spanned over their choices.",
    head="medusa",
    pays="Where a draft must cost next to nothing: all heads are one small forward a round. "
    "Later positions are said without knowing the earlier ones, so accepted paths stay short.",
    tiny={"nodes": 3, "k": 2},
)
def build_medusa(context: Context, settings: MedusaSettings) -> Parts:
    """A tree over the heads' likeliest tokens."""
    drafter = HeadsDrafter(_head(context, "medusa"), context.target, settings.k, by_rank=settings.tree == "sparse")
    controller: Controller = CostModel(context.target.costs, width=settings.k)
    if settings.nodes is not None:
        controller = Fixed(drafter.heads, width=settings.k, nodes=settings.nodes)
    return Parts(drafter, controller)


class BpdSettings(BaseModel):
    """Settings of ``bpd``."""

    model_config = ConfigDict(extra="forbid")

    length: int | None = Field(None, ge=0, le=16, description="draft tokens a round; by default what pays")


@register(
    "bpd",
    family="trained",
    paper="Stern et al. 2018, arXiv 1811.03115",
    summary="One feed-forward layer on the target's last state says the next tokens at once, a chain.",
    head="bpd",
    pays="As medusa's heads do, on machines where scoring more than a few rows is dear. A tree accepts more elsewhere.",
    tiny={"length": 2},
)
def build_bpd(context: Context, settings: BpdSettings) -> Parts:
    """The chain of the heads' likeliest tokens."""
    drafter = HeadsDrafter(_head(context, "bpd"), context.target, 1)
    if settings.length is None:
        return Parts(drafter, CostModel(context.target.costs))
    return Parts(drafter, Fixed(settings.length, nodes=settings.length))


def _head(context: Context, kind: str) -> ParallelHeads:
    head = context.head(kind)
    assert isinstance(head, ParallelHeads)
    return head
