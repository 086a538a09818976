"""The registry of acceptance rules: every module of this package is imported, every named rule is found."""

from __future__ import annotations

from outpace.acceptance.base import AcceptanceRule
from outpace.core.names import normalised, unknown
from outpace.core.plugins import import_all


def rules() -> dict[str, type[AcceptanceRule]]:
    """Every acceptance rule by name and by alias."""
    import_all("outpace.acceptance")
    found: dict[str, type[AcceptanceRule]] = {}
    pending = list(AcceptanceRule.__subclasses__())
    while pending:
        rule = pending.pop()
        pending.extend(rule.__subclasses__())
        if "name" in rule.__dict__:
            found[rule.name] = rule
            found.update(dict.fromkeys(rule.aliases, rule))
    return dict(sorted(found.items()))


def find_rule(name: str) -> AcceptanceRule:
    """The rule of this name or alias; case, '-' and '_' do not matter. Raises BadInput with the nearest names."""
    known = rules()
    for one, rule in known.items():
        if normalised(one) == normalised(name):
            return rule()
    raise unknown("acceptance rule", name, list(known))
