"""``outpace validate-head``: the checks of loading a head's folder, of any layout, and an answer decoded with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from outpace.certify.near_ties import gap, parting
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput, OutpaceError
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.heads.head_checks import examine
from outpace.heads.head_folder import open_head
from outpace.heads.incompatible import CheckName, IncompatibleHead
from outpace.methods.registry import drafting_with
from outpace.model import Model

CHECKS: tuple[CheckName, ...] = get_args(CheckName)
_PROMPT = "Write a short list of three things that a good night's sleep is for."
_DRAFT = 3  # draft tokens a round


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found. ``ok`` is None where it could not be run, because of an earlier one."""

    name: str
    ok: bool | None
    message: str


@dataclass(slots=True)
class Report:
    """All checks of one head, in order. ``kind`` and ``layout`` are "" where the folder does not tell."""

    folder: str
    layout: str = ""
    kind: str = ""
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every check was run, and passed."""
        return all(one.ok is True for one in self.checks)

    def public(self) -> dict[str, Any]:
        """The object of ``outpace validate-head --json``."""
        checks = [{"check": one.name, "ok": one.ok, "message": one.message} for one in self.checks]
        return {"head": self.folder, "layout": self.layout, "kind": self.kind, "ok": self.ok, "checks": checks}


def validate(folder: Path, model: Model, *, tokens: int = 32) -> Report:
    """Check a head for this model, with an answer of ``tokens`` tokens. Raises BadInput where there is no folder."""
    if not folder.is_dir():
        raise BadInput(f"there is no head at '{folder}': no such folder")
    report = Report(str(folder))
    found: dict[CheckName, Check] = {}
    try:
        opened = open_head(folder)
        report.layout, report.kind = opened.layout.name, opened.kind
        stored = opened.read(model.target)
        found["configuration"] = Check("configuration", True, f"a head of kind {opened.kind} in {report.layout}")
        found["weights"] = Check("weights", True, f"{len(stored.tensors)} tensors")
        findings, _ = examine(stored, model.target)
        for one in findings:
            if one.problems or one.check not in found:
                found[one.check] = Check(one.check, not one.problems, _few(one.problems) or one.fine)
        if all(one.ok for one in found.values()):
            found["decoding"] = _decoded(opened.kind, folder, model, tokens)
    except IncompatibleHead as error:
        found[error.check] = Check(error.check, False, str(error))
    except BadInput as error:
        found["configuration"] = Check("configuration", False, str(error))
    report.checks = [found.get(name, Check(name, None, "not checked: something before it is wrong")) for name in CHECKS]
    return report


def _few(problems: list[str]) -> str:
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _decoded(kind: str, folder: Path, model: Model, tokens: int) -> Check:
    """Whether its method drafts with it, and the answer is that of autoregressive decoding."""
    names = drafting_with(kind)
    if not names:
        return Check("decoding", False, f"no method here drafts with a head of kind {kind}")
    prompt = tuple(model.tokenizer.chat([{"role": "user", "content": _PROMPT}]))
    answers = []
    drafted = accepted = 0
    try:
        for name in ("none", names[0]):
            decoder = Decoder(model.target)
            method = model.method(name, head=folder)
            if name != "none":  # draft in every round, however slow that may be
                method = replace(method, controller=Fixed(_DRAFT))
            generation = decoder.submit(Request(prompt, method, max_new_tokens=tokens, stop_ids=model.eos_ids))
            decoder.run()
            generation.raise_error()
            answers.append(list(generation.tokens))
            drafted, accepted = generation.metrics.drafted, generation.metrics.accepted
    except OutpaceError as error:
        return Check("decoding", False, str(error))
    apart = parting(answers[1], answers[0])
    if apart is not None:
        at, *chosen = apart
        size = gap(model.target, prompt, answers[0][:at], chosen, SamplingParams(), model.eos_ids)
        if not size.near_tie:
            problem = f"method '{names[0]}' answers otherwise than autoregressive decoding at token {at}"
            return Check("decoding", False, problem)
    if not drafted:
        return Check("decoding", False, f"method '{names[0]}' drafts nothing with it")
    accepted_of = f"{accepted} of {drafted} draft tokens accepted"
    if not accepted:
        accepted_of += ": is it trained, for this model and these layers?"
    return Check("decoding", True, f"method '{names[0]}' answers as autoregressive decoding does; {accepted_of}")
