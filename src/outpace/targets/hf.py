"""HFTarget: any Hugging Face causal LM as a target, by its own forward.

The model is used as it is: its attention goes through :mod:`outpace.targets.attention`, its K/V is kept by us and
written only at commit, and gates around its layers read hidden states and skip sublayers. Models that keep another
state than attention K/V are refused by name.

Numerics: the model's own dtype. Scoring several rows at once rounds differently from one at a time; in float32 the
difference is about 1e-5 of the logits' size, in bfloat16 near-ties of the top two logits may fall the other way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.targets.attention import IMPLEMENTATION, SideKV, running
from outpace.targets.context_limit import context_limit
from outpace.targets.dense.decoder_spec import DecoderSpec
from outpace.targets.dense.transformers_weights import spec_if_known
from outpace.targets.forward_plan import ForwardPlan
from outpace.targets.hf_support import check_supported, described, dissect, self_check
from outpace.targets.layered_kv import LayeredKV
from outpace.targets.row_target import PREFILL_CHUNK, RowTarget
from outpace.targets.sub_graph import SubGraph
from outpace.targets.threads import torch_at_work


class HFTarget(RowTarget):
    """A target around a ``transformers`` model in evaluation mode, on its own device and in its own dtype.

    Raises BadInput for architectures that keep another state than attention K/V.
    """

    def __init__(self, model: Any, *, prefill_chunk: int = PREFILL_CHUNK) -> None:
        check_supported(model)
        self.model = model.eval()
        config = model.config.get_text_config()
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.context_length, self.context_note = context_limit(config)
        self.device = model.get_input_embeddings().weight.device
        self.prefill_chunk = prefill_chunk
        self._configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        self._has_mlp = dissect(model, self.num_layers, self._attending)
        self_check(self, model)

    def open(self) -> LayeredKV:
        return LayeredKV(self.num_layers)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        rows: Tensor = self.model.get_input_embeddings()(tokens.to(self.device))
        return rows

    @torch.inference_mode()
    def lm_head(self, hidden: Tensor) -> Tensor:
        # Every layer is gated to the identity, so what is left of the forward is the final norm and the LM head.
        plan = ForwardPlan([], states=hidden)
        logits = self.run(plan, [0] * len(hidden), logits=True)
        assert logits is not None
        return logits

    @torch.inference_mode()
    def final_norm(self, hidden: Tensor) -> Tensor:
        normed = self._run(ForwardPlan([], states=hidden), [0] * len(hidden), self.model.base_model)
        rows: Tensor = normed[0][0]
        return rows

    @torch.inference_mode()
    def lm_head_rows(self, tokens: Tensor) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight[tokens.to(weight.device)].float()

    @torch.inference_mode()
    @torch_at_work()
    def run(
        self, plan: ForwardPlan, tokens: Seq[int], *, logits: bool, embeddings: Mapping[int, Tensor] | None = None
    ) -> Tensor | None:
        """The model's own forward; its attention and the gates around its layers follow ``plan``."""
        out = self._run(plan, tokens, self.model if logits else self.model.base_model, embeddings)
        return out.logits[0] if logits else None

    def _run(
        self, plan: ForwardPlan, tokens: Seq[int], run: Any, embeddings: Mapping[int, Tensor] | None = None
    ) -> Any:
        if plan.states is not None:
            plan.states = plan.states.to(self.device, self.model.dtype)
        ids = torch.tensor(tokens, device=self.device)[None]
        inputs: dict[str, Tensor] = {"input_ids": ids}
        if embeddings:
            rows = self.model.get_input_embeddings()(ids).clone()
            for row, embedding in embeddings.items():
                rows[0, row] = embedding.to(rows)
            inputs = {"inputs_embeds": rows}
        positions = [at for part in plan.parts for at in part.positions[part.earlier_rows :]]
        positions = positions or list(range(len(tokens)))
        for part in plan.parts:
            part.side_kv = [None] * self.num_layers
        with running(plan), self._attending():
            return run(**inputs, position_ids=torch.tensor(positions, device=self.device)[None], use_cache=False)

    def first_rows(self, side_kv: SideKV, rows: int) -> SideKV:
        return [None if pair is None else (pair[0][:, :rows], pair[1][:, :rows]) for pair in side_kv]

    def stacked(self, lower: SideKV, upper: SideKV, boundary: int) -> SideKV:
        return [*lower[:boundary], *upper[boundary:]]

    def decoder_spec(self) -> DecoderSpec | None:
        return spec_if_known(self.model)

    def check_skips(self, graph: SubGraph) -> None:
        if graph.skip_mlp and not self._has_mlp:
            raise BadInput(f"{described(self.model)}: its MLP modules were not found, so skip_mlp cannot be honoured")

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """The model's attention implementation is ours inside, and the caller's again afterwards."""
        before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = IMPLEMENTATION
        try:
            yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation
