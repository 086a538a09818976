"""Methods of one command, built side by side from what was named for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.core.names import did_you_mean
from outpace.engine.method import Method
from outpace.methods.bindings import Bindings, OtherKind, split
from outpace.methods.registry import Context, build, find


def build_all(
    names: Seq[str | Method],
    context: Context,
    settings: Mapping[str, Mapping[str, Any]],
    rule: str | AcceptanceRule | None = None,
) -> list[Method]:
    """Methods that share a context; ``settings`` by name. Autoregressive decoding keeps its own rule.

    A method for whose kind no head was named drafts with a shipped one only where others draft with every head that
    was named. Raises BadInput as :func:`build` does.
    """

    def made(name: str, context: Context) -> Method:
        # It drafts nothing to judge, so it stays the baseline under any rule.
        return build(name, context, settings.get(name), None if name == "none" else rule)

    built: list[Method | tuple[str, OtherKind]] = []
    for name in names:
        try:
            built.append(made(name, context) if isinstance(name, str) else name)
        except OtherKind as refusal:
            assert isinstance(name, str)
            built.append((name, refusal))
    used = {one for method in built if isinstance(method, Method) for one in method.drafts_with}
    idle = [one for one in context.bindings.heads if str(one) not in used]
    found = []
    for one in built:
        if isinstance(one, tuple):
            if idle:
                raise one[1]
            found.append(made(one[0], replace(context, bindings=context.bindings.without_heads())))
        else:
            found.append(one)
    return found


def use_notes(used: Mapping[str, Seq[str]], bindings: Bindings) -> list[str]:
    """What a caller who named draft models or heads is to know of methods that draft with ``used``.

    Which method drafts with which, where one drafts with what was not named; labels that may be meant as names; and
    what was named in vain.
    """
    named = [str(one) for one in bindings.named]
    taken = {one for mine in used.values() for one in mine}
    mixed = bool(named) and not taken <= set(named)
    notes = [f"{label} drafts with {' and '.join(mine)}" for label, mine in used.items() if mine and mixed]
    notes += [note for label, mine in used.items() if mine and (note := _free_label(label, mine, bindings))]
    return notes + [f"no method drafts with {one}" for one in named if one not in taken]


def _free_label(label: str, mine: Seq[str], bindings: Bindings) -> str:
    """Said of a label whose name is nobody's, where it looks like one of the names that were given; else ""."""
    name = split(label)[1].partition(",")[0]
    if not name or "=" in name or bindings.names(name, find(label).kinds):
        return ""
    near = did_you_mean(name, [one.name for one in bindings.named])
    what = f"{label}: no draft model or head is named '{name}', so that this is only a label; it drafts with"
    return f"{what} {' and '.join(mine)}; {near}" if near else ""
