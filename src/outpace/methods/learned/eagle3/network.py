"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer over fused low, middle and high states of the target.

A row holds a token and the state before it: at first the target's own three states, fused by a linear layer, later what
the drafter itself made for the row before. Its attention reads the token's embedding and that state, each behind its
norm, side by side. Training unrolls the drafter over its own outputs ("training-time test"), and asks for the target's
distribution only, not for its states. The draft vocabulary is a reduced one.

``norms="attdrift"`` places two norms otherwise (Attention Drift, Eldenk et al. 2026, arXiv 2605.09992): an RMSNorm on
each captured state before they are fused, and the final norm's output handed on to the next row, so that states keep
their size along a chain.

Rows from which a round would begin may weigh more (:mod:`outpace.heads.simulated_rounds`), and chains that the drafter
drafts itself may be replayed from the places where it fails (Draft-OPD, Lei et al. 2026, arXiv 2605.29343).

Ours: steps after the first run only the rows that drafting can reach, after the prompt and after tokens of the draft
vocabulary. The final norm begins as the target's, whose LM head reads what it makes.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from outpace.core.validation import StrictModel
from outpace.heads.base import Batch, Head, Replay, Teacher
from outpace.heads.blocks import DecoderLayer, initialised
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig, low_middle_high
from outpace.heads.kinds import kind
from outpace.heads.row_losses import ETA, ROWS, Form, RowLosses, row_losses
from outpace.heads.simulated_rounds import leading, round_starts
from outpace.methods.learned.eagle3.unrolling import Unrolling
from outpace.targets.base import Target


class Eagle3Options(StrictModel):
    """Settings of an ``eagle3`` head."""

    steps: int = Field(4, ge=1, le=16, description="how far training unrolls the drafter over its own outputs")
    decay: float = Field(0.8, gt=0.0, le=1.0, description="weight of a step's loss relative to the one before")
    norms: Literal["eagle3", "attdrift"] = Field(
        "attdrift", description="where norms are placed: as EAGLE-3 has them, or as Attention Drift"
    )
    residual: Literal["state", "normed"] = Field(
        "state", description="what the layer adds to: its state, or the state behind its norm (norm_before_residual)"
    )
    qk_norm: bool = Field(False, description="RMSNorm of queries and keys, as Qwen3 has them")
    loss: Form = Field(
        "ce", description="cross entropy (ce), total variation at temperature 1 (tv), or a mix by acceptance (lk)"
    )
    eta: float = Field(ETA, ge=0.0, description="how fast loss lk turns from KL to total variation")
    start_weight: float = Field(
        1.0, ge=1.0, le=1000.0, description="weight of rows from which a round would begin; 1: that of all others"
    )
    replay: float = Field(
        0.0, ge=0.0, le=1.0, description="share of the batches in which it also learns from what it drafts itself"
    )
    later_rows: float = Field(
        1.0, gt=0.0, le=1.0, description="share of the rows, drawn at random, that are unrolled beyond the first step"
    )

    @model_validator(mode="after")
    def _together(self) -> Eagle3Options:
        if self.later_rows < 1.0 and self.start_weight > 1.0:
            raise ValueError("start_weight needs all rows unrolled: leave out later_rows")
        if self.replay and self.steps < 2:
            raise ValueError("replay needs steps of at least 2")
        return self


