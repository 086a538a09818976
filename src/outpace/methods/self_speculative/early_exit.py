"""DEL: the exit layer and the draft length are chosen anew every round.

``early-exit`` (Entezari Zarch et al. 2025, arXiv 2504.05598): the first layers of the target draft, their residual
stream put through the target's own norm and LM head (as LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710, exits).
Every layer but the last is a candidate. A verifying forward passes all of them anyway: their states on the accepted
rows give *shadow tokens*, what each exit would have drafted there, and comparing them with the target's tokens
estimates the acceptance rate a of **every** exit, used or not. The round then takes the exit l and length d with the
most expected tokens per layer,

    (1 - a^(d+1)) / (1 - a)  /  (d (l + h + r) + L + h)

where h is the LM head's cost in layers and r that of a further row of the verifying forward (the paper has h = r = 0;
on a CPU and with a large vocabulary neither is small), or drafts nothing where that gives more. The states still come
then, so that it notices when an exit becomes worthwhile again. A draft also ends with the first token whose largest
probability is below the middle between the averages behind right and wrong shadow tokens.

What candidates cost: their states are copied from a forward that computes them anyway, and those of the prompt are not
asked for. Each shadow token is a row of the LM head, which the paper takes to be free, and on a CPU thirty of them cost
most of a step. So they are rationed: all exits are judged, on the same accepted tokens, as soon as the rounds since the
last time have earned so many rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import Field

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel
from outpace.drafting.self_draft import DraftPass, SelfDraft, SelfDraftState, stopping
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Sequence, Target
from outpace.targets.cost_protocol import NOMINAL
from outpace.targets.sub_graph import SubGraph

if TYPE_CHECKING:
    from torch import Tensor

_PRIOR_RATE = 0.5
_PRIOR_WEIGHT = 2.0
_FIRST_TOKENS = 2
"""Accepted tokens of a request that exits are judged on before their rows of the LM head are rationed."""


@dataclass(slots=True)
class Average:
    """An average whose older values fade by the factor ``memory`` with each new one; it starts as ``weight`` values."""

    total: float
    weight: float

    def add(self, value: float, memory: float) -> None:
        """One more value."""
        self.total = memory * self.total + value
        self.weight = memory * self.weight + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight


def _prior(value: float) -> Average:
    return Average(value * _PRIOR_WEIGHT, _PRIOR_WEIGHT)


@dataclass(slots=True)
class ExitRecord:
    """What one request knows about one exit."""

    layer: int
    rate: Average = field(default_factory=lambda: _prior(_PRIOR_RATE))
    """Probability that a shadow token is accepted, those before it being right."""
    confidence_right: Average = field(default_factory=lambda: _prior(0.8))
    """Largest probability behind right shadow tokens."""
    confidence_wrong: Average = field(default_factory=lambda: _prior(0.2))
    """Largest probability behind wrong ones."""

    @property
    def threshold(self) -> float:
        """The middle between both confidences: the first token below it ends a draft."""
        return 0.5 * (self.confidence_right.value + self.confidence_wrong.value)


@dataclass(slots=True)
class EarlyExitState(SelfDraftState):
    """One request: its exits."""

    exits: list[ExitRecord]
    rows: float
    """Rows of the LM head that may be spent on shadow tokens."""
    idle: int = 0
    """Rounds since it last drafted."""


class EarlyExit(SelfDraft[EarlyExitState]):
    """Drafts through the first layers; ``exits`` are the layer counts to choose from, ascending.

    ``head`` and ``row``: costs in layers (h and r above). ``memory``: what stays of an estimate per token. ``rows``:
    rows of the LM head that a round earns for shadow tokens, one for each exit and judged token; ``rest``: a round
    without a draft earns this part of them. ``dynamic``: stop by confidence.
    """

    def __init__(
        self,
        target: Target,
        exits: tuple[int, ...],
        *,
        head: float = 0.0,
        row: float = 0.0,
        memory: float = 0.95,
        rows: int = 8,
        rest: int = 16,
        dynamic: bool = True,
    ) -> None:
        super().__init__(target)
        self.aux_hidden_state_layers = exits
        self.head, self.row = head, row
        self.memory = memory
        self.rows = rows
        self.rest = rest
        self.dynamic = dynamic

    @property
    def prefill_layers(self) -> tuple[int, ...]:
        return ()  # exits are judged on the answer

    def begin(self, sequence: Sequence) -> EarlyExitState:
        exits = [ExitRecord(layer) for layer in self.aux_hidden_state_layers]
        return EarlyExitState(sequence, exits, float(_FIRST_TOKENS * len(exits)))

    def plan(self, state: EarlyExitState, budget: Budget) -> tuple[SubGraph, Budget]:
        record, length = self.choice(state.exits, min(budget.depth, budget.max_nodes))
        state.idle = 0 if length else state.idle + 1
        chosen = replace(budget, depth=length)
        return SubGraph(stop=record.layer), stopping(chosen, record.threshold) if self.dynamic else chosen

    def choice(self, exits: Seq[ExitRecord], most: int) -> tuple[ExitRecord, int]:
        """The exit and the length, 0 to ``most`` tokens, with the most tokens per layer; of equals the first."""
        best, best_pace = (exits[0], 0), 1.0 / self.layers(0, 0)
        for record in exits:
            rate, expected = record.rate.value, 1.0
            for length in range(1, most + 1):
                expected += rate**length
                pace = expected / self.layers(record.layer, length)
                if pace > best_pace:
                    best, best_pace = (record, length), pace
        return best

    def layers(self, layer: int, length: int) -> float:
        """What a round of ``length`` draft tokens from exit ``layer`` costs, in layers."""
        return length * (layer + self.head + self.row) + self.target.num_layers + self.head

    def learn(self, state: EarlyExitState, verdict: Verdict, drafted: DraftPass | None) -> None:
        """Compare shadow tokens of all exits on the accepted rows with the tokens that the target committed there."""
        import torch

        state.rows += self.rows / (self.rest if state.idle else 1)
        # A stop token that comes first leaves nothing to compare with.
        rows = verdict.rows[: min(len(verdict.committed), int(state.rows / len(state.exits)))]
        if not rows:
            return
        state.rows -= len(rows) * len(state.exits)
        # One pass for all exits: few rows cost little more than one, which reads the head's weights.
        states = torch.cat([verdict.scores.hidden_states[record.layer][rows] for record in state.exits])
        shadow = self._shadow_tokens(state, verdict, rows, self.target.lm_head(states))
        for index, (hit, confidence) in enumerate(shadow):
            record = state.exits[index // len(rows)]
            record.rate.add(hit, self.memory)
            (record.confidence_right if hit > 0.5 else record.confidence_wrong).add(confidence, self.memory)

    @staticmethod
    def _shadow_tokens(
        state: EarlyExitState, verdict: Verdict, rows: list[int], logits: Tensor
    ) -> Iterator[tuple[float, float]]:
        """For every exit and row, ``logits`` (exits * rows, V): the probability that a token drafted there is accepted,
        and the largest probability of the row."""
        import torch

        from outpace.targets.top import top_and_totals

        temperature = state.sequence.params.temperature
        # Raw logits: penalties and the like would shift both sides alike, and the sampler has moved on.
        if state.sequence.params.greedy:
            for index, (values, ids, total) in enumerate(top_and_totals(logits, 1)):
                yield float(ids[0] == verdict.committed[index % len(rows)]), math.exp(values[0] - total)
            return
        target = (verdict.scores.logits[rows].float() / temperature).softmax(-1)
        exits = (logits.float() / temperature).softmax(-1)
        shared = torch.minimum(exits.view(-1, *target.shape), target).sum(-1).flatten()
        yield from zip(shared.tolist(), exits.max(-1).values.tolist(), strict=True)


class EarlyExitSettings(StrictModel):
    """Settings of ``early-exit``."""

    num_draft_tokens: int = Field(8, ge=0, le=64, description="maximum number of draft tokens per round")
    exits: tuple[int, ...] | None = Field(
        None, description="layers after which drafting may exit; by default every one but the last"
    )
    rows: int = Field(
        8,
        ge=1,
        le=4096,
        description="rows of the LM head per round for evaluating the exits; all exits are evaluated, on an "
        "accepted token, once there is a row for each",
    )
    memory: float = Field(
        0.95, ge=0.0, lt=1.0, description="factor by which the weight of an exit's record decreases per token"
    )
    rest: int = Field(8, ge=1, description="in a round in which no exit makes decoding faster, rows is divided by this")
    dynamic: bool = Field(True, description="stop a draft by confidence")
    head_cost: float | None = Field(None, ge=0.0, description="the LM head's cost in layers; by default from its size")
    row_cost: float = Field(
        NOMINAL, ge=0.0, description="cost of one more row of the verifying forward, in autoregressive steps"
    )


def exits_of(target: Target, exits: tuple[int, ...] | None) -> tuple[int, ...]:
    """The candidate exits. Raises BadInput for layers that a draft cannot exit after."""
    count = target.num_layers
    if exits is None:
        exits = tuple(range(1, count))
    wrong = next((layer for layer in exits if not 0 < layer < count), None)
    if wrong is not None or not exits:
        problem = "no exit is named" if wrong is None else f"cannot exit after {wrong} layers"
        raise BadInput(f"{problem}: the model has {count}, and an exit leaves 1 to {count - 1} of them to draft")
    return tuple(sorted(set(exits)))


@register(
    "early-exit",
    family="self-speculative",
    paper="Entezari Zarch et al. 2025, arXiv 2504.05598",
    summary="The first layers of the model draft; the exit layer and the draft length are chosen each round "
    "from cached states.",
    when_to_use="Models trained to exit early (LayerSkip). With other models early layers predict too little; the "
    "method measures this and hardly drafts.",
    aliases=("del",),
    tiny={"num_draft_tokens": 2, "memory": 0.5},
)
def build(context: Context, settings: EarlyExitSettings) -> Parts:
    """The target and its exits."""
    target = context.target
    # A layer has about 12 hidden^2 weights, the head vocabulary x hidden: known without a clock.
    size = target.vocab_size / (12.0 * target.hidden_size)
    head = size if settings.head_cost is None else settings.head_cost
    drafter = EarlyExit(
        target,
        exits_of(target, settings.exits),
        head=head,
        row=settings.row_cost * (target.num_layers + head),
        memory=settings.memory,
        rows=settings.rows,
        rest=settings.rest,
        dynamic=settings.dynamic,
    )
    return Parts(drafter, Fixed(settings.num_draft_tokens, max_nodes=settings.num_draft_tokens))
