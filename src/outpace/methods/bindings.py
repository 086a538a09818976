"""Which draft model or head a method drafts with.

A method is named ``METHOD`` or ``METHOD#NAME``. With a name it drafts with the draft model or head of that name alone,
so that a combination may have several parts of one method: ``draft-model#small``, ``draft-model#large``,
``eagle3#code``. Without one it takes the first of its kind that the caller named, else what is shipped for the target.
A name that no draft model and no head has is a free label: ``pld#2`` and ``pld#8`` are one method twice, in one bench
with different settings. So is everything after a comma. Behind ``@`` stands the acceptance rule, with its settings in
brackets: ``pld@top-beta(tau=0.5)``. Parts of combinations may only have names that are bound.
:mod:`outpace.methods.named_weights` makes bindings of what a caller names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from outpace.core.errors import BadInput
from outpace.core.names import did_you_mean
from outpace.models.base import ChatTokenizer
from outpace.targets.base import Target

DRAFT_MODEL = "draft model"
"""The kind of a binding that is a draft model; other kinds are those of heads."""


_RULE = re.compile(r"@([A-Za-z][\w-]*(?:\(.*\))?)$", re.DOTALL)


class OtherKind(BadInput):
    """Heads were named, and none of them is of the kind that the method drafts with."""


class DraftModelChoice(Protocol):
    """A draft model as it is: its target over its own vocabulary, and its tokenizer."""

    name: str
    target: Target
    tokenizer: ChatTokenizer


def _unmeasured(method: str) -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class Binding:
    """A draft model or a head, under the name by which parts ask for it.

    ``load`` returns the head, or the draft model over the vocabulary of the target that it drafts for; called again it
    returns the same. ``origin``: the head's folder, or the draft model's name. ``key`` differs where the weights do.
    ``choice``: the draft model as it is. ``words``: what it is called in notes, where that is
    another binding's name. ``speedup``: what a method was measured to bring with this head, None where
    nobody has measured it.
    """

    name: str
    kind: str
    load: Callable[[], Any]
    origin: str = ""
    key: Any = None
    shipped: bool = False
    choice: Callable[[], DraftModelChoice] | None = None
    words: str = ""
    speedup: Callable[[str], float | None] = _unmeasured

    @property
    def option(self) -> str:
        """What the command line's option says of it: ``NAME=ORIGIN``, or the origin where the name follows from it."""
        return self.origin if self.name in (self.origin, self.kind) else f"{self.name}={self.origin}"

    def __str__(self) -> str:
        if self.words:
            return self.words
        if self.shipped:
            return f"the shipped {'draft model' if self.kind == DRAFT_MODEL else 'head'} '{self.name}'"
        if self.kind == DRAFT_MODEL:
            return f"draft model '{self.name}'"
        return f"head '{self.name}'" + ("" if self.name == self.kind else f" ({self.kind})")


Default = Callable[[str, str], Seq[Binding]]
"""What there is of a kind where the caller named none: all of them, or those of a name."""


def _nothing(kind: str, name: str) -> Seq[Binding]:
    return ()


