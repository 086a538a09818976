"""What layouts share when a head is written: what it borrows from its target, and its layers' configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outpace.heads.base import Head
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.head_config import HeadConfig
from outpace.targets.base import Target

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def bf16(value: Tensor) -> Tensor:
    """As weights are stored."""
    return value.detach().bfloat16().cpu()


def embedding(target: Target) -> Tensor:
    """(V, hidden) bfloat16: the target's embedding, as its first layer sees tokens."""
    return torch.cat([bf16(target.embed(some)) for some in torch.split(torch.arange(target.vocab_size), 4096)])


def mapped(head: Head, target: Target) -> dict[str, Tensor]:
    """Embedding and LM head, and for a reduced vocabulary ``d2t`` (Vd,), offsets, with ``t2d`` (V,), a mask."""
    d2t = head.draft_vocabulary.d2t.cpu()
    found = {EMBEDDING: embedding(target), LM_HEAD: bf16(head.draft_vocabulary.matrix)}
    if len(d2t) < target.vocab_size:
        t2d = torch.zeros(target.vocab_size, dtype=torch.bool)
        t2d[d2t] = True
        found |= {"d2t": d2t - torch.arange(len(d2t)), "t2d": t2d}
    return found


def in_layer_order(head: Head) -> dict[str, Tensor]:
    """A head's own weights, for auxiliary hidden states in the order of the layers: engines collect them so."""
    layers = head.config.aux_hidden_state_layers
    order = sorted(range(len(layers)), key=lambda index: layers[index])
    found = {}
    for name, value in head.own_weights().items():
        theirs, kept = name, value
        if name == "fc.weight":
            pieces = torch.split(value, head.config.hidden_size, 1)
            kept = torch.cat([pieces[index] for index in order], 1)
        elif name.startswith("fc_norm."):
            theirs = f"fc_norm.{order.index(int(name.split('.')[1]))}.weight"
        found[theirs] = bf16(kept)
    return found


def whole_rows(vocabulary: DraftVocabulary, target: Target) -> Tensor:
    """(V, hidden) bfloat16: an LM head over the whole vocabulary, for layouts without a vocabulary map.

    A linear LM head cannot exclude tokens. Those outside of the draft vocabulary get the mean of its rows: their logit
    is the mean of the draft tokens' logits, and so never above the largest one.
    """
    matrix = vocabulary.matrix.detach().float().cpu()
    rows = matrix.mean(0).repeat(target.vocab_size, 1)
    rows[vocabulary.d2t.cpu()] = matrix
    return bf16(rows)


def decoder_config(config: HeadConfig, target: Target, model_type: str) -> dict[str, Any]:
    """A head's layers as a configuration of transformers, of its fourth and fifth generation alike."""
    return {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.epsilon,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": max(config.context_length, target.context_length),
        "vocab_size": target.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
