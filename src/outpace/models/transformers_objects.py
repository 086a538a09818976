"""Whether objects that are given in place of a model's name are a transformers model and its tokenizer."""

from __future__ import annotations

from typing import Any

from outpace.core.errors import BadInput, shown
from outpace.models.tokenizers import HFTokenizer


def check_objects(model: Any, tokenizer: Any, **as_loaded: Any) -> None:
    """Raise BadInput for what is no causal language model of transformers with its tokenizer.

    ``as_loaded``: options that only loading can honour; they must be None.
    """
    if not all(hasattr(model, part) for part in ("config", "get_input_embeddings", "named_parameters")):
        raise BadInput(f"load takes a model's name or path, or a transformers model, not {shown(model)}")
    if tokenizer is None:
        raise BadInput("a transformers model needs its tokenizer beside it: outpace.load(model, tokenizer)")
    if not isinstance(tokenizer, HFTokenizer) and not (callable(tokenizer) and hasattr(tokenizer, "get_vocab")):
        raise BadInput(f"tokenizer must be the model's transformers tokenizer, not {shown(tokenizer)}")
    for name, value in as_loaded.items():
        if value is not None:
            raise BadInput(f"{name} cannot be chosen for a model that is loaded already; load it so in transformers")
