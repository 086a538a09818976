"""Is a head in order? Everything that can be checked of a folder, of outpace's own layout or another engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from outpace.certify.near_ties import gap, parting
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput, OutpaceError
from outpace.core.sampling import SamplingParams
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.heads.base import HeadConfig
from outpace.heads.checkpoint import distinct, expected_shapes, is_ours, network, read_config, read_weights
from outpace.heads.fingerprint import ALIKE, check, cosines, probe
from outpace.heads.incompatible import CheckName, IncompatibleHead
from outpace.heads.layouts.base import check_embedding, opened
from outpace.methods.registry import drafting_with
from outpace.model import Model

CHECKS: tuple[CheckName, ...] = get_args(CheckName)
_PROMPT = "Write a short list of three things that a good night's sleep is for."
_DRAFT = 3
"""Draft tokens a round."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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


@dataclass(slots=True)
class _Head:
    """What a folder says, in outpace's terms. ``alike``: how its weights were told to be for this target."""

    layout: str
    config: HeadConfig
    tensors: Mapping[str, Tensor]
    called: Mapping[str, str]
    alike: str


def validate(folder: Path, model: Model, *, tokens: int = 32) -> Report:
    """Check a head for this model. ``tokens``: how long the answer is that is decoded with it.

    Raises BadInput where there is no folder. What is wrong with the head is in the report.
    """
    if not folder.is_dir():
        raise BadInput(f"there is no head at '{folder}': no such folder")
    report = Report(str(folder))
    found: dict[CheckName, Check] = {}
    try:
        head = _opened(folder, model, report, found)
        _judge(head, folder, model, found)
        if all(one.ok for one in found.values()):
            found["decoding"] = _decoded(head.config.kind, folder, model, tokens)
    except IncompatibleHead as error:
        found[error.check] = Check(error.check, False, str(error))
    except BadInput as error:
        found["configuration"] = Check("configuration", False, str(error))
    report.checks = [found.get(name, Check(name, None, "not checked: something before it is wrong")) for name in CHECKS]
    return report


def _opened(folder: Path, model: Model, report: Report, found: dict[CheckName, Check]) -> _Head:
    target = model.target
    if is_ours(folder):
        report.layout = "outpace"
        config = read_config(folder)
        theirs, what = config.target, f"the head at '{folder}' (for {config.target.name})"
        _passed(found, "configuration", f"a head of kind {config.kind}")
        report.kind = config.kind
        alike = _ours_alike(config, model, what, found)
        _passed(found, "target", _sizes(theirs.hidden_size, theirs.vocab_size, theirs.num_layers))
        head = _Head("outpace", config, read_weights(folder), {}, alike)
    else:
        layout, foreign = opened(folder, target)
        report.layout, report.kind = layout.name, foreign.config.kind
        _passed(found, "configuration", f"a head of kind {foreign.config.kind} in the layout '{layout.name}'")
        _passed(found, "target", _sizes(target.hidden_size, target.vocab_size, None))
        cosine = check_embedding(foreign, target, folder)
        said = "the file has no embedding to tell" if foreign.embedding is None else f"embeddings: cosine {cosine:.4f}"
        head = _Head(layout.name, foreign.config, foreign.tensors, foreign.called, said)
    _passed(found, "weights", f"{len(head.tensors)} tensors")
    return head


def _ours_alike(config: HeadConfig, model: Model, what: str, found: dict[CheckName, Check]) -> str:
    """The check of the fingerprint, noted where it fails: what is after it can still be looked at."""
    theirs = config.target
    try:
        check(model.target, theirs.hidden_size, theirs.vocab_size, theirs.num_layers, theirs.fingerprint, what)
    except IncompatibleHead as error:
        if error.check != "fingerprint":
            raise
        found["fingerprint"] = Check("fingerprint", False, str(error))
    embeddings, states = cosines(theirs.fingerprint, probe(model.target))
    return f"embeddings: cosine {embeddings:.4f}, states: {states:.4f} ({ALIKE} and more is the same model)"


