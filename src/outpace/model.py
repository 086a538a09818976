"""Model: a target, its tokenizer, and what is known about both; it generates, and methods are built for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.api import calls, conversation, streams
from outpace.controllers.registry import ControllerChoice
from outpace.core.lru import Lru
from outpace.engine.method import Method
from outpace.engine.shared_decoder import SharedDecoder
from outpace.methods.named_weights import DraftModels, Heads, bindings
from outpace.methods.registry import Context, build
from outpace.models.base import ChatTokenizer
from outpace.targets.base import Target

REMEMBERED = 16
"""Methods that a model keeps for the namespaces in them; the least recently used leave first."""


@dataclass(slots=True)
class Model:
    """A loaded model: what :func:`outpace.load` returns.

    name: what it was loaded as.
    target: the model, as the decoder sees it.
    tokenizer: text to token ids and back, and the chat template.
    eos_ids: tokens that end an answer.
    info: architecture, parameters, dtype, device, source and the like.
    shared: the decoder that all calls share; ``shared.limits.max_batch`` is how many requests it decodes side by
        side.

    >>> import outpace
    >>> model = outpace.load("smollm2")                                           # doctest: +SKIP
    >>> print(model.generate("Why is the sky blue?", method="pld"), model.info)  # doctest: +SKIP
    """

    name: str
    target: Target
    tokenizer: ChatTokenizer
    eos_ids: frozenset[int]
    info: dict[str, Any] = field(default_factory=dict)
    learned: Lru[Any, tuple[Context, Method]] = field(
        default_factory=lambda: Lru(REMEMBERED), init=False, repr=False, compare=False
    )
    """Methods as they were built for earlier requests, and what they learned in namespaces (:mod:`outpace.api`)."""
    shared: SharedDecoder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.shared = SharedDecoder(self.target, self.tokenizer)

    generate = calls.generate
    agenerate = calls.agenerate
    stream = streams.stream
    astream = streams.astream
    chat = conversation.chat

    def method(
        self,
        name: str | Method,
        settings: Mapping[str, Any] | None = None,
        *,
        rule: str | AcceptanceRule | None = None,
        draft_model: DraftModels = None,
        datastore: str | Path | None = None,
        head: Heads = None,
        controller: str | ControllerChoice | None = None,
    ) -> Method:
        """Build a method for this model. Raises BadInput for what does not exist or does not fit.

        ``name``: a method's, or ``METHOD#NAME``, which drafts with the draft model or head of that name.
        ``draft_model``: one, several, or several by name; methods that take one take the first. A draft model of
        another vocabulary drafts the tokens that it shares with this one (:mod:`outpace.targets.bridged`).
        ``datastore``: a corpus that ``outpace datastore build`` made, for methods that copy from one; opened when the
        method asks for it. ``head``: folders of trained heads, by name or not; a method takes the first of its kind.
        Without a draft model, or without any head, a method drafts with what is shipped for this model.
        ``controller``: decides how much is drafted, in place of the method's own (``outpace controllers``).
        """
        if isinstance(name, Method):
            return name
        context = self.context(draft_model=draft_model, datastore=datastore, head=head, controller=controller)
        return build(name, context, settings, rule)

    def context(
        self,
        *,
        draft_model: DraftModels = None,
        datastore: str | Path | None = None,
        head: Heads = None,
        controller: str | ControllerChoice | None = None,
    ) -> Context:
        """What methods are built from, for those who supply something else of it: see :meth:`method`."""
        from outpace.datastore.store import open_datastore

        named = bindings(self.target, self.tokenizer, draft_model, head, self.name)
        choice = ControllerChoice(controller) if isinstance(controller, str) else controller
        context = Context(self.target, named, self.tokenizer, controller=choice)
        if datastore is not None:
            context = replace(context, datastore=lambda: open_datastore(datastore, self.tokenizer.fingerprint))
        return context
