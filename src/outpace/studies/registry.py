"""Studies, declared in one file each, found by name.

@study("moesd", title="...", paper="Doe 2026, arXiv 2601.00001")
def moesd(context: StudyContext, settings: Settings) -> Findings: ...
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel

from outpace.core import machine
from outpace.core.errors import BadInput
from outpace.core.names import normalised, unknown
from outpace.core.plugins import import_all
from outpace.core.validation import known_fields, validated
from outpace.core.version import __version__
from outpace.methods.named_weights import DRAFT_LM, DraftModels, draft_lm_folder
from outpace.prompts.prompt import Prompt
from outpace.studies.claims import Claim
from outpace.studies.heat_map import HeatMap
from outpace.studies.plot import Plot
from outpace.studies.study_journal import StudyJournal
from outpace.studies.study_report import StudyReport

if TYPE_CHECKING:
    from outpace.model import Model


@dataclass
class StudyContext:
    """What a study may ask for. ``load``: a model by name and precision (None: the default); a study that needs no
    model never loads one. ``journal``: keeps parts that are complete."""

    model_name: str
    prompts: list[Prompt]
    load: Callable[[str, str | None], Model]
    seed: int = 0
    journal: StudyJournal = field(default_factory=StudyJournal)
    used: dict[str, Any] = field(default_factory=dict)
    """What is known of the model, once it was loaded."""

    @cached_property
    def model(self) -> Model:
        """The model that was named."""
        found = self.load(self.model_name, None)
        self.used = {"name": found.name, **{key: one for key, one in found.info.items() if key != "location"}}
        return found

    def draft_model(self, name: str) -> DraftModels:
        """What methods take as their draft model: a model by name, or the folder of a draft LM; "": what is shipped."""
        if not name or name == DRAFT_LM:
            return name or None
        return name if draft_lm_folder(name) is not None else self.load(name, None)


@dataclass
class Findings:
    """What a study found. ``rows``: the table; ``columns``: of these the ones that the terminal shows, with titles."""

    rows: list[dict[str, Any]]
    columns: Mapping[str, str]
    claims: list[Claim]
    plot: Plot | HeatMap
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Study:
    """A registered study."""

    name: str
    title: str
    paper: str
    settings: type[BaseModel]
    run: Callable[[StudyContext, Any], Findings]
    prompts: str | None = None
    """The named set that it asks where the user names none; None: the embedded set."""
    resumable: bool = False
    """Whether it keeps parts in the journal; others take a few minutes at most."""


_STUDIES: dict[str, Study] = {}


def study(
    name: str, *, title: str, paper: str, prompts: str | None = None, resumable: bool = False
) -> Callable[[Callable[..., Findings]], Callable[..., Findings]]:
    """Declare a study; the type of its second parameter are its settings. ``prompts`` and ``resumable``: as in
    :class:`Study`."""

    def declare(run: Callable[..., Findings]) -> Callable[..., Findings]:
        settings = get_type_hints(run)["settings"]
        _STUDIES[name] = Study(name, title, paper, settings, run, prompts, resumable)
        return run

    return declare


def studies() -> list[Study]:
    """All studies by name."""
    import_all("outpace.studies")
    return [_STUDIES[name] for name in sorted(_STUDIES)]


def find_study(name: str) -> Study:
    """The study of this name. Raises BadInput with the known ones."""
    for one in studies():
        if normalised(one.name) == normalised(name):
            return one
    raise unknown("study", name, [one.name for one in studies()], see="outpace study")


def read_settings(one: Study, given: Mapping[str, Any]) -> BaseModel:
    """Settings as the study reads them. Raises BadInput for those that it does not have or that are out of range."""

    def refusal(key: str, reason: str) -> BadInput:
        known = known_fields(one.settings)
        return BadInput(f"study '{one.name}', setting '{key}': {reason} (settings: {known})")

    return validated(one.settings, given, refusal)


def run_study(one: Study, context: StudyContext, settings: BaseModel, command: str = "") -> StudyReport:
    """Run a study. Raises BadInput for what it needs and does not have, and StudyPaused where the journal's time is
    over before it is."""
    began = perf_counter()
    if context.journal.keeps:
        context.journal.open(_about_parts(one, context, settings))
    found = one.run(context, settings)
    return StudyReport.of(
        {
            "study": one.name,
            "title": one.title,
            "paper": one.paper,
            "version": __version__,
            "complete": True,
            "machine": machine.describe(),
            "model": context.used,
            "settings": {"prompts": len(context.prompts), "command": command, **settings.model_dump()},
            "rows": found.rows,
            "columns": dict(found.columns),
            "claims": [claim.public() for claim in found.claims],
            "plot": found.plot.public(),
            "svg": found.plot.svg(),
            "notes": found.notes,
            "seconds": perf_counter() - began + context.journal.earlier_seconds,
        }
    )


def _about_parts(one: Study, context: StudyContext, settings: BaseModel) -> dict[str, Any]:
    """What the parts of a study that are kept depend on: also on how the model computes, and where."""
    costs, here = context.model.target.costs, machine.describe()
    texts = json.dumps([(prompt.turns, prompt.history) for prompt in context.prompts])
    return {
        "study": one.name,
        "version": __version__,
        "model": context.model_name,
        **{name: context.used.get(name) for name in ("target", "dtype", "kv_dtype", "device")},
        **{name: here[name] for name in ("cpu", "accelerator", "threads")},
        "fixed_costs": costs.fixed,
        "prompts": hashlib.sha256(texts.encode()).hexdigest()[:12],
        "seed": context.seed,
        **{f"setting {name}": value for name, value in settings.model_dump().items()},
    }
