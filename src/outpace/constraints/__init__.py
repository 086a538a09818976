"""Grammars for answers: what users write, and the engine that says which tokens a grammar allows.

:mod:`outpace.core.constraint` is the protocol that the sampler and drafters read; this room makes constraints.
"""

from __future__ import annotations

from outpace.constraints.compiler import compiled
from outpace.constraints.grammar import DEFAULT_LIMITS, Grammar, GrammarLimits

__all__ = ["DEFAULT_LIMITS", "Grammar", "GrammarLimits", "compiled"]
