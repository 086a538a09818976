"""From what a caller names to bindings: draft models, folders of heads, and what is shipped for the target.

A head of kind ``draft-lm`` is a language model by itself, so it serves as a draft model too: where its folder, or
``draft-lm`` for the one that is shipped, is given as a draft model, and by default where no draft model is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.core.files import version_at
from outpace.heads.head_config import WEIGHTS
from outpace.heads.shipped import measured, shipped
from outpace.methods.bindings import DRAFT_MODEL, Binding, Bindings, DraftModelChoice, check_names
from outpace.models.base import ChatTokenizer
from outpace.targets.base import Target

if TYPE_CHECKING:
    from outpace.heads.head_folder import HeadFolder

DRAFT_LM = "draft-lm"
"""The kind of head that is a language model by itself; as a draft model's name, the one that is shipped."""

DraftModels = DraftModelChoice | str | Path | Seq[DraftModelChoice | str | Path] | Mapping[str, Any] | None
"""Loaded models, and heads of kind ``draft-lm`` by their folders or as ``draft-lm``: one, several, or by name."""
Heads = str | Path | Seq[str | Path] | Mapping[str, str | Path] | None
"""Folders of heads: one, several, or by name. A text may name its folder too: ``NAME=FOLDER``."""

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*")
_LEAST_SHARED = 0.01
"""Of the target's tokens; a draft model of single bytes has half of that, and would draft a letter at a time."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A draft LM as a draft model."""

    name: str
    target: Target
    tokenizer: ChatTokenizer


def name_and_rest(text: str) -> tuple[str, str]:
    """("small", "PATH") of "small=PATH"; the name is "" where none is given. "./a=b" is a path."""
    name, sign, rest = text.partition("=")
    return (name, rest) if sign and _NAME.fullmatch(name) else ("", text)


def head_folders(given: Heads) -> dict[str, HeadFolder]:
    """The named folders, opened; a head without a name is called by its kind.

    Raises BadInput for a folder that holds no head, and for a name that two have.
    """
    from outpace.heads.head_folder import open_head

    opened = [(name, open_head(place)) for name, place in _pairs(given)]
    called = [(name or folder.kind, folder) for name, folder in opened]
    check_names("--head", [name for name, _ in called])
    return dict(called)


def draft_lm_folder(place: str | Path) -> HeadFolder | None:
    """The head of kind ``draft-lm`` in a folder of outpace's layout; None where there is no head of that layout.

    Raises BadInput for a head of another kind.
    """
    from outpace.heads.head_folder import open_head

    try:
        folder = open_head(place)
    except BadInput:  # a model, or nothing: whoever loads models says which
        return None
    if folder.own and folder.kind != DRAFT_LM:
        raise BadInput(f"'{place}' is a head of kind {folder.kind}, which is no language model: give it with --head")
    return folder if folder.own else None


def bindings(target: Target, tokenizer: ChatTokenizer, draft_model: DraftModels, head: Heads, name: str) -> Bindings:
    """What the caller named, for the target of the model ``name``; loaded when a method asks for it, and only once.

    Raises BadInput for folders that hold no head, and for names that are given twice.
    """
    one = _Weights(target, tokenizer, name)
    heads = [one.head(called, folder) for called, folder in head_folders(head).items()]
    models = [one.draft_model(called, given) for called, given in _pairs(draft_model)]
    return Bindings([*models, *heads], partial(one.default, heads))


def _pairs(given: Any) -> Iterable[tuple[str, Any]]:
    if given is None:
        return
    if isinstance(given, Mapping):
        yield from given.items()
        return
    several = isinstance(given, Seq) and not isinstance(given, str)
    for one in given if several else [given]:
        yield name_and_rest(one) if isinstance(one, str) else ("", one)


class _Weights:
    """Bindings for one target. What two names are bound to is loaded once."""

    def __init__(self, target: Target, tokenizer: ChatTokenizer, name: str) -> None:
        self.target, self.tokenizer, self.name = target, tokenizer, name
        self._loaders: dict[Any, Callable[[], Any]] = {}

    def head(self, name: str, folder: HeadFolder, *, is_shipped: bool = False) -> Binding:
        path = folder.files.path
        return Binding(
            name,
            folder.kind,
            self._once(("head", path.resolve()), partial(folder.load, self.target)),
            origin=str(path),
            key=_written(path),
            shipped=is_shipped,
            speedup=partial(measured, folder),
        )

    def draft_model(self, name: str, given: DraftModelChoice | str | Path) -> Binding:
        if not isinstance(given, str | Path):
            return Binding(
                name or given.name,
                DRAFT_MODEL,
                self._once(("model", id(given)), partial(self._over_our_vocabulary, given)),
                origin=given.name,
                key=id(given),
                choice=lambda: given,
            )
        if given == DRAFT_LM:
            found = self._shipped(DRAFT_LM)
            if found is None:
                raise BadInput(f"no draft LM is shipped for '{self.name}': train one with 'outpace train {DRAFT_LM}'")
        else:
            folder = draft_lm_folder(given)
            if folder is None:
                raise BadInput(f"'{given}' is no head of kind {DRAFT_LM}; load a draft model with outpace.load")
            found = self.head("", folder)
        return self._as_draft_model(name or DRAFT_LM, found)

    def default(self, heads: Seq[Binding], kind: str, name: str) -> Seq[Binding]:
        """What there is of a kind that the caller named none of: a shipped head; a draft LM as the draft model."""
        if kind == DRAFT_MODEL:
            named = [one for one in heads if one.kind == DRAFT_LM and name in ("", one.name)]
            found = named[0] if named else self._shipped(DRAFT_LM)
            offered = None if found is None else self._as_draft_model(found.name, found, str(found) if named else "")
        else:
            offered = self._shipped(kind)
        return [offered] if offered is not None and name in ("", offered.name) else []

    @cached_property
    def _all_shipped(self) -> list[HeadFolder]:
        return shipped(self.target)

    def _shipped(self, kind: str) -> Binding | None:
        """The head of a kind that is shipped for this target, under its kind as its name."""
        found = next((one for one in self._all_shipped if one.kind == kind), None)
        return None if found is None else self.head(kind, found, is_shipped=True)

    def _as_draft_model(self, name: str, head: Binding, words: str = "") -> Binding:
        def made() -> _Choice:
            from outpace.methods.learned.distill.target import HeadTarget

            return _Choice(name, HeadTarget(head.load(), self.target, widened=True), self.tokenizer)

        choice = self._once(("choice", head.key), made)
        return Binding(
            name,
            DRAFT_MODEL,
            lambda: choice().target,
            origin=head.origin,
            key=head.key,
            shipped=head.shipped,
            choice=choice,
            words=words,
        )

    def _once(self, key: Any, load: Callable[[], Any]) -> Callable[[], Any]:
        return self._loaders.setdefault(key, cache(load))

    def _over_our_vocabulary(self, draft: DraftModelChoice) -> Target:
        """A draft model's target over this target's vocabulary: as it is, or bridged where its own differs.

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


def _written(folder: Path) -> tuple[str, tuple[int, ...] | None]:
    """A folder and the version of its weights."""
    return str(folder.resolve()), version_at(folder / WEIGHTS)
