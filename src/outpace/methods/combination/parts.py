"""The parts of a combination: their names and settings, and how they are built."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from outpace.controllers.base import Controller
from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel
from outpace.drafting.base import Drafter
from outpace.methods.registry import Context, Parts


class CombinationSettings(StrictModel):
    """What every combination is told: its parts, and their settings."""

    parts: tuple[str, ...] = Field(
        min_length=1, max_length=16, description="methods in order; METHOD#NAME has a draft model or head of its own"
    )
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description='settings of the parts: {"sam": {"min_match": 4}, "draft-model#small": {...}}'
    )


@dataclass(frozen=True, slots=True)
class Built:
    """The parts of a combination, built."""

    names: tuple[str, ...]
    parts: list[Parts]

    @property
    def drafters(self) -> list[Drafter[Any]]:
        return [one.drafter for one in self.parts]

    @property
    def controllers(self) -> list[Controller]:
        return [one.controller for one in self.parts]


def build_parts(context: Context, settings: CombinationSettings) -> Built:
    """Build the parts. Raises BadInput for names that are unknown or given twice, and for settings of no part."""
    twice = next((name for name, count in Counter(settings.parts).items() if count > 1), None)
    if twice is not None:
        raise BadInput(f"'{twice}' is a part twice; tell the two apart by names: {twice}#ONE and {twice}#TWO")
    stray = next((name for name in settings.settings if name not in settings.parts), None)
    if stray is not None:
        raise BadInput(f"settings are given for '{stray}', which is none of the parts ({', '.join(settings.parts)})")
    built = [context.parts(name, settings.settings.get(name)) for name in settings.parts]
    named = list(zip(settings.parts, built, strict=True))
    for name, part in named:
        if part.rule is not None and not part.rule.lossless:
            raise BadInput(f"'{name}' brings its own acceptance rule '{part.rule.name}', which changes the output")
    keeps = [name for name, part in named if part.drafter.proposal.keeps_unverified_draws]
    reads = [name for name, part in named if part.drafter.learns_from_rejected]
    if keeps and reads:
        # A draft token that is still to be judged must not have a say in what is drafted before it.
        raise BadInput(
            f"'{keeps[0]}' keeps draft tokens that were not reached, and '{reads[0]}' learns from what followed them; "
            "combine either with others"
        )
    return Built(settings.parts, built)
