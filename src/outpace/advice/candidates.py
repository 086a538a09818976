"""Which methods are compared, with which lengths or trees; and which of them an engine can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from outpace.core.errors import BadInput
from outpace.integrations.vllm.exported_head import LAYOUTS
from outpace.methods.bindings import Binding, Bindings
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.named_weights import DRAFT_LM, draft_lm_folder
from outpace.methods.registry import Context, MethodInfo, drafting_with, find, methods, routers
from outpace.targets.bridged import BridgedTarget

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


_ALONE = frozenset({"outpace"})
_OURS = Shape(engines=_ALONE)
"""What a method chooses by itself in each round."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method with the shapes that are tried. ``head``: the folder of the head that it drafts with.
    ``teacher_forced``: chains that are drawn from a draft model, whose acceptance follows from one forward of it over
    each answer. ``runs_models``: it drafts with draft models, so that a replay takes about as long as decoding."""

    method: str
    shapes: tuple[Shape, ...]
    head: str | None = None
    teacher_forced: bool = False
    runs_models: bool = False


class Offered(NamedTuple):
    """What is compared, the default first: what comes last may find the time over. ``left_out``: the methods that would
    draft with a head or draft model that was named, and that the engine cannot run."""

    candidates: list[Candidate]
    left_out: list[str]


def candidates(context: Context, engine: str, *, greedy: bool) -> Offered:
    """What is compared for ``engine``. Raises BadInput for a head that no method drafts with."""
    offered = Offered([], [])
    for one in _all(context, greedy=greedy):
        shapes = tuple(shape for shape in one.shapes if engine in shape.engines)
        if shapes:
            offered.candidates.append(replace(one, shapes=shapes))
        elif one.teacher_forced or (one.head and context.bindings.heads):
            offered.left_out.append(one.method)
    return offered


def _all(context: Context, *, greedy: bool) -> list[Candidate]:
    found = [Candidate(DEFAULT_METHOD, (_OURS,))]
    found += [Candidate(name, _lookup_shapes(name)) for name in LOOKUP]
    found += [_head_candidate(one, context.bindings, greedy=greedy) for one in heads(context.bindings)]
    drafts = context.bindings.draft_models
    for one in drafts:
        label = f"draft-model#{one.name}" if len(drafts) > 1 else "draft-model"
        chains = [Shape({"num_draft_tokens": length}, _draft_engines(one), length) for length in DRAFT_LENGTHS]
        found.append(Candidate(label, (_OURS, *chains), teacher_forced=True, runs_models=True))
    if len(drafts) > 1:
        found += [Candidate(name, (_OURS,), runs_models=True) for name in routers()]
    return found


def _draft_engines(one: Binding) -> frozenset[str]:
    """Which engines draft with this draft model: a draft LM is a head, which is exported for vLLM."""
    if draft_lm_folder(one.origin) is not None:
        return frozenset({"outpace", "vllm"})
    if isinstance(one.load(), BridgedTarget):  # other engines need a draft model of the target's vocabulary
        return _ALONE
    return frozenset(ENGINES) if one.origin.endswith(".gguf") else frozenset(ENGINES) - {"llama.cpp"}


def heads(bindings: Bindings) -> list[Binding]:
    """The heads that were named; otherwise the shipped one that has measured best, if any gains."""
    if bindings.heads:
        return bindings.heads
    kinds = dict.fromkeys(info.head for info in _trained() if info.head is not None and info.head != DRAFT_LM)
    offered = [one for kind in kinds for one in bindings.find(kind)[:1]]
    gaining = [one for one in offered if _measured(one) > 1.0]
    return sorted(gaining, key=_measured)[-1:]


def _measured(head: Binding) -> float:
    methods = drafting_with(head.kind)
    return (head.speedup(methods[0]) if methods else None) or 0.0


def _trained() -> list[MethodInfo]:
    return [info for info in methods() if info.trained and info.lossless]


def _lookup_shapes(name: str) -> tuple[Shape, ...]:
    elsewhere = {"pld": frozenset(ENGINES), "sam": frozenset({"outpace", "vllm"})}.get(name)
    if elsewhere is None:
        return (_OURS,)
    return (_OURS, *(Shape({"num_draft_tokens": length}, elsewhere, length) for length in _LENGTHS))


def _head_candidate(head: Binding, bindings: Bindings, *, greedy: bool) -> Candidate:
    names = drafting_with(head.kind)
    if not names:
        raise BadInput(f"no method drafts with heads of kind {head.kind}")
    alike = [one for one in bindings.heads if one.kind == head.kind]
    label = f"{names[0]}#{head.name}" if len(alike) > 1 else names[0]
    return Candidate(label, (_OURS, *_head_shapes(head, names[0], greedy=greedy)), head=head.origin)


def _head_shapes(head: Binding, method: str, *, greedy: bool) -> list[Shape]:
    fields = find(method).settings.model_fields
    elsewhere = _ALONE | ({"vllm"} if head.kind in LAYOUTS else set())
    if {"mode", "max_nodes", "depth", "topk"} <= set(fields):  # the EAGLE family
        mode = "tree" if greedy else "chain"
        found = []
        for length in _CHAINS:
            one = {"mode": mode, "depth": length} | ({"topk": 1, "max_nodes": length} if greedy else {})
            found.append(Shape(one, elsewhere | {"sglang"}, length))
        trees = _ALONE | {"sglang"}
        return found + [Shape({"mode": "tree", "max_nodes": nodes, "depth": depth}, trees) for nodes, depth in _TREES]
    if head.kind == DRAFT_LM:
        one = {"topk": 1} if greedy else {"draft": "sampled", "confidence": 0.0}
        return [Shape({**one, "max_nodes": length, "depth": length}, elsewhere, length) for length in _LENGTHS]
    tree = {"topk", "max_nodes"} <= set(fields)
    most = head.load().longest_draft if tree or "num_draft_tokens" in fields else None
    if most is None:
        return []
    if tree:  # elsewhere all is drafted, the likeliest tokens
        return [Shape({"topk": 1, "max_nodes": most}, elsewhere, most)]
    lengths = sorted({min(length, most) for length in _LENGTHS})
    return [Shape({"num_draft_tokens": length}, elsewhere, length) for length in lengths]
