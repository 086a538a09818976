"""Which methods are compared, with which lengths or trees; and which of them an engine can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.core.errors import BadInput
from outpace.methods.bindings import Bindings
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.registry import Context, MethodInfo, drafting_with, find, methods, routers

ENGINES = ("outpace", "vllm", "sglang", "llama.cpp")
LOOKUP = ("pld", "sam", "recycling")
"""The methods without weights that gain most on the embedded questions."""
_LENGTHS = (2, 3, 5, 8)
_CHAINS = (1, 2, 3, 4, 5)
_TREES = ((4, 3), (8, 4), (12, 5), (20, 6))
"""(nodes, depth)."""
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Shape:
    """``settings`` of a method, and what they are called. ``engines``: where such drafts can be made.

    ``chain``: draft tokens of a chain of fixed length, 0 where it is something else.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    engines: frozenset[str] = frozenset(ENGINES)
    chain: int = 0

    @property
    def words(self) -> str:
        """For sentences: "up to 5 draft tokens", "trees of 8 nodes"."""
        if self.chain:
            return f"{self.chain} draft token{'s' if self.chain > 1 else ''} a round"
        if "max_nodes" in self.settings:
            return f"trees of {self.settings['max_nodes']} nodes, up to {self.settings['depth']} deep"
        return "as many draft tokens as gain in each round" if not self.settings else str(dict(self.settings))


_OURS = Shape(engines=frozenset({"outpace"}))
"""What a method chooses by itself in each round."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method with the shapes that are tried. ``teacher_forced``: chains that are drawn from a draft model, whose
    acceptance follows from one forward of it over each answer. ``runs_models``: it drafts with draft models, so that a
    replay takes about as long as decoding."""

    method: str
    shapes: tuple[Shape, ...]
    head: str | None = None
    teacher_forced: bool = False
    runs_models: bool = False


def candidates(context: Context, engine: str, *, greedy: bool) -> list[Candidate]:
    """What is compared for ``engine``, the default first: what comes last may find the time over.

    Raises BadInput for a head that no method drafts with.
    """
    found = [Candidate(DEFAULT_METHOD, (_OURS,))]
    found += [Candidate(name, _lookup_shapes(name)) for name in LOOKUP]
    found += [_head_candidate(kind, greedy=greedy) for kind in head_kinds(context.bindings)]
    drafts = context.bindings.draft_models
    chains = (_OURS, *(Shape({"num_draft_tokens": length}, chain=length) for length in DRAFT_LENGTHS))
    for one in drafts:
        label = f"draft-model#{one.name}" if len(drafts) > 1 else "draft-model"
        found.append(Candidate(label, chains, teacher_forced=True, runs_models=True))
    if len(drafts) > 1:
        found += [Candidate(name, (_OURS,), runs_models=True) for name in routers()]
    fitting = [_fitting(one, engine) for one in found]
    return [one for one in fitting if one.shapes]


def head_kinds(bindings: Bindings) -> list[str]:
    """Kinds of the heads that were named; otherwise the shipped one that has measured best, if any gains."""
    if bindings.heads:
        return list(dict.fromkeys(one.kind for one in bindings.heads))
    kinds = dict.fromkeys(info.head for info in _trained() if info.head is not None and info.head != "draft-lm")
    offered = [one for kind in kinds for one in bindings.find(kind)[:1]]
    speed = [(one.speedup(drafting_with(one.kind)[0]) or 0.0, one.kind) for one in offered]
    best = max(speed, default=(0.0, ""))
    return [best[1]] if best[0] > 1.0 else []


def _trained() -> list[MethodInfo]:
    return [info for info in methods() if info.trained and info.lossless]


def _lookup_shapes(name: str) -> tuple[Shape, ...]:
    elsewhere = {"pld": frozenset(ENGINES), "sam": frozenset({"outpace", "vllm"})}.get(name)
    if elsewhere is None:
        return (_OURS,)
    return (_OURS, *(Shape({"num_draft_tokens": length}, elsewhere, length) for length in _LENGTHS))


def _head_candidate(kind: str, *, greedy: bool) -> Candidate:
    names = drafting_with(kind)
    if not names:
        raise BadInput(f"no method drafts with heads of kind {kind}")
    method = names[0]
    shapes = [_OURS]
    fields = find(method).settings.model_fields
    if {"mode", "max_nodes", "depth", "topk"} <= set(fields):  # the EAGLE family
        elsewhere = frozenset({"outpace", "sglang", *(("vllm",) if kind == "eagle3" else ())})
        mode = "tree" if greedy else "chain"
        for length in _CHAINS:
            one = {"mode": mode, "depth": length} | ({"topk": 1, "max_nodes": length} if greedy else {})
            shapes.append(Shape(one, elsewhere, length))
        trees = frozenset({"outpace", "sglang"})
        shapes += [Shape({"mode": "tree", "max_nodes": nodes, "depth": depth}, trees) for nodes, depth in _TREES]
    elif "num_draft_tokens" in fields:
        shapes += [Shape({"num_draft_tokens": length}, chain=length) for length in _LENGTHS]
    return Candidate(method, tuple(shapes), head=kind)


def _fitting(one: Candidate, engine: str) -> Candidate:
    shapes = tuple(shape for shape in one.shapes if engine in shape.engines)
    return replace(one, shapes=shapes)