def _sizes(hidden: int, vocabulary: int, layers: int | None) -> str:
    deep = "" if layers is None else f", {layers} layers"
    return f"hidden size {hidden}, vocabulary {vocabulary}{deep}"


def _passed(found: dict[CheckName, Check], name: CheckName, message: str) -> None:
    found.setdefault(name, Check(name, True, message))


def _judge(head: _Head, folder: Path, model: Model, found: dict[CheckName, Check]) -> None:
    """Everything about the tensors, each check by itself: one that fails does not hide the next."""
    target, called = model.target, head.called
    ids = head.tensors.get("words.ids")
    _note(found, "vocabulary", _vocabulary(ids), f"{head.config.vocabulary} of {target.vocab_size} tokens")
    expected = expected_shapes(network(head.config, head.tensors, target, folder))
    layers = ", ".join(map(str, head.config.aux_hidden_state_layers)) or "none: it reads tokens alone"
    _passed(
        found,
        "layers",
        f"states entering layers {layers}" if head.config.aux_hidden_state_layers else layers,
    )
    missing = [f"lacks {called.get(name, name)}" for name in expected if name not in head.tensors]
    unknown = [f"does not know {name}" for name in head.tensors if name not in expected]
    _note(found, "keys", [*missing, *unknown], "every tensor that its kind has, and no other")
    wrong = [
        f"{called.get(name, name)} is {tuple(head.tensors[name].shape)}, not {shape}"
        for name, shape in expected.items()
        if name in head.tensors and tuple(head.tensors[name].shape) != shape
    ]
    _note(found, "shapes", wrong, "as its configuration says")
    numbers = [problem for name, value in head.tensors.items() for problem in _numbers(called.get(name, name), value)]
    count = sum(value.numel() for name, value in head.tensors.items() if name != "words.ids")
    _note(found, "numbers", numbers, f"{count:,} weights, all finite")
    _passed(found, "fingerprint", head.alike)


def _note(found: dict[CheckName, Check], name: CheckName, problems: list[str], fine: str) -> None:
    more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
    found[name] = Check(name, not problems, "; ".join(problems[:3]) + more if problems else fine)


def _numbers(name: str, value: Tensor) -> list[str]:
    if name in ("words.ids", "d2t", "token_map"):
        return [] if not value.is_floating_point() else [f"{name} holds {value.dtype}, not whole numbers"]
    if value.dtype not in _FLOATS:
        return [f"{name} holds {value.dtype}"]
    return [] if bool(value.isfinite().all()) else [f"{name} holds numbers that are not finite"]


def _vocabulary(ids: Tensor | None) -> list[str]:
    if ids is None or ids.dim() != 1 or not len(ids):
        return ["there is no map from its words to tokens"]
    if not distinct(ids):
        return ["two of its words are the same token"]
    if bool((ids[1:] <= ids[:-1]).any()):
        return ["its words are not in the order of their tokens, which engines that mark them (t2d) rely on"]
    return []


def _decoded(kind: str, folder: Path, model: Model, tokens: int) -> Check:
    """Whether its method drafts with it, and answers as plain decoding does."""
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
            if name != "none":  # it is to draft whether that pays or not
                method = replace(method, controller=Fixed(_DRAFT))
            generation = decoder.submit(Request(prompt, method, max_new_tokens=tokens, stop_ids=model.eos_ids))
            decoder.run()
            if generation.error is not None:
                raise generation.error
            answers.append(list(generation.tokens))
            drafted, accepted = generation.metrics.drafted, generation.metrics.accepted
    except OutpaceError as error:
        return Check("decoding", False, str(error))
    apart = parting(answers[1], answers[0])
    if apart is not None:
        at, *chosen = apart
        size = gap(model.target, prompt, answers[0][:at], chosen, SamplingParams(), model.eos_ids)
        if not size.near_tie:
            return Check("decoding", False, f"method '{names[0]}' answers otherwise than plain decoding at token {at}")
    if not drafted:
        return Check("decoding", False, f"method '{names[0]}' drafts nothing with it")
    said = f"{accepted} of {drafted} draft tokens accepted"
    return Check("decoding", True, f"method '{names[0]}' answers as plain decoding does; {said}")
