"""Checks of a transformers model before HFTarget runs it, and the gates around its layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.errors import BadInput, shortened
from outpace.core.tree import TokenTree
from outpace.targets.attention import current, install, running
from outpace.targets.base import Target
from outpace.targets.forward_plan import ForwardPlan

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "feedforward")


def described(model: Any) -> str:
    """The model's class and type, for messages."""
    return f"{type(model).__name__} (model_type {model.config.model_type})"


def check_supported(model: Any) -> None:
    """Raise BadInput, naming the model, when its configuration already rules it out as a target."""
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise BadInput(f"{described(model)} is an encoder-decoder; outpace takes decoder-only language models")
    if model.get_output_embeddings() is None:
        raise BadInput(f"{described(model)} has no LM head; load a causal language model")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if strange := sorted(layer_types - _KNOWN_LAYER_TYPES):
        raise BadInput(f"{described(model)} has layers of type {', '.join(strange)}, whose state outpace cannot keep")
    if getattr(config, "num_kv_shared_layers", 0):
        raise BadInput(f"{described(model)} shares K/V between layers, which outpace cannot keep")
    if getattr(config, "reorder_and_upcast_attn", False):
        raise BadInput(f"{described(model)} sets reorder_and_upcast_attn, which a custom attention cannot honour")
    if getattr(config, "add_cross_attention", False):
        raise BadInput(f"{described(model)} has cross-attention, whose state outpace cannot keep")


def dissect(model: Any, layers: int, attending: Callable[[], AbstractContextManager[None]]) -> bool:
    """Run a probe to see every attention layer at work, and gate the layers around it. Whether it found their MLPs.

    Raises BadInput when any layer's attention does not pass through transformers' attention interface exactly once:
    such a layer keeps a state that outpace cannot see (recurrent, linear attention, ALiBi and the like).
    """
    install()
    for module in model.modules():  # an HFTarget around the same model, or around one it was made of, left its gates
        if isinstance(module.forward, _Gate):
            module.forward = module.forward.original
    ids = torch.tensor([[0, 1, 2]], device=model.get_input_embeddings().weight.device)
    plan = ForwardPlan([], stop=layers, calls=[])
    with torch.inference_mode(), running(plan), attending():
        try:
            model.base_model(input_ids=ids, position_ids=torch.arange(3, device=ids.device)[None], use_cache=False)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise BadInput(
                f"{described(model)} does not run with a custom attention: {shortened(str(error))}"
            ) from error
    calls = plan.calls or []
    if [int(module.layer_idx) for module, _ in calls] != list(range(layers)):
        seen = {int(module.layer_idx) for module, _ in calls}
        missing = [i for i in range(layers) if i not in seen]
        what = f"layers {missing[:8]} keep" if missing else "some layers keep"
        raise BadInput(f"{described(model)} cannot be a target: {what} a state other than attention K/V")
    name = described(model)
    types = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"] * layers
    for (_, extra), kind in zip(calls, types, strict=True):
        if kind == "sliding_attention" and extra["sliding_window"] is None:
            raise BadInput(f"{name} does not tell its attention the sliding window, so it cannot be honoured")
        if extra.get("s_aux") is not None:
            raise BadInput(f"{name} has attention sinks (s_aux), which outpace does not compute")
    return _install_gates(model, [module for module, _ in calls])


def _install_gates(model: Any, attentions: list[nn.Module]) -> bool:
    def holds_all(stack: nn.Module) -> bool:
        return (
            isinstance(stack, nn.ModuleList)
            and len(stack) == len(attentions)
            and all(any(part is one for part in layer.modules()) for layer, one in zip(stack, attentions, strict=True))
        )

    stack = next((module for module in model.modules() if holds_all(module)), None)
    if stack is None:
        raise BadInput(f"{described(model)} cannot be a target: its stack of layers was not found")
    has_mlp = True
    for index, (layer, attention) in enumerate(zip(stack, attentions, strict=True)):
        layer.forward = _LayerGate(layer, index, len(stack))
        attention.forward = _AttentionGate(attention, index)
        children = dict(layer.named_children())
        mlp = next((children[name] for name in _MLP_NAMES if name in children), None)
        if mlp is None:
            has_mlp = False
        else:
            mlp.forward = _MlpGate(mlp, index)
    return has_mlp


class _Gate:
    """Replaces a module's forward: it follows the current plan in our forwards, and changes nothing in others."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self.original: Callable[..., Any] = module.forward
        self.index = index


class _LayerGate(_Gate):
    """Runs the layer or passes the residual stream; keeps wanted hidden states, puts in resumed ones."""

    def __init__(self, module: nn.Module, index: int, layers: int) -> None:
        super().__init__(module, index)
        self.layers = layers

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan, index = current(), self.index
        if plan is None:
            return self.original(hidden, *args, **kwargs)
        if index == 0 and plan.states is not None:
            hidden = plan.states[None]
        if index in plan.wanted:
            plan.hidden_states[index] = hidden[0]
        if plan.start <= index < plan.stop and not (index in plan.skip_attention and index in plan.skip_mlp):
            out = self.original(hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
        if index == self.layers - 1 and self.layers in plan.wanted:
            plan.hidden_states[self.layers] = hidden[0]
        return hidden


class _AttentionGate(_Gate):
    """Runs the attention, or adds nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = current()
        if plan is None or self.index not in plan.skip_attention:
            return self.original(*args, **kwargs)
        return torch.zeros_like(args[0] if args else kwargs["hidden_states"]), None


class _MlpGate(_Gate):
    """Runs the MLP, or adds nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = current()
        if plan is None or self.index not in plan.skip_mlp:
            return self.original(*args, **kwargs)
        return torch.zeros_like(args[0] if args else kwargs["hidden_states"])


def self_check(target: Target, model: Any) -> None:
    """Compare a target's scores on a few tokens with its model's own forward. Raises BadInput when they disagree.

    Catches what the probe cannot see: biases that depend on the mask, attention variants hidden in the module.
    """
    error = disagreement(target, model)
    if not error < (1e-3 if model.dtype == torch.float32 else 0.3):
        raise BadInput(
            f"{described(model)} cannot be a target: scores through outpace's attention differ from its own "
            f"forward by {error:.2g} standard deviations"
        )


@torch.inference_mode()
def disagreement(target: Target, model: Any) -> float:
    """Root mean square difference of a target's logits from the model's own forward, in their standard deviations.

    Over ordinary tokens: after special ones alone, reduced precisions differ from themselves by as much.
    """
    tokens = [(1 + 7919 * step) % target.vocab_size for step in range(24)]
    sequence = target.sequence(tokens[:12])
    target.prefill([sequence])
    ours = target.score([(sequence, TokenTree.chain(tokens[12:]))])[0].logits.float()
    target.close(sequence.kv)
    ids = torch.tensor([tokens], device=model.get_input_embeddings().weight.device)
    own = model(input_ids=ids, use_cache=False).logits[0, 11:].float()
    return float((ours - own).square().mean().sqrt()) / (float(own.std()) or 1.0)
