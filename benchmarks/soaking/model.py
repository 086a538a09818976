"""A tiny random model in a folder: a Llama of six layers with bytes for tokens, and a chat template with tools."""

from __future__ import annotations

from pathlib import Path

import torch

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'answer with <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def write_tiny(place: Path, context_length: int = 1024, seed: int = 0) -> Path:
    """Write it into ``place``. Returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate([*SPECIALS, *letters])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIALS[2:]
    )
    made.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        initializer_range=0.2,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).eval().save_pretrained(place)
    made.save_pretrained(place)
    return place
