"""How many tokens a transformers model's context holds under K/V that is computed once and kept."""

from __future__ import annotations

from typing import Any


def context_limit(config: Any) -> tuple[int, str]:
    """The context of a model's text configuration in tokens, and why it ends there ("": the model's own limit).

    Past the original length, dynamic NTK and longrope change the rotation of keys that are already stored, so the
    context is held to the length up to which the rotation is constant.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2**31)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    note = ""
    for one in nested or [parameters]:
        kind = one.get("rope_type", "default")
        if kind == "longrope":
            original = one.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or limit
            limit = min(limit, int(original))
        if kind in ("dynamic", "longrope"):
            note = f"held there because its rotary scaling ({kind}) would change the keys of earlier tokens"
    return limit, note
