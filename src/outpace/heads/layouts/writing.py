"""What layouts share when a head is written: what it borrowed from its target, and its layers' configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outpace.heads.base import HeadConfig
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.targets.base import Target


def bf16(value: Tensor) -> Tensor:
    """As weights are stored."""
    return value.detach().bfloat16().cpu()


def embedding(target: Target) -> Tensor:
    """(V, hidden) bfloat16: the target's embedding, as its first layer sees tokens."""
    return torch.cat([bf16(target.embed(some)) for some in torch.split(torch.arange(target.vocab_size), 4096)])


def whole_rows(words: DraftVocabulary, target: Target) -> Tensor:
    """(V, hidden) bfloat16: an LM head over the whole vocabulary, for layouts without a vocabulary map.

    A linear LM head cannot say "never". Tokens that are not among the words get the mean of the words' rows: their
    logit is the mean of the words' logits, which no state makes the largest one.
    """
    matrix = words.matrix.detach().float().cpu()
    rows = matrix.mean(0).repeat(target.vocab_size, 1)
    rows[words.ids.cpu()] = matrix
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
