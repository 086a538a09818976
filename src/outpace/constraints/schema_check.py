"""Schemas that no finite answer satisfies: found before anything is decoded, because such an answer would not end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urldefrag, urljoin

from outpace.core.errors import BadInput

_MOST_STEPS = 200_000


def check_schema(schema: Any) -> None:
    """Raise BadInput for a schema whose every instance contains itself, such as an object that requires one of its own
    kind. What cannot be told is taken for satisfiable."""
    found = _Finite(schema)
    if not found.holds(schema, ()):
        raise BadInput(
            "the schema is unsatisfiable: every instance would have to contain another one of the same kind, without "
            "end; make the recursive property optional, or give the recursion another branch"
        )


class _Finite:
    """Whether a schema has a finite instance, as far as recursion decides it."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        own = whole.get("$id") if isinstance(whole, Mapping) else None
        self._id = own if isinstance(own, str) else ""
        self._known: dict[str, bool] = {}
        self._steps = 0

    def holds(self, schema: Any, open_refs: tuple[str, ...]) -> bool:
        """``open_refs``: references under way, of which no instance is known to be finite yet."""
        self._steps += 1
        if not isinstance(schema, Mapping) or self._steps > _MOST_STEPS:
            return True
        ref = schema.get("$ref")
        if isinstance(ref, str) and not self._resolved(ref, open_refs):
            return False
        if isinstance(every := schema.get("allOf"), list) and not all(self.holds(one, open_refs) for one in every):
            return False
        for name in ("anyOf", "oneOf"):
            some = schema.get(name)
            if isinstance(some, list) and some and not any(self.holds(one, open_refs) for one in some):
                return False
        return self._value_holds(schema, open_refs)

    def _value_holds(self, schema: Mapping[str, Any], open_refs: tuple[str, ...]) -> bool:
        """By the schema's own keywords, references and combinations aside."""
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds] if isinstance(kinds, str) else []
        if "enum" in schema or "const" in schema or any(kind not in ("object", "array") for kind in kinds):
            return True
        implied = kinds or [name for name in ("object", "array") if self._demands(schema, name)]
        # Without a type any other value will do, unless the engine reads one from the keywords.
        return not implied or any(self._members_hold(schema, kind, open_refs) for kind in implied)

    @staticmethod
    def _demands(schema: Mapping[str, Any], kind: str) -> bool:
        return "properties" in schema if kind == "object" else "items" in schema or "prefixItems" in schema

    def _members_hold(self, schema: Mapping[str, Any], kind: str, open_refs: tuple[str, ...]) -> bool:
        """Whether all members that an object or array must have can be finite."""
        if kind == "object":
            return self._object_holds(schema, open_refs)
        least = schema.get("minItems")
        least = least if isinstance(least, int) else 0
        first = schema.get("prefixItems")
        first = first[:least] if isinstance(first, list) else []
        return all(self.holds(one, open_refs) for one in first) and (
            least <= len(first) or self.holds(schema.get("items"), open_refs)
        )

    def _object_holds(self, schema: Mapping[str, Any], open_refs: tuple[str, ...]) -> bool:
        given = schema.get("required")
        names = dict.fromkeys(name for name in given if isinstance(name, str)) if isinstance(given, list) else {}
        if not all(self._property_holds(schema, name, open_refs) for name in names):
            return False
        least = schema.get("minProperties")
        # The engine refuses minProperties beside properties that are optional.
        if not isinstance(least, int) or len(names) >= least or _schemas(schema, "properties").keys() - names.keys():
            return True
        return any(self.holds(one, open_refs) for one in _further(schema))

    def _property_holds(self, schema: Mapping[str, Any], name: str, open_refs: tuple[str, ...]) -> bool:
        """Whether a property may have a finite value. Which patterns its name matches is not known: trying a user's
        pattern can take exponential time, in which Python runs no other thread."""
        named = _schemas(schema, "properties")
        if name in named:
            return self.holds(named[name], open_refs)
        return any(self.holds(one, open_refs) for one in _further(schema))

    def _resolved(self, ref: str, open_refs: tuple[str, ...]) -> bool:
        if ref in open_refs:
            return False
        if ref not in self._known:
            found = self._target(ref)
            known = found is None or self.holds(found, (*open_refs, ref))
            if known or not open_refs:  # a no under other references may hold only there
                self._known[ref] = known
            return known
        return self._known[ref]

    def _target(self, ref: str) -> Any:
        """What a reference into this schema names; None for another place, which the engine judges."""
        try:
            place, pointer = urldefrag(urljoin(self._id, ref))
            own = urldefrag(self._id).url
        except ValueError:  # no URL
            return None
        if place != own or (pointer and not pointer.startswith("/")):  # what is no pointer names an $anchor
            return None
        at = self._whole
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, Mapping) and key in at:
                at = at[key]
            elif isinstance(at, list) and key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < len(at):
                at = at[int(key)]
            else:
                return None
        return at


def _schemas(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    found = schema.get(keyword)
    return found if isinstance(found, Mapping) else {}


def _further(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of which a property that is not named has one or more."""
    patterns, other = _schemas(schema, "patternProperties"), schema.get("additionalProperties")
    yield from patterns.values()
    if other is not False or not patterns:  # what allows no property at all is left to the engine
        yield other
