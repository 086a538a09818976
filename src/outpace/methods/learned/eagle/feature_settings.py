"""Settings that the methods of the EAGLE family share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outpace.core.validation import StrictModel

Mode = Literal["mixed", "tree", "sampled", "chain"]


class FeatureSettings(StrictModel):
    """Settings of ``eagle``, ``eagle2`` and ``eagle3``."""

    mode: Mode | None = Field(
        None,
        description="above temperature 0: most probable tokens with one draw beside them (mixed, the default of eagle2 "
        "and eagle3), the most probable paths (tree, the default of eagle), a tree sampled without replacement, or a "
        "sampled chain",
    )
    heat: float = Field(
        1.15, gt=0.0, le=8.0, description="factor on the drafter's logits, beside 1 / temperature, in mode 'mixed'"
    )
    max_nodes: int | None = Field(
        None, ge=0, le=512, description="draft tokens per round; by default from measured costs and acceptance"
    )
    depth: int = Field(
        6, ge=1, le=64, description="draft tokens on a path, if max_nodes is given and in sampled chains"
    )
    topk: int = Field(
        6, ge=1, le=64, description="number of most probable tokens after each node that are candidates; 1: a chain"
    )
    expand: int = Field(
        4, ge=1, le=64, description="maximum number of nodes whose children are scored in one forward pass of the head"
    )
    branching: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(
        (3, 2, 1, 1), min_length=1, description="draws after each node of a sampled tree, level by level"
    )
    recent_tokens: int | None = Field(
        256, ge=2, description="how many of a text's newest tokens the head reads before a draft; null: all of it"
    )
    confidence: float = Field(
        0.0, ge=0.0, le=1.0, description="stop before the next draw when the largest probability is lower"
    )
