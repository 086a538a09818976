"""Contexts in which draft models or heads were named."""

from __future__ import annotations

from typing import Any

from outpace.methods.bindings import Bindings, draft_models, heads
from outpace.methods.registry import Context
from outpace.targets.base import Target


def with_drafts(target: Target, *drafts: Target, **more: Any) -> Context:
    """A context in which these draft models were named 1, 2, ..., over the target's vocabulary."""
    named = draft_models({str(number): draft for number, draft in enumerate(drafts, start=1)})
    return Context(target, Bindings(named), **more)


def with_head(target: Target, head: Any) -> Context:
    """A context in which this head was named."""
    return Context(target, Bindings(heads({"head": head})))
