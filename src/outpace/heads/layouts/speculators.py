"""The layout of vLLM's ``speculators`` (version 0.9), for eagle3 and dflash. vLLM serves such a folder as it is.

What is verified there, and differs from outpace's terms or from other layouts:

* ``d2t`` holds offsets: draft token ``i`` is the target's token ``i + d2t[i]``; ``t2d`` marks the target's tokens that
  can be drafted. Both are absent where all tokens can be.
* Layers: ``eagle_aux_hidden_state_layer_ids`` (eagle3) and ``aux_hidden_state_layer_ids`` (dflash) name residual
  streams as they enter a layer, so they are outpace's taps. States come in the order of the layers.
* ``fc_norm`` (a norm for each state before ``fc``) together with ``norm_output`` (the final norm's output goes on to
  the next row) are what outpace calls ``norms="attdrift"``. ``norm_before_residual`` is always written: vLLM
  takes its absence for true.
* A dflash head's mask is a token. outpace's is an embedding of its own, and is written in the place of a token that no
  text uses. vLLM runs with that embedding, and takes ``mask_embedding.pt`` beside it for the same; the library
  ``speculators`` itself puts the target's embedding back when it loads a dflash head to train it further.
* Blocks are causal in layers of sliding attention; a window as wide as the context leaves the rest as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.heads.base import Head, HeadConfig
from outpace.heads.layouts.base import About, Foreign, Layout, Names
from outpace.heads.layouts.files import Package, load_pickle
from outpace.heads.layouts.reading import (
    decoder_shapes,
    layer_ids,
    lm_head,
    number,
    options_of,
    refused,
    renamed,
    target_facts,
    vocabulary,
    weight_names,
)
from outpace.heads.layouts.writing import bf16, decoder_config, embedding
from outpace.targets.base import Target

VERSION = "0.9.0"
_TYPE = "speculators_model_type"
_EMBEDDING, _ROWS, _MASK = "embed_tokens.weight", "lm_head.weight", "mask_embedding"
MASK_FILE = "mask_embedding.pt"


class Speculators(Layout):
    """``config.json`` with ``speculators_config``, one file of tensors."""

    name: ClassVar[str] = "speculators"
    kinds: ClassVar[tuple[str, ...]] = ("eagle3", "dflash")

    def kind_of(self, config: Mapping[str, Any], names: Names) -> str | None:
        found = config.get(_TYPE)
        return found if isinstance(found, str) else None

    def express(self, head: Head, target: Target, about: About) -> Package:
        tensors = {_EMBEDDING: embedding(target), **mapped(head, target), **in_layer_order(head)}
        config: dict[str, Any] = {
            "architectures": ["Eagle3Speculator" if head.kind == "eagle3" else "DFlashSpeculator"],
            _TYPE: head.kind,
            "speculators_version": VERSION,
            "speculators_config": _about(head, about),
            "draft_vocab_size": len(head.words),
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        token = 0
        if head.kind == "eagle3":
            drift = head.options.norms == "attdrift"
            config |= {
                "transformer_layer_config": decoder_config(head.config, target, "llama"),
                "eagle_aux_hidden_state_layer_ids": sorted(head.config.aux_hidden_state_layers),
                "norm_before_residual": head.options.residual == "normed",
                "norm_before_fc": False,
                "fc_norm": drift,
                "norm_output": drift,
                "embed_requires_grad": False,
            }
        else:
            token = idle_token(head, about, target)
            tensors[_EMBEDDING][token] = tensors.pop(_MASK)
            config |= {
                "transformer_layer_config": _blocks(head, target),
                "aux_hidden_state_layer_ids": sorted(head.config.aux_hidden_state_layers),
                "block_size": head.options.block,
                "mask_token_id": token,
                "sliding_window_non_causal": False,
                "sample_from_anchor": False,
            }
        package = Package(config, tensors)
        if head.kind == "dflash":
            package.saved[MASK_FILE] = {"mask_token_id": token, "embedding": tensors[_EMBEDDING][token].clone()}
        return package

    def understand(self, config: Mapping[str, Any], tensors: dict[str, Tensor], target: Target, where: Path) -> Foreign:
        kind = str(config[_TYPE])
        inner = config.get("transformer_layer_config")
        if not isinstance(inner, Mapping):
            raise refused(where, "has no transformer_layer_config")
        options = _eagle3(config, inner, where) if kind == "eagle3" else _dflash(config, inner, where)
        key = "eagle_aux_hidden_state_layer_ids" if kind == "eagle3" else "aux_hidden_state_layer_ids"
        ids = vocabulary(tensors, target, where)
        if config.get("draft_vocab_size") not in (None, len(ids)):
            raise refused(
                where,
                f"has a d2t of {len(ids)} tokens; its configuration says {config['draft_vocab_size']}",
                "vocabulary",
            )
        inside = config.get("speculators_config")
        verifier = inside.get("verifier") if isinstance(inside, Mapping) else None
        shapes = decoder_shapes({**inner, "target_hidden_size": config.get("target_hidden_size")}, target, where)
        if "layers" in options:
            options["layers"] = shapes["layers"]
        known = HeadConfig(
            kind=str(kind),
            target=target_facts(target, verifier.get("name_or_path") if isinstance(verifier, Mapping) else None),
            aux_hidden_state_layers=tuple(sorted(layer_ids(config, key, where, target))),
            vocabulary=len(ids),
            options=options_of(str(kind), options, where),
            **shapes,
        )
        called = {name: _theirs(name) for name in weight_names(known) if name != _MASK}
        found = renamed(called, tensors, ("d2t", "t2d", _EMBEDDING, _ROWS), where)
        masked = None
        if kind == "dflash":
            masked = config["mask_token_id"]
            found[_MASK], called[_MASK] = mask_row(masked, tensors.get(_EMBEDDING), target, where), _EMBEDDING
        found |= lm_head(tensors.get(_ROWS), ids, target, where)
        return Foreign(known, found, called, tensors.get(_EMBEDDING), masked)


def mapped(head: Head, target: Target) -> dict[str, Tensor]:
    """The LM head, and ``d2t`` with ``t2d`` where it is for some of the tokens."""
    ids = head.words.ids.cpu()
    found = {_ROWS: bf16(head.words.matrix)}
    if len(ids) < target.vocab_size:
        among = torch.zeros(target.vocab_size, dtype=torch.bool)
        among[ids] = True
        found |= {"d2t": ids - torch.arange(len(ids)), "t2d": among}
    return found


def in_layer_order(head: Head) -> dict[str, Tensor]:
    """A head's own weights, its states taken in the order of the layers: engines collect them so."""
    order = sorted(
        range(len(head.config.aux_hidden_state_layers)), key=lambda index: head.config.aux_hidden_state_layers[index]
    )
    found = {}
    for name, value in head.state_dict().items():
        if name.startswith("words."):
            continue
        theirs, kept = _theirs(name), value
        if name == "fc.weight":
            pieces = value.split(head.config.hidden_size, 1)
            kept = torch.cat([pieces[index] for index in order], 1)
        elif name.startswith("tap_norms."):
            theirs = f"fc_norm.{order.index(int(name.split('.')[1]))}.weight"
        found[theirs] = bf16(kept)
    return found


