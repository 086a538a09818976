"""Model: a target, its tokenizer, and what is known about both; methods are built for it here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.core.lru import Lru

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule
    from outpace.engine.method import Method
    from outpace.methods.registry import Context
    from outpace.targets.base import Target
from outpace.models.base import ChatTokenizer

REMEMBERED = 16
"""Methods that a model keeps for the namespaces in them; the least recently used leave first."""
_LEAST_SHARED = 0.01
"""Of the target's tokens; a draft model of single bytes has half of that, and would draft a letter at a time."""


@dataclass(slots=True)
class Model:
    """What ``outpace.load`` returns. ``info`` holds architecture, parameters, dtype, device, source and the like."""

    name: str
    target: Target
    tokenizer: ChatTokenizer
    eos_ids: frozenset[int]
    info: dict[str, Any] = field(default_factory=dict)
    learned: Lru[Any, tuple[Sequence[Model], Method]] = field(
        default_factory=lambda: Lru(REMEMBERED), init=False, repr=False, compare=False
    )
    """Methods that were named together with a namespace: what they learned there is theirs (:mod:`outpace.api`)."""

    def method(
        self,
        name: str | Method,
        settings: Mapping[str, Any] | None = None,
        *,
        rule: str | AcceptanceRule | None = None,
        draft_model: Model | Sequence[Model] | None = None,
        datastore: str | Path | None = None,
        head: str | Path | Sequence[str | Path] | None = None,
    ) -> Method:
        """Build a method for this model. Raises BadInput for what does not exist or does not fit.

        ``draft_model``: one or several; methods that take one take the first. A draft model of another vocabulary
        drafts the tokens that it shares with this one (:mod:`outpace.targets.bridged`). ``datastore``: a corpus that
        ``outpace datastore build`` made, for methods that copy from one; opened when the method asks for it. ``head``:
        folders of trained heads; a method takes the first of its kind, and without one what is shipped for this model.
        """
        from outpace.engine.method import Method
        from outpace.methods.registry import build  # imports torch, which naming a model must not wait for

        if isinstance(name, Method):
            return name
        return build(name, self.context(name, draft_model=draft_model, datastore=datastore, head=head), settings, rule)

    def context(
        self,
        name: str,
        *,
        draft_model: Model | Sequence[Model] | None = None,
        datastore: str | Path | None = None,
        head: str | Path | Sequence[str | Path] | None = None,
    ) -> Context:
        """What a method is built from, for those who supply something else of it: see :meth:`method`."""
        from outpace.datastore.store import open_datastore
        from outpace.heads.head_folder import open_head
        from outpace.heads.shipped import find_head, measured
        from outpace.methods.registry import Context

        heads = [head] if isinstance(head, str | Path) else list(head or ())
        models = [draft_model] if isinstance(draft_model, Model) else list(draft_model or ())

        def named() -> list[Model]:
            if not models:
                raise BadInput(f"method '{name}' needs a draft model: give --draft-model NAME")
            return models

        context = Context(
            self.target,
            draft=lambda: self.sees(named()[0]),
            drafts=lambda: [self.sees(one) for one in named()],
            models=named,
            tokenizer=self.tokenizer,
            head=lambda *kinds: find_head(kinds, heads, self.target),
            heads=tuple(open_head(one).kind for one in heads),
            has_draft=bool(models),
            measured=lambda method, kind: measured(method, kind, heads, self.target),
        )
        if datastore is not None:
            context = replace(context, datastore=lambda: open_datastore(datastore, self.tokenizer.fingerprint))
        return context

    def sees(self, draft: Model) -> Target:
        """A draft model's target over this model's vocabulary: as it is, or bridged where its own differs.

        Raises BadInput for one that shares fewer tokens than drafting needs.
        """
        ours, theirs = self.target.vocab_size, draft.target.vocab_size
        if draft.tokenizer.fingerprint == self.tokenizer.fingerprint and ours == theirs:
            return draft.target
        from outpace.targets.bridged import BridgedTarget
        from outpace.vocabulary.shared import vocabulary_map

        words = vocabulary_map(self.tokenizer, draft.tokenizer, ours, theirs)
        if len(words) < max(1, _LEAST_SHARED * ours):
            raise BadInput(
                f"draft model '{draft.name}' shares {len(words)} of the {ours} tokens of '{self.name}', too few to "
                "draft from; method 'hetvocab' with algorithm=slem drafts through the text and needs none"
            )
        return BridgedTarget(draft.target, words, self.target.context_length)
