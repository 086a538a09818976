"""What is certified: every method and its variants, and every rule on one method of each kind of proposal.

A rule sees draws and rows, not the drafter; so what a rule does on one kind of tree is shown by one method that builds
such trees. Every other method of the kind is certified under its own rule. Trained methods draft with untrained heads
(:func:`outpace.certify.exact.toy_head`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from outpace.acceptance.registry import rules
from outpace.certify.certificate import Certificate
from outpace.certify.exact import tiny_context
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.methods.registry import MethodInfo, build, methods

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "draft-model": [{"confidence": 0.4}, {"topk": 2, "max_nodes": 4}, {"mode": "mixed", "topk": 2, "max_nodes": 3}],
    "rsd": [{"branching": (1, 1), "beam": 2}],
    "sampled-tree": [{"draws": "greedy"}],
    "pld": [{"num_draft_tokens": 1}],
    "hetvocab": [{"algorithm": "slem"}, {"algorithm": "slrs"}],
    "specinfer": [{"expansion": "top-k", "branching": (2, 1)}],
    "jacobi": [{"mode": "gs", "block": 3}],
    "mcsjd": [{"restart": False, "guess": "pad"}],
    "lookahead": [{"text": False}],
    "metasd": [{"policy": "exp3"}],
    "aio": [{"strategies": ("pld", "none"), "settings": {"pld": {"num_draft_tokens": 2}}}],
    "hsd": [{"handover": "variable"}],
    "eagle2": [{"mode": "chain"}],
    "eagle3": [{"mode": "sampled", "branching": (2,)}, {"mode": "chain"}],
    "medusa": [{"tree": "sparse"}],
    "dflash": [{"sampled": False}],
    "pard2": [{"features": False}, {"sampled": True}],
    "distill": [{"topk": 1}, {"draft": "sampled"}, {"draft": "sampled-tree", "branching": (2, 1)}],
}
"""Settings beside the registered tiny ones that change what is drafted or how."""

REPRESENTATIVES = ("rsd", "sampled-tree", "draft-model", "pld")
"""Asked first whether they stand for their kind: they draft in every setting. The longest runs come first."""


class Case(NamedTuple):
    """``rule`` None: the method's own."""

    name: str
    settings: dict[str, Any]
    rule: str | None
    label: str


def cases() -> Iterator[Case]:
    """Every case, representatives of kinds under all rules that take them first."""
    represented: set[Proposal] = set()
    for info in _in_order():
        for variant in ({}, *VARIANTS.get(info.name, ())):
            settings = {**info.tiny, **variant}
            label = "-".join([info.name, *map(str, variant)])
            yield Case(info.name, settings, None, label)
            made = build(info.name, tiny_context(3, 0), settings)
            if made.drafter.proposal not in represented and made.may_draft:
                represented.add(made.drafter.proposal)
                for rule in lossless_rules():
                    if rule != made.rule.name and takes(rule, made.drafter.proposal):
                        yield Case(info.name, settings, rule, f"{label}-{rule}")


def lossless_rules() -> list[str]:
    """The rules that claim it for every temperature, without those that tests define: a subclass is registered."""
    ours = [kind for kind in rules().values() if kind.__module__.startswith("outpace.")]
    return sorted({kind.name for kind in ours if kind.lossless and not kind.greedy_only})


def _in_order() -> list[MethodInfo]:
    lossless = {info.name: info for info in methods() if info.lossless and info.build.__module__.startswith("outpace.")}
    return [lossless.pop(name) for name in REPRESENTATIVES] + list(lossless.values())


def takes(rule: str, proposal: Proposal) -> bool:
    """Whether a rule can judge all trees of a kind; the rest is refused, as the tests of rules show."""
    try:
        rules()[rule]().check("any", proposal)
    except BadInput:
        return False
    return True


def hidden_choices(certificate: Certificate) -> list[str]:
    """Settings that could not be enumerated because something else than its chance decides what the method does."""
    return [check.name for check in certificate.checks if "not a function of its random choices" in check.note]
