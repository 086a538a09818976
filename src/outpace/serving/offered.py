"""Models that a server offers, and the methods that were built for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.registry import find_rule
from outpace.constraints.grammar import DEFAULT_LIMITS, GrammarLimits
from outpace.core.errors import BadInput
from outpace.core.future_validity import MAX_VALIDITY_NODES
from outpace.core.lru import Lru
from outpace.core.turns import ROUNDS
from outpace.engine.method import Method
from outpace.engine.shared_decoder import SharedDecoder
from outpace.engine.warm_up import warm_up
from outpace.methods.default_method import DEFAULT_METHOD
from outpace.methods.registry import MethodInfo, build, find, methods
from outpace.model import Model
from outpace.serving.errors import ApiError
from outpace.serving.schemas import Speculation

MOST_METHODS = 32
"""Methods that a model keeps beside the server's own; the least recently used leave first."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """How methods draft where a request does not say. ``named``: draft models, heads and a datastore, loaded.

    ``lossless``: requests that ask for a lossy rule are refused.
    """

    method: str = DEFAULT_METHOD
    settings: Mapping[str, Any] = field(default_factory=dict)
    rule: str | None = None
    lossless: bool = False
    named: Mapping[str, Any] = field(default_factory=dict)
    grammar_limits: GrammarLimits = DEFAULT_LIMITS
    time_limit: float | None = None
    max_validity_nodes: int = MAX_VALIDITY_NODES


class Offered:
    """One model, and the methods that were built for it: each once for a name, its settings and a rule."""

    def __init__(self, model: Model, defaults: Defaults) -> None:
        self.model = model
        self._defaults = defaults
        with ROUNDS:
            self._context = model.context(**defaults.named)
            self._own = build(defaults.method, self._context, defaults.settings, defaults.rule)
        rule = self._own.rule
        if not rule.exact:
            raise BadInput(f"rule {rule.described} is lossy and never the default of a server; let requests choose it")
        self._built: Lru[Any, Method] = Lru(MOST_METHODS)
        self._building = Lock()
        self.preparing: Counter[str] = Counter()
        """Calls for it that are being prepared, by tenant; on the event loop alone."""

    @property
    def id(self) -> str:
        """The name that was given for it."""
        return self.model.name

    @property
    def decoder(self) -> SharedDecoder:
        """The decoder that all its requests share."""
        return self.model.shared

    def warm_up(self) -> None:
        """Measure what the server's own method measures when it is first used."""
        warm_up(self.model.target, self._own, self.decoder.limits.max_batch)

    @property
    def default_method(self) -> str:
        """The method of requests that name none."""
        return self._own.name

    @cached_property
    def methods(self) -> list[str]:
        """Methods that have what they need: the draft models, heads and datastore that were named or are shipped.

        Without those that are lossy by themselves where the server answers losslessly only.
        """
        return [info.name for info in self._choices]

    @cached_property
    def lossy_methods(self) -> list[str]:
        """Those of :attr:`methods` that are lossy by themselves, without a rule that a request names."""
        return [info.name for info in self._choices if not info.lossless]

    @cached_property
    def _choices(self) -> list[MethodInfo]:
        strict = self._defaults.lossless
        return [info for info in methods() if self._supplied(info) and (info.lossless or not strict)]

    def _supplied(self, info: MethodInfo) -> bool:
        given = {"datastore": self._context.has_datastore, "reference": False, "gate": False}
        return all(given.get(need, True) for need in info.needs) and all(map(self._context.bindings.find, info.kinds))

    def method(self, wish: Speculation | None, *, beams: bool = False) -> Method:
        """The method of one request; for ``beams`` that names none, autoregressive decoding, as most methods draft for
        one sequence. Raises ApiError for one that cannot be built; may measure the target."""
        if beams and (wish is None or wish.method is None):
            if wish is not None and (wish.params or wish.rule is not None or wish.rule_params):
                raise ApiError(
                    "beams draft nothing where no method is named, so there is nothing to set; leave out the settings "
                    "in 'speculation', or name one of the methods that decode beams",
                    param="speculation",
                )
            return self._own if self._own.population is not None else self._remembered("none", {}, None)
        if wish is None:
            return self._own
        if wish.off:
            if wish.method is not None or wish.params or wish.rule is not None or wish.rule_params:
                raise ApiError("'speculation.off' and a method contradict each other", param="speculation")
            return self._remembered("none", {}, None)
        if wish.method is None and not wish.params and wish.rule is None and not wish.rule_params:
            return self._own
        name = self._defaults.method if wish.method is None else wish.method
        try:
            info = find(name)
            same = info is find(self._defaults.method)
            _check_files(name, wish.params)
            settings = {**(self._defaults.settings if same else {}), **wish.params}
            found = self._remembered(name, settings, self._rule(wish, info))
            self._check_rule(found.rule)
            self._check_departure(found)
        except BadInput as error:
            raise ApiError(str(error), param="speculation", code="invalid_value") from error
        return found

    def _rule(self, wish: Speculation, method: MethodInfo) -> AcceptanceRule | None:
        """The rule that a request names, else the server's, which is none of those for groups. Raises BadInput."""
        own = None if method.family == "population" else self._defaults.rule
        name = own if wish.rule is None else wish.rule
        if name is None:
            if wish.rule_params:
                raise BadInput("'speculation.rule_params' are settings of a rule; name it in 'speculation.rule'")
            return None
        rule = find_rule(name, wish.rule_params)
        self._check_rule(rule)
        return rule

    def _check_rule(self, rule: AcceptanceRule) -> None:
        """Raise BadInput for a lossy rule, however it was named, where the server answers losslessly only."""
        if self._defaults.lossless and not rule.exact:
            raise BadInput(f"rule '{rule.name}' is lossy, and this server answers losslessly only; leave it out")

    def _check_departure(self, method: Method) -> None:
        """Raise BadInput for a method that is lossy whatever its rule, where the server answers losslessly only."""
        if self._defaults.lossless and method.departs:
            raise BadInput(
                f"method '{method.name}' is lossy ({method.departs}), and this server answers losslessly only"
            )

    def _remembered(self, name: str, settings: Mapping[str, Any], rule: AcceptanceRule | None) -> Method:
        key = (name, repr(sorted(settings.items())), None if rule is None else rule.described)
        with self._building:
            known = self._built.get(key)
            if known is None:
                with ROUNDS:
                    known = build(name, self._context, settings, rule)
                self._built.put(key, known)
        return known


def _check_files(method: str, params: Mapping[str, Any]) -> None:
    """Raise BadInput for a setting that names a file of the server: a client must not choose which are read."""
    fields = find(method).settings.model_fields
    for name in params:
        extra = fields[name].json_schema_extra if name in fields else None
        if isinstance(extra, dict) and extra.get("file"):
            raise BadInput(
                f"method '{method}', setting '{name}': it names a folder of the server, which requests do not choose"
            )
