"""What the tests of layouts share: heads of a tiny Llama, and other engines' forwards, written from their own sources.

The forwards read a folder and nothing else: tensors by the names that the other engine uses, sizes from its
configuration. They share no line with the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.heads.layouts.base import About
from outpace.heads.layouts.registry import write
from outpace.heads.untrained import random_head
from outpace.targets.hf import HFTarget
from target_suite import tiny_model

IDLE = 96
ABOUT = About("models/tiny", "LlamaForCausalLM", IDLE)


@cache
def target() -> HFTarget:
    """A Llama of four layers, 32 wide, 97 tokens. Do not change it."""
    return HFTarget(tiny_model("llama"))


def head_of(
    kind: str, vocabulary: int = 50, rank: int = 0, aux_hidden_state_layers: Sequence[int] = (), **options: Any
) -> Any:
    """A random head whose weights are bfloat16 numbers, as stored ones are. Its norms are no ones.

    An eagle3 head has EAGLE-3's own norms, which every layout has a place for, unless others are asked for.
    """
    if kind == "eagle3":
        options.setdefault("norms", "eagle3")
    head = random_head([kind], target(), vocabulary=vocabulary, rank=rank, options=options)
    if aux_hidden_state_layers:
        head.config = head.config.model_copy(update={"aux_hidden_state_layers": tuple(aux_hidden_state_layers)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for weight in head.parameters():
            lively = weight.data if weight.dim() > 1 else weight.data + 0.3 * torch.randn_like(weight)
            weight.data = lively.bfloat16().float()
    return head


def written(head: Any, layout: str, folder: Path) -> Path:
    """The head in a layout."""
    write(head, target(), folder, layout, ABOUT)
    return folder


def configuration(folder: Path) -> dict[str, Any]:
    """Its config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def tensors(folder: Path) -> dict[str, Tensor]:
    """Its tensors, in float32 where they are weights."""
    found = load_file(next(iter(sorted(folder.glob("*.safetensors")))))
    return {name: value.float() if value.is_floating_point() else value for name, value in found.items()}


def edit(folder: Path, config: dict[str, Any] | None = None, **changed: Callable[[Tensor], Tensor | None]) -> None:
    """Change a written folder: fields of its configuration (None: gone), and tensors (a dot is ``__`` in the name)."""
    if config is not None:
        kept = configuration(folder)
        for key, value in config.items():
            inner, _, name = key.rpartition("__")
            place = kept[inner] if inner else kept
            if value is None:
                place.pop(name)
            else:
                place[name] = value
        (folder / "config.json").write_text(json.dumps(kept))
    if changed:
        path = next(iter(sorted(folder.glob("*.safetensors"))))
        found = load_file(path)
        for key, change in changed.items():
            name = key.replace("__", ".")
            value = change(found.get(name, torch.zeros(1)))
            found.pop(name, None)
            if value is not None:
                found[name] = value.contiguous()
        save_file(found, path)


# -------------------------------------------------------------------------------- other engines' forwards, by hand


def normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm."""
    return weight * rows / torch.sqrt((rows * rows).mean(-1, keepdim=True) + epsilon)


def rotated(rows: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of (T, heads, size) in transformers' convention: halves, not pairs."""
    size = rows.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    angles = torch.cat([positions[:, None].float() * inverse] * 2, -1)[:, None]
    half = torch.cat([-rows[..., size // 2 :], rows[..., : size // 2]], -1)
    return rows * angles.cos() + half * angles.sin()


class Decoder:
    """Layers of a folder, one row or many at a time, with the K/V that earlier rows left."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], prefix: str) -> None:
        self.config, self.weights, self.prefix = config, weights, prefix
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def weight(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}{name}.weight"]

    def norm(self, rows: Tensor, name: str) -> Tensor:
        return normed(rows, self.weight(name), self.config["rms_norm_eps"])

    def heads(self, rows: Tensor, name: str) -> Tensor:
        found = rows @ self.weight(f"self_attn.{name}_proj").T
        return found.view(len(rows), -1, self.config["head_dim"])

    def keys_values(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.heads(rows, "k")
        if f"{self.prefix}self_attn.k_norm.weight" in self.weights:
            keys = self.norm(keys, "self_attn.k_norm")
        return rotated(keys, positions, self.config["rope_theta"]), self.heads(rows, "v")

    def attention(self, rows: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """What attention makes of ``rows``; their K/V is kept. ``seen`` (T, kept + T) bool."""
        keys, values = self.keys_values(rows, positions)
        self.keys.append(keys)
        self.values.append(values)
        all_keys, all_values = torch.cat(self.keys), torch.cat(self.values)
        queries = self.heads(rows, "q")
        if f"{self.prefix}self_attn.q_norm.weight" in self.weights:
            queries = self.norm(queries, "self_attn.q_norm")
        queries = rotated(queries, positions, self.config["rope_theta"])
        groups = queries.shape[1] // all_keys.shape[1]
        scores = torch.einsum("thd,shd->hts", queries, all_keys.repeat_interleave(groups, 1))
        scores = (scores / self.config["head_dim"] ** 0.5).masked_fill(~seen, float("-inf"))
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), all_values.repeat_interleave(groups, 1))
        return mixed.flatten(1) @ self.weight("self_attn.o_proj").T

    def mlp(self, rows: Tensor) -> Tensor:
        inner = self.norm(rows, "post_attention_layernorm")
        gate, up = inner @ self.weight("mlp.gate_proj").T, inner @ self.weight("mlp.up_proj").T
        return rows + (torch.nn.functional.silu(gate) * up) @ self.weight("mlp.down_proj").T


def causal(new: int, kept: int) -> Tensor:
    """(new, kept + new): each row sees what is before it, and itself."""
    return torch.ones(new, kept + new, dtype=torch.bool).tril(kept)


def spread_out(logits: Tensor, weights: dict[str, Tensor], vocabulary: int) -> Tensor:
    """Draft logits over the target's tokens, as vLLM scatters them: position plus offset."""
    if "d2t" not in weights:
        return logits
    found = logits.new_full((len(logits), vocabulary), float("-inf"))
    found[:, torch.arange(logits.shape[1]) + weights["d2t"]] = logits
    return found


def eagle3_elsewhere(folder: Path, tokens: Sequence[int], states: dict[int, Tensor], drafted: Sequence[int]) -> Tensor:
    """Logits (1 + drafted, V) behind the last of ``tokens`` and each drafted one, by an eagle3 folder alone.

    ``states[i]`` (tokens - 1, hidden): the residual stream entering layer i.
    """
    config, weights = configuration(folder), tensors(folder)
    inner = config.get("transformer_layer_config", config)
    layer = Decoder(inner, weights, "layers.0." if "layers.0.mlp.up_proj.weight" in weights else "midlayer.")
    epsilon = inner["rms_norm_eps"]
    read = [states[index] for index in sorted(config["eagle_aux_hidden_state_layer_ids"])]
    if config.get("fc_norm"):
        read = [normed(one, weights[f"fc_norm.{place}.weight"], epsilon) for place, one in enumerate(read)]
    hidden, text = torch.cat(read, -1) @ weights["fc.weight"].T, list(tokens[1:])
    said = []
    for step in range(1 + len(drafted)):
        kept = sum(map(len, layer.keys))
        entering = layer.norm(hidden, "hidden_norm")
        residual = entering if config.get("norm_before_residual") else hidden
        embedded = layer.norm(weights["embed_tokens.weight"][text], "input_layernorm")
        positions = torch.arange(kept, kept + len(text))
        rows = torch.cat([embedded, entering], -1)
        out = layer.mlp(residual + layer.attention(rows, positions, causal(len(text), kept)))
        behind = normed(out, weights["norm.weight"], epsilon)
        said.append((behind @ weights["lm_head.weight"].T)[-1:])
        hidden, text = (behind if config.get("norm_output") else out)[-1:], list(drafted[step : step + 1])
    return spread_out(torch.cat(said), weights, inner["vocab_size"])


def eagle_elsewhere(
    folder: Path, rows: Tensor, tokens: Sequence[int], features: Tensor, drafted: Sequence[int]
) -> Tensor:
    """The same by an EAGLE-1 folder; ``rows`` (V, hidden) is the target's LM head, ``features`` its normed states."""
    config, weights = configuration(folder), tensors(folder)
    layer, hidden, text, said = Decoder(config, weights, "layers.0."), features, list(tokens[1:]), []
    for step in range(1 + len(drafted)):
        kept = sum(map(len, layer.keys))
        joined = torch.cat([weights["embed_tokens.weight"][text], hidden], -1) @ weights["fc.weight"].T
        stream = joined + weights["fc.bias"] if "fc.bias" in weights else joined
        out = layer.mlp(stream + layer.attention(stream, torch.arange(kept, kept + len(text)), causal(len(text), kept)))
        said.append((out @ rows.T)[-1:])
        hidden, text = out[-1:], list(drafted[step : step + 1])
    return torch.cat(said)


def dflash_elsewhere(folder: Path, last: int, states: dict[int, Tensor]) -> Tensor:
    """Logits (block - 1, V) of the masks behind token ``last``, by a dflash folder alone."""
    config, weights = configuration(folder), tensors(folder)
    inner = config["transformer_layer_config"]
    epsilon, block = inner["rms_norm_eps"], config["block_size"]
    read = torch.cat([states[index] for index in sorted(config["aux_hidden_state_layer_ids"])], -1)
    context = normed(read @ weights["fc.weight"].T, weights["hidden_norm.weight"], epsilon)
    before = len(context)
    stream = weights["embed_tokens.weight"][[last] + [config["mask_token_id"]] * (block - 1)]
    sliding = [kind == "sliding_attention" for kind in inner["layer_types"]]
    for index in range(inner["num_hidden_layers"]):
        layer = Decoder(inner, weights, f"layers.{index}.")
        keys, values = layer.keys_values(context, torch.arange(before))
        layer.keys, layer.values = [keys], [values]
        seen = causal(block, before) if sliding[index] else torch.ones(block, before + block, dtype=torch.bool)
        entering = layer.norm(stream, "input_layernorm")
        stream = layer.mlp(stream + layer.attention(entering, torch.arange(before, before + block), seen))
    said = normed(stream, weights["norm.weight"], epsilon)[1:] @ weights["lm_head.weight"].T
    return spread_out(said, weights, inner["vocab_size"])