class Bindings:
    """The draft models and heads that the caller named, and a ``default`` for the kinds of which none was named.

    Raises BadInput for a name that two draft models or two heads have.
    """

    def __init__(self, named: Seq[Binding] = (), default: Default = _nothing) -> None:
        self.named = tuple(named)
        self.default = default
        for flag, group in (("--draft-model", self.draft_models), ("--head", self.heads)):
            check_names(flag, [one.name for one in group])

    @property
    def draft_models(self) -> list[Binding]:
        """The draft models that the caller named."""
        return [one for one in self.named if one.kind == DRAFT_MODEL]

    @property
    def heads(self) -> list[Binding]:
        """The heads that the caller named."""
        return [one for one in self.named if one.kind != DRAFT_MODEL]

    def find(self, kind: str, name: str = "") -> list[Binding]:
        """All that a method called ``name`` may draft with of this kind; empty where there is nothing.

        What is shipped counts only where the caller named no draft model, or no head of any kind; or by its name.
        """
        alike = self.draft_models if kind == DRAFT_MODEL else self.heads
        mine = [one for one in alike if one.kind == kind and name in ("", one.name)]
        return mine if mine or (alike and not name) else list(self.default(kind, name))

    def names(self, name: str, kinds: Iterable[str]) -> bool:
        """Whether a draft model or a head of any kind was given this name, or one of ``kinds`` is shipped under it."""
        return any(one.name == name for one in self.named) or any(self.default(kind, name) for kind in kinds)

    def bound(self, label: str, kinds: Iterable[str]) -> str:
        """The label by which a method that drafts with ``kinds`` asks for them: its own, without a free name."""
        method, name = split(label)
        name = name.partition(",")[0]
        return f"{method}#{name}" if name and self.names(name, kinds) else method

    def need(self, kind: str, label: str) -> list[Binding]:
        """As :meth:`find`, for the method of this label. Raises BadInput where there is nothing, saying what there is.

        Raises OtherKind where heads were named, and all are of other kinds.
        """
        found = self.find(kind, split(label)[1])
        if not found:
            raise self._refusal(kind, label)
        return found

    def without_heads(self) -> Bindings:
        """The same, as if no head had been named."""
        return Bindings(self.draft_models, self.default)

    def _refusal(self, kind: str, label: str) -> BadInput:
        name = split(label)[1]
        flag, what = ("--draft-model", DRAFT_MODEL) if kind == DRAFT_MODEL else ("--head", f"head of kind {kind}")
        if name:
            other = next((one for one in self.heads if one.name == name and kind != DRAFT_MODEL), None)
            if other is not None:
                return OtherKind(f"'{label}' drafts with a {what}, and '{name}' is a head of kind {other.kind}")
            models, heads = (", ".join(map(_told, group)) or "none" for group in (self.draft_models, self.heads))
            near = did_you_mean(name, [one.name for one in self.named])
            return BadInput(
                f"'{label}' drafts with the {what} that is named '{name}', and none is (draft models: {models}; "
                f"heads: {heads}); {near or f'give {flag} {name}=...'}"
            )
        if kind == DRAFT_MODEL:
            return BadInput(
                f"method '{label}' needs a draft model, and none is shipped for this model: give --draft-model NAME"
            )
        if self.heads:
            gave = " and ".join(map(_told, self.heads))
            return OtherKind(f"method '{label}' drafts with a {what}, and --head gave {gave}; give one of its kind")
        return BadInput(
            f"method '{label}' drafts with a trained head, and none is shipped for this model: train one with "
            f"'outpace train {kind} --model MODEL --out FOLDER', and give --head FOLDER"
        )


def split(label: str) -> tuple[str, str]:
    """Method and name of a label: ("draft-model", "small") of "draft-model#small"; no name is ""."""
    method, _, name = split_rule(label)[0].partition("#")
    return method, name


def split_rule(label: str) -> tuple[str, str]:
    """A label without its rule, and the rule's text: ("pld#2", "top-beta(tau=1)") of "pld#2@top-beta(tau=1)"."""
    found = _RULE.search(label)
    return (label[: found.start()], found[1]) if found else (label, "")


def row_series(label: str) -> tuple[str, str]:
    """A row's method and rule, and what tells it from other rows of these: settings, or the label.

    ("pld@top-beta", "tau=1") of "pld@top-beta(tau=1)", and ("pld", "2") of "pld#2".
    """
    rest, rule = split_rule(label)
    method, name = split(rest)
    rule, _, settings = rule.partition("(")
    knobs = [one for one in (name, settings.removesuffix(")")) if one]
    return f"{method}@{rule}" if rule else method, " ".join(knobs)


def check_names(flag: str, names: Seq[str]) -> None:
    """Raise BadInput for a name that ``flag`` gives twice."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise BadInput(f"{flag} names '{twice}' twice; give each a name of its own: {flag} NAME=...")


def draft_models(loaded: Mapping[str, Target]) -> list[Binding]:
    """Bindings of draft models over the target's vocabulary, by name."""
    return [_loaded(name, DRAFT_MODEL, one) for name, one in loaded.items()]


def heads(loaded: Mapping[str, Any]) -> list[Binding]:
    """Bindings of heads that are loaded already, by name."""
    return [_loaded(name, head.config.kind, head) for name, head in loaded.items()]


def _loaded(name: str, kind: str, weights: Any) -> Binding:
    return Binding(name, kind, lambda: weights, origin=name, key=id(weights))


def _told(one: Binding) -> str:
    return one.name if one.kind in (one.name, DRAFT_MODEL) else f"{one.name} ({one.kind})"
