"""What a method is built from, and what it consists of then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.methods.bindings import DRAFT_MODEL, Binding, Bindings, DraftModelChoice, split_rule
from outpace.methods.method_info import configured

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule
    from outpace.controllers.base import Controller
    from outpace.controllers.registry import ControllerChoice
    from outpace.datastore.store import Datastore
    from outpace.drafting.base import Drafter
    from outpace.engine.populations.base import Population
    from outpace.engine.request import Request
    from outpace.heads.base import Head
    from outpace.models.base import ChatTokenizer
    from outpace.targets.base import Target


def _no_datastore() -> Datastore:
    raise BadInput(
        "this method copies from a datastore: build one with 'outpace datastore build FILES --out PATH', "
        "and give --datastore PATH"
    )


@dataclass(frozen=True, slots=True)
class Context:
    """What a method may be built from: the target, and what the caller supplied beside it.

    ``bindings`` are the draft models and heads that were named or are shipped; ``tokenizer`` is the target's;
    ``datastore`` opens the corpus that was named. ``label`` is what the method that is being built is called,
    ``METHOD`` or ``METHOD#NAME``, and ``taken`` are the draft models and heads that it was given, in words.
    ``controller``: the one that the caller chose in place of methods' own.
    """

    target: Target
    bindings: Bindings = field(default_factory=Bindings)
    tokenizer: ChatTokenizer | None = None
    datastore: Callable[[], Datastore] = _no_datastore
    label: str = ""
    taken: list[str] = field(default_factory=list)
    controller: ControllerChoice | None = None

    @property
    def has_datastore(self) -> bool:
        """Whether a datastore was named: for methods that copy from one where there is one."""
        return self.datastore is not _no_datastore

    def draft(self) -> Target:
        """The draft model, over the target's vocabulary: that of the method's name, or the first.

        Raises BadInput where there is none, and for one of another vocabulary size.
        """
        return self._fitting(self.bindings.need(DRAFT_MODEL, self.label)[0])

    def drafts(self) -> list[tuple[str, Target]]:
        """All draft models by name, over the target's vocabulary. Raises BadInput as :meth:`draft` does."""
        return [(one.name, self._fitting(one)) for one in self.bindings.need(DRAFT_MODEL, self.label)]

    def draft_choice(self) -> DraftModelChoice:
        """The draft model as it is, over its own vocabulary and with its tokenizer. Raises BadInput for none."""
        found = self.bindings.need(DRAFT_MODEL, self.label)[0]
        if found.choice is None:
            raise BadInput(f"method '{self.label}' needs a draft model with its tokenizer: give --draft-model NAME")
        choice = found.choice()
        self.taken.append(str(found))
        return choice

    def head(self, kind: str) -> Head:
        """The trained head of this kind: that of the method's name, the first that was named, or a shipped one.

        Raises BadInput where there is none, and for one that does not fit the target.
        """
        found = self.bindings.need(kind, self.label)[0]
        head: Head = found.load()
        self.taken.append(str(found))
        return head

    def parts(self, label: str, settings: Mapping[str, Any] | None = None) -> Parts:
        """Another method's parts, for methods made of methods. Raises BadInput as ``build``, and for a rule."""
        from outpace.methods.registry import find  # which imports this module

        if rule := split_rule(label)[1]:
            raise BadInput(f"'{label}' is part of a method, which judges by one rule of its own; leave out '@{rule}'")
        info = find(label)
        if not info.lossless:
            raise BadInput(f"'{info.name}' is lossy, and no part of another method")
        parts = info.build(replace(self, label=label), configured(info, settings or {}))
        if parts.departs:
            raise BadInput(f"'{info.name}' is lossy whatever its rule, and no part of another method")
        return parts

    def _fitting(self, one: Binding) -> Target:
        draft: Target = one.load()
        if draft.vocab_size != self.target.vocab_size:
            raise BadInput(
                f"the draft model has {draft.vocab_size} tokens and the target {self.target.vocab_size}; "
                "choose a draft model with the target's vocabulary"
            )
        self.taken.append(str(one))
        return draft


@dataclass(frozen=True, slots=True)
class Parts:
    """What a method consists of. ``rule`` judges at temperature > 0; None: the default for the drafter's trees.
    ``prepare``, ``departs`` and ``population`` as in :class:`~outpace.engine.method.Method`, for methods whose answers
    are not the target's own."""

    drafter: Drafter[Any]
    controller: Controller
    rule: AcceptanceRule | None = None
    prepare: Callable[[Request], Request] | None = None
    departs: str = ""
    population: Callable[[Request], Population] | None = None
