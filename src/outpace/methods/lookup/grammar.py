"""``grammar``: drafts what the request's grammar forces, and the structure that the answer repeats.

A request with a grammar (a JSON schema, say) gets most of its answer's frame for nothing: keys, punctuation and quotes
are known before the model is asked. They are drafted like any text, because the same text has several spellings in
tokens. What followed earlier where the grammar allowed the same tokens is drafted as well, with learned acceptance
rates. Without a grammar the method drafts nothing. ``auto`` does all this for requests with a grammar, beside its other
parts.

``fvo`` is a name of it: weighting by future validity (:mod:`outpace.core.future_validity`) changes what is sampled
under a grammar, whatever drafts; ``--constraint-weighting fvo`` asks for it.
"""

from __future__ import annotations

from pydantic import Field

from outpace.core.validation import StrictModel
from outpace.drafting.best_first import MaxNodes, tree_controller
from outpace.drafting.grammar_drafter import GrammarDrafter
from outpace.methods.registry import Context, Parts, register


class GrammarSettings(StrictModel):
    """Settings of ``grammar``."""

    max_nodes: MaxNodes = None
    depth: int = Field(16, ge=1, le=64, description="draft tokens on a path, if max_nodes is given")


@register(
    "grammar",
    family="model-free",
    paper="outpace's own; forced text as in Guidance and SGLang's jump-forward decoding (arXiv 2312.07104)",
    aliases=("fvo",),
    summary="Drafts what the request's grammar forces, and what followed where it allowed the same tokens.",
    when_to_use="Answers under a JSON schema or another grammar. Nothing is drafted without one. Future validity (fvo) "
    "is how allowed tokens are weighted, with any method: --constraint-weighting fvo.",
    tiny={"max_nodes": 3, "depth": 2},
)
def build(context: Context, settings: GrammarSettings) -> Parts:
    """A tree along the grammar."""
    return Parts(GrammarDrafter(), tree_controller(context.target, settings.depth, settings.max_nodes))