def _theirs(name: str) -> str:
    return name.replace("tap_norms.", "fc_norm.")


def _about(head: Head, about: About) -> dict[str, Any]:
    tokens = head.options.steps if head.kind == "eagle3" else head.options.block - 1
    return {
        "algorithm": head.kind,
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": about.name, "architectures": [about.architecture]},
    }


def _blocks(head: Head, target: Target) -> dict[str, Any]:
    config = decoder_config(head.config, target, "qwen3")
    kind = "sliding_attention" if head.options.causal else "full_attention"
    return config | {
        "layer_types": [kind] * head.config.layers,
        "use_sliding_window": head.options.causal,
        "sliding_window": config["max_position_embeddings"] if head.options.causal else None,
        "max_window_layers": 0 if head.options.causal else head.config.layers,
    }


def idle_token(head: Head, about: About, target: Target) -> int:
    """The token in whose place a mask's embedding is written. Raises BadInput where the vocabulary has no room."""
    if about.idle is not None:
        return about.idle
    places = head.words.places(target.vocab_size)
    free = (places < 0).nonzero()[:, 0]
    if not len(free):
        raise BadInput(f"'{about.name}' uses all of its tokens: none is left to stand for this head's mask")
    return int(free[-1])


def mask_row(token: object, rows: Tensor | None, target: Target, where: Path) -> Tensor:
    """(hidden): what a mask reads, from a file of its own, the head's embedding, or the target's."""
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < target.vocab_size:
        raise refused(where, f"names no mask token of this model: mask_token_id is {token}")
    if (where / MASK_FILE).is_file():
        found = load_pickle(where / MASK_FILE)
        found = found.get("embedding") if isinstance(found, Mapping) else found
        if not isinstance(found, Tensor) or found.numel() != target.hidden_size:
            raise refused(where, f"has a {MASK_FILE} that is no embedding of this model", "shapes")
        return found.reshape(-1)
    if rows is not None and token < len(rows):
        return rows[token]
    return target.embed(torch.tensor([token]))[0].cpu()


def _eagle3(config: Mapping[str, Any], inner: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Its options. Raises BadInput for a network that ``heads/eagle3.py`` is not."""
    before = config.get("norm_before_residual", True)
    return eagle3_options(config, inner, where) | {"residual": "normed" if before else "state"}


def eagle3_options(config: Mapping[str, Any], inner: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """What is common to the layouts that have eagle3."""
    if config.get("norm_before_fc"):
        raise refused(where, "norms all states at once (norm_before_fc), which is not read")
    if bool(config.get("fc_norm")) != bool(config.get("norm_output")):
        raise refused(where, "has one of fc_norm and norm_output; both are read, or neither")
    if inner.get("model_type", "llama") != "llama":
        raise refused(where, f"has a layer of {inner['model_type']}, which is not read (llama is)")
    if number(inner, "num_hidden_layers", where, 1) != 1:
        raise refused(where, f"has {inner['num_hidden_layers']} layers; eagle3 has one here")
    return {"norms": "attdrift" if config.get("fc_norm") else "eagle3"}


def _dflash(config: Mapping[str, Any], inner: Mapping[str, Any], where: Path) -> dict[str, Any]:
    if config.get("sample_from_anchor"):
        raise refused(where, "drafts from its first row as well (sample_from_anchor), which is not read")
    return {"layers": 1, "block": number(config, "block_size", where, 8, 2), "causal": is_causal(config, inner, where)}


def is_causal(config: Mapping[str, Any], inner: Mapping[str, Any], where: Path) -> bool:
    """Whether rows of a block see the rows before them alone. Raises BadInput for windows over the context."""
    types = set(inner.get("layer_types") or ["full_attention"])
    if types == {"full_attention"}:
        return False
    context, window = number(inner, "max_position_embeddings", where, 8192), inner.get("sliding_window")
    if types != {"sliding_attention"} or not isinstance(window, int) or window < context:
        raise refused(where, "has layers that see a window of the context, which is not read")
    return not config.get("sliding_window_non_causal")