@kind("eagle3")
class Eagle3(Head):
    """Weights: ``fc``, ``layers.0`` with ``hidden_norm`` beside its own norms, ``norm``."""

    Options = Eagle3Options
    paper = "Li et al. 2025, arXiv 2503.01840"
    packs = True

    def __init__(self, config: HeadConfig, draft_vocabulary: DraftVocabulary) -> None:
        super().__init__(config, draft_vocabulary)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.aux_hidden_state_layers) * hidden, hidden, bias=False)
        layer = DecoderLayer(config, inputs=2 * hidden, norms=self.options.qk_norm)
        layer.hidden_norm = nn.RMSNorm(hidden, config.epsilon)
        self.layers = nn.ModuleList([layer])
        self.norm = nn.RMSNorm(hidden, config.epsilon)
        if self.options.norms == "attdrift":
            self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, config.epsilon) for _ in config.aux_hidden_state_layers)
        initialised(self)

    @classmethod
    def aux_layers_of(cls, layers: int, options: Any) -> tuple[int, ...]:  # noqa: ARG003
        return low_middle_high(layers)

    def initialise(self, target: Target, teacher: Teacher) -> None:
        # The borrowed LM head expects the target's own norm before it; of a state of ones it shows its weights.
        ones = target.final_norm(torch.ones(1, self.config.hidden_size))[0]
        self.norm.weight.data.copy_(ones)

    def fused(self, states: list[Tensor]) -> Tensor:
        """The target's states of one token, (..., hidden) each, as the state that the next token's row begins with."""
        if self.options.norms == "attdrift":
            states = [norm(one) for norm, one in zip(self.fc_norm, states, strict=True)]
        found: Tensor = self.fc(torch.cat(states, -1).to(self.fc.weight.dtype))
        return found

    def handed_on(self, stream: Tensor, normed: Tensor) -> Tensor:
        """The state that the next row begins with, of what left the layer, as it is and behind the final norm."""
        return normed if self.options.norms == "attdrift" else stream

    def unrolling(self, batch: Batch, embedding: Tensor) -> Unrolling:
        """The network, run step after step over a batch. ``embedding`` (V, hidden): the target's."""
        return Unrolling(self, batch, embedding)

    @property
    def replay_share(self) -> float:
        return float(self.options.replay)

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        options = self.options
        targets, place = teacher.target_probs(batch)
        known = self.draft_vocabulary.t2d(len(teacher.embedding))[batch.tokens]
        # A token outside of the draft vocabulary cannot be learned, and nothing is drafted after one.
        wanted = batch.answer & (known >= 0)
        alive = batch.ahead(wanted, 2).flatten()
        run = self.unrolling(batch, teacher.embedding)
        found: list[tuple[Tensor, RowLosses]] = []
        for step in range(options.steps):
            alive = alive & batch.ahead(wanted, 2 + step).flatten()
            tokens, there = batch.ahead(batch.tokens, 1 + step).flatten(), batch.ahead(place, 1 + step).flatten()
            if step and batch.replay is not None:
                tokens, there, alive = _replayed(batch.replay, step, tokens, there, alive, len(targets.p))
            if step == 1 and self.training and options.later_rows < 1.0:
                alive = alive & (torch.rand(len(alive), device=alive.device) < options.later_rows)
            normed = run.step(alive, tokens)
            places, labels = there[run.rows], batch.ahead(known, 2 + step).flatten()[run.rows]
            losses = row_losses(
                normed,
                self.draft_vocabulary,
                targets.p,
                targets.best,
                labels,
                places=places,
                form=options.loss,
                eta=options.eta,
            )
            found.append((run.rows, losses))
        return self._weighed(batch, found)

    def _weighed(self, batch: Batch, steps: list[tuple[Tensor, RowLosses]]) -> dict[str, Tensor]:
        """The loss of all steps: means over rows; in training those weigh more from which rounds would begin.

        Otherwise rounds are played over the text too: ``accept_1``, the share of rounds whose first draft token is
        accepted, ``round_tokens``, tokens of a round of a chain as long as the unrolling, and how many ``rounds``.
        """
        options, count = self.options, batch.tokens.numel()
        weights = torch.ones(count, device=batch.tokens.device)
        figures: dict[str, Tensor] = {}
        if options.start_weight > 1.0 or not self.training:
            accepted = leading([(rows, one.right) for rows, one in steps], count)
            starts = round_starts(batch, accepted)
            if self.training:
                weights += (options.start_weight - 1.0) * starts
            begun = accepted[starts].float()
            figures["rounds"] = weights.new_tensor(float(len(begun)))
            figures["accept_1"] = (begun > 0).float().mean() if len(begun) else weights.new_zeros(())
            figures["round_tokens"] = 1.0 + begun.mean() if len(begun) else weights.new_ones(())
        total, sizes = torch.zeros((), device=weights.device), 0.0
        agreement: dict[str, Tensor] = {}
        for step, (rows, one) in enumerate(steps):
            shares = weights[rows]
            total = total + options.decay**step * (one.losses @ shares) / shares.sum().clamp_min(1.0)
            sizes += options.decay**step
            agreement[f"agree_{step + 1}"] = one.agreed.float().mean() if len(rows) else weights.new_zeros(())
        return {"loss": total / sizes, **agreement, **figures}

    @torch.no_grad()
    def own_drafts(self, batch: Batch, teacher: Teacher) -> tuple[Tensor, Tensor]:
        known = self.draft_vocabulary.t2d(len(teacher.embedding))[batch.tokens]
        alive = batch.ahead(batch.answer, 2).flatten()
        run = self.unrolling(batch, teacher.embedding)
        tokens = batch.ahead(batch.tokens, 1).flatten()
        drafted = torch.full((len(tokens), self.options.steps), -1, dtype=torch.long, device=tokens.device)
        steps = []
        for step in range(self.options.steps):
            normed = run.step(alive, tokens)
            asked = batch.ahead(batch.answer, 2 + step).flatten()[run.rows]
            labels = torch.where(asked, batch.ahead(known, 2 + step).flatten()[run.rows], -1)
            likeliest, right = self._likeliest(normed, labels)
            drafted[run.rows, step] = self.draft_vocabulary.d2t[likeliest]
            tokens = drafted[:, step].clamp_min(0)
            steps.append((run.rows, right))
        return drafted, leading(steps, len(tokens))

    def _likeliest(self, normed: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) the likeliest draft tokens, and where they are the labels; a label as likely as any is taken."""
        found, right = [], []
        for states, some in zip(torch.split(normed, ROWS), torch.split(labels, ROWS), strict=True):
            logits = self.draft_vocabulary(states)
            hit = (some >= 0) & (logits.gather(-1, some[:, None].clamp_min(0))[:, 0] >= logits.amax(-1))
            found.append(torch.where(hit, some, logits.argmax(-1)))
            right.append(hit)
        return torch.cat(found), torch.cat(right)


def _replayed(
    replay: Replay, step: int, tokens: Tensor, there: Tensor, alive: Tensor, targets: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What rows read, which distribution follows, and which rows run, where some read what they have drafted."""
    own = replay.tokens[step - 1]
    its = targets - len(replay.states) + replay.places[step - 1]
    begun = replay.tokens[0] >= 0  # from its second step on such a row reads its own tokens alone
    read = own >= 0
    return torch.where(read, own, tokens), torch.where(read, its, there), torch.where(begun, read, alive)
