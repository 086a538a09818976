"""Heads to and from other engines: whole folders in their layouts."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import cache
from pathlib import Path

from outpace.core.errors import BadInput
from outpace.heads.base import Head
from outpace.heads.checkpoint import read_provenance, save
from outpace.heads.head_folder import HeadOwner, open_head
from outpace.heads.layouts.base import About
from outpace.heads.layouts.files import check_new, new_folder
from outpace.heads.layouts.registry import find_layout, write
from outpace.heads.shipped import find_head
from outpace.models.base import ChatTokenizer

HUB = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""What other engines call the embedded models."""


def published(name: str) -> str:
    """What other engines call a model: its own name, unless it is embedded."""
    return HUB.get(name, name)


def export_head(
    model: HeadOwner | Callable[[], HeadOwner],
    folder: str | Path,
    output: str | Path,
    layout: str,
    *,
    verifier: str | None = None,
) -> Head:
    """Write a head as other engines load it, with all that it borrows from its model.

    ``model``: or what loads it, called after the folders and the layout have been checked. ``folder``: of the head, or
    the kind of one that is shipped for the model. ``output``: a new folder.
    ``layout``: speculators (vLLM), eagle, medusa or hf (transformers). ``verifier``: what the engine calls the model;
    None takes its hub id or name. Returns the head. Raises BadInput for a folder without a head, one that does not fit
    the model, a layout that does not hold this kind, and an ``output`` that is not empty.
    """
    load, output = cache(model if callable(model) else lambda: model), Path(output)
    check_new(output)
    found = find_head(folder, load)
    find_layout(layout, found.kind)
    owner = load()
    head = found.load(owner.target)
    about = About(
        verifier or published(owner.name),
        owner.info.get("architecture", "LlamaForCausalLM"),
        unused_token(owner.tokenizer, owner.eos_ids, owner.target.vocab_size),
        read_provenance(found.files.path) or {},
        # A tokenizer of transformers, where it is one.
        getattr(getattr(owner.tokenizer, "inner", None), "save_pretrained", None),
    )
    write(head, owner.target, output, layout, about)
    return head


def import_head(model: HeadOwner | Callable[[], HeadOwner], folder: str | Path, output: str | Path) -> Head:
    """Read a head in another engine's layout and write it to ``output`` as outpace has it: small, bound to its model.

    ``model``: or what loads it, called after the folders have been checked. Returns the head. Raises BadInput for a
    folder without a head of such a layout, one that does not fit the model, and an ``output`` that is not empty.
    """
    found, output = open_head(folder), Path(output)
    source = found.files.path
    if found.own:
        raise BadInput(f"the head at '{source}' is of outpace's own layout already; use it with --head")
    check_new(output)
    owner = model() if callable(model) else model
    head = found.load(owner.target)
    with new_folder(output) as place:
        about = {"imported": found.layout.name, "imported_from": source.name}
        save(head, place, (read_provenance(source) or {}) | about)
    return head


def unused_token(tokenizer: ChatTokenizer, eos_ids: Set[int], vocab_size: int) -> int | None:
    """A token that no text uses: beyond the tokenizer's, or a special one that neither chats nor answers hold."""
    used = set(tokenizer.chat([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]))
    used |= set(tokenizer.chat([{"role": "user", "content": "b"}])) | set(eos_ids)
    for token in reversed(range(vocab_size)):
        if token not in used and (token >= len(tokenizer) or tokenizer.token_bytes(token) is None):
            return token
    return None
