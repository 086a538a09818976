"""Model: a target, its tokenizer, and what is known about both; methods are built for it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.lru import Lru

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule
    from outpace.engine.method import Method
    from outpace.methods.named_weights import DraftModels, Heads
    from outpace.methods.registry import Context
    from outpace.targets.base import Target
from outpace.models.base import ChatTokenizer

REMEMBERED = 16
"""Methods that a model keeps for the namespaces in them; the least recently used leave first."""


@dataclass(slots=True)
class Model:
    """What ``outpace.load`` returns. ``info`` holds architecture, parameters, dtype, device, source and the like."""

    name: str
    target: Target
    tokenizer: ChatTokenizer
    eos_ids: frozenset[int]
    info: dict[str, Any] = field(default_factory=dict)
    learned: Lru[Any, tuple[Context, Method]] = field(
        default_factory=lambda: Lru(REMEMBERED), init=False, repr=False, compare=False
    )
    """Methods that were named together with a namespace: what they learned there is theirs (:mod:`outpace.api`)."""

    def method(
        self,
        name: str | Method,
        settings: Mapping[str, Any] | None = None,
        *,
        rule: str | AcceptanceRule | None = None,
        draft_model: DraftModels = None,
        datastore: str | Path | None = None,
        head: Heads = None,
    ) -> Method:
        """Build a method for this model. Raises BadInput for what does not exist or does not fit.

        ``name``: a method's, or ``METHOD#NAME``, which drafts with the draft model or head of that name.
        ``draft_model``: one, several, or several by name; methods that take one take the first. A draft model of
        another vocabulary drafts the tokens that it shares with this one (:mod:`outpace.targets.bridged`).
        ``datastore``: a corpus that ``outpace datastore build`` made, for methods that copy from one; opened when the
        method asks for it. ``head``: folders of trained heads, by name or not; a method takes the first of its kind.
        Without a draft model, or without any head, a method drafts with what is shipped for this model.
        """
        from outpace.engine.method import Method
        from outpace.methods.registry import build  # imports torch, which naming a model must not wait for

        if isinstance(name, Method):
            return name
        return build(name, self.context(draft_model=draft_model, datastore=datastore, head=head), settings, rule)

    def context(
        self, *, draft_model: DraftModels = None, datastore: str | Path | None = None, head: Heads = None
    ) -> Context:
        """What methods are built from, for those who supply something else of it: see :meth:`method`."""
        from outpace.datastore.store import open_datastore
        from outpace.methods.named_weights import bindings
        from outpace.methods.registry import Context

        named = bindings(self.target, self.tokenizer, draft_model, head, self.name)
        context = Context(self.target, named, self.tokenizer)
        if datastore is not None:
            context = replace(context, datastore=lambda: open_datastore(datastore, self.tokenizer.fingerprint))
        return context
