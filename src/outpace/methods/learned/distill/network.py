"""A draft LM: a small Llama of the target's own vocabulary, distilled from it (DistillSpec, Zhou et al. 2024,
arXiv 2310.08461).

It reads tokens only, through the target's embedding, and scores its draft vocabulary with the target's LM-head rows;
both are borrowed. It learns the target's distribution after each token of an answer, by one of four divergences:
forward KL, reverse KL, Jensen-Shannon and total variation. A share of the batches may continue the prompts with the
draft LM's own samples, labelled by the target (:mod:`outpace.training.on_policy`).

Unlike in the paper, its layers begin as some of the target's, with the MLP neurons that matter most
(:mod:`outpace.heads.pruned`), and the width of one MLP is divided among its layers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.core.validation import StrictModel
from outpace.heads.base import Batch, Head, Teacher
from outpace.heads.blocks import DecoderLayer, initialised, shifted
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig, shared_out
from outpace.heads.kinds import kind
from outpace.heads.losses import soft_cross_entropy, soft_divergence
from outpace.heads.pruned import take_layers
from outpace.targets.base import Target

KeysValues = list[tuple[Tensor, Tensor]]
"""Of every layer: keys and values, (B, kv_heads, T, head_size) each."""


class DraftLmOptions(StrictModel):
    """Settings of a ``draft-lm`` head."""

    layers: int = Field(3, ge=1, le=32, description="how many layers it has; they share one MLP's width")
    divergence: Literal["fkl", "rkl", "jsd", "tvd"] = Field("fkl", description="the divergence that is minimised")
    on_policy: float = Field(0.0, ge=0.0, le=1.0, description="share of the batches that it writes itself")
    pruned: bool = Field(True, description="begin with layers of the target, where its weights can be read")


@kind("draft-lm")
class DraftLm(Head):
    """Weights: ``layers.0``, ``layers.1``, ..., ``norm``: those of a Llama without embedding and LM head."""

    Options = DraftLmOptions
    paper = "Zhou et al. 2024, arXiv 2310.08461"

    def __init__(self, config: HeadConfig, draft_vocabulary: DraftVocabulary) -> None:
        super().__init__(config, draft_vocabulary)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.epsilon)
        initialised(self)

    @classmethod
    def aux_layers_of(cls, layers: int, options: Any) -> tuple[int, ...]:  # noqa: ARG003 - it reads tokens alone
        return ()

    @classmethod
    def depth_of(cls, options: Any) -> int:
        return int(options.layers)

    @classmethod
    def shapes_of(cls, hidden: int, size: str, options: Any) -> dict[str, int]:
        return shared_out(hidden, size, options.layers)

    def initialise(self, target: Target, teacher: Teacher) -> None:
        source = target.decoder_spec() if self.options.pruned else None
        if source is not None:
            take_layers(source, self.config, list(self.layers), self.norm)  # type: ignore[arg-type]

    @property
    def on_policy_share(self) -> float:
        return float(self.options.on_policy)

    @torch.no_grad()
    def sample_answers(
        self, batch: Batch, teacher: Teacher, *, most: int, stop_ids: frozenset[int], seed: int
    ) -> list[tuple[int, list[int]]]:
        """Sampled at temperature 1, all rows together: one forward of one token a row for each token."""
        device, dtype = self.norm.weight.device, self.norm.weight.dtype
        draws = torch.Generator(device).manual_seed(seed)
        starts = batch.answer.int().argmax(1).clamp_min(1).to(device)
        limits = [min(most, size) for size in batch.answer.sum(1).tolist()]
        prompts = batch.tokens[:, : int(starts.max())].to(device)
        states, before = self(teacher.embedding[prompts].to(dtype))
        states = states[torch.arange(len(starts)), starts - 1]
        seen = torch.arange(prompts.shape[1], device=device) < starts[:, None]
        texts: list[list[int]] = [[] for _ in limits]
        going = [limit > 0 for limit in limits]
        where = starts[:, None]
        while any(going):
            probs = self.draft_vocabulary(states).float().softmax(-1)
            tokens = self.draft_vocabulary.d2t[torch.multinomial(probs, 1, generator=draws)]
            for row, token in enumerate(tokens[:, 0].tolist()):
                if going[row]:
                    texts[row].append(token)
                    going[row] = token not in stop_ids and len(texts[row]) < limits[row]
            if any(going):
                seen = torch.cat([seen, seen.new_ones(len(texts), 1)], 1)
                found, before = self(teacher.embedding[tokens].to(dtype), before, where, seen)
                states, where = found[:, -1], where + 1
        return list(zip(starts.tolist(), texts, strict=True))

    def forward(
        self, rows: Tensor, before: KeysValues | None = None, where: Tensor | None = None, seen: Tensor | None = None
    ) -> tuple[Tensor, KeysValues]:
        """States behind the final norm, (B, T, hidden), of embedded tokens, and all keys and values so far.

        Causal, at positions 0 to T - 1; or one token each (T = 1) behind ``before``, at positions ``where`` (B, 1),
        ``seen`` (B, tokens so far) saying which of them, itself last, it sees.
        """
        positions = torch.arange(rows.shape[1], device=rows.device) if where is None else where
        mask = None if seen is None else seen[:, None, None]
        stream, kept = rows, []
        layer: Any
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(stream)
            keys, values = attention.keys_values(normed, positions)
            if before is not None:
                keys, values = torch.cat([before[index][0], keys], 2), torch.cat([before[index][1], values], 2)
            stream = layer.feed(stream + attention.attend(attention.queries(normed, positions), keys, values, mask))
            kept.append((keys, values))
        return self.norm(stream), kept

    def losses(self, batch: Batch, teacher: Teacher) -> dict[str, Tensor]:
        embedded = teacher.embedding[batch.tokens].to(self.norm.weight.dtype)
        states, _ = self(embedded)
        targets, place = teacher.target_probs(batch)
        kept = shifted(batch.answer, 1).flatten().nonzero()[:, 0]
        chosen, places = states.flatten(0, 1)[kept], place.flatten()[kept]
        if self.options.divergence == "fkl":
            loss, hits = soft_cross_entropy(chosen, self.draft_vocabulary, targets, places)
        else:
            loss, hits = soft_divergence(self.options.divergence, chosen, self.draft_vocabulary, targets, places)
        return {"loss": loss, "agree_1": hits}
