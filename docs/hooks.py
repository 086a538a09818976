"""Tables of the documentation, generated from the registry when it is built: they cannot go stale."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.registry import all_rules, public, rules
from outpace.controllers.registry import controllers
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.heads.kinds import kinds
from outpace.heads.layouts.registry import layouts
from outpace.methods.registry import drafting_with
from outpace.simulate.hardware import PRESETS
from outpace.simulate.model_shape import SHAPES

KINDS = {
    "chain, certain": Proposal(),
    "chain, sampled": Proposal(sampled=True),
    "tree, certain": Proposal(tree=True),
    "tree, with replacement": Proposal(tree=True, sampled=True),
    "tree, without": Proposal(tree=True, sampled=True, replacement=False),
    "tree, one sampled": Proposal(tree=True, sampled=True, one_sampled_sibling=True),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    tables = {
        "rules": rules_table,
        "lossy rules": lossy_table,
        "heads": heads_table,
        "layouts": layouts_table,
        "controllers": controllers_table,
        "controller settings": controller_settings,
        "hardware": hardware_table,
        "model shapes": shapes_list,
    }
    for name, table in tables.items():
        if (mark := f"<!-- table: {name} -->") in markdown:
            markdown = markdown.replace(mark, table())
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs calls this for every page. A figure and its interval stay on one line of their cell."""
    return re.sub(r"<td>([\d.,]+x? [\[(][\d., x]+[\])])</td>", r'<td class="figure">\1</td>', html)


def rules_table() -> str:
    """Every acceptance rule, and the trees that it takes."""
    rows = [f"| rule | paper | {' | '.join(KINDS)} |", "|---|---|" + "---|" * len(KINDS)]
    for rule in {kind.name: kind() for kind in rules().values()}.values():
        takes = " | ".join("✓" if _takes(rule, proposal) else "" for proposal in KINDS.values())
        rows.append(f"| `{rule.name}` | {rule.paper} | {takes} |")
    return "\n".join(rows)


def lossy_table() -> str:
    """Every lossy rule: what it does, what it promises, and its settings with their defaults."""
    rows = [
        "| rule | what it does | bound at a node | at temperature 0 | settings (`--rule-param`) |",
        "|---|---|---|---|---|",
    ]
    for entry in (public(rule) for rule in all_rules() if not rule.lossless):
        names = ", ".join([f"`{entry['name']}`", *entry["aliases"]])
        settings = "; ".join(f"`{one['name']}={one['default']}` {one['description']}" for one in entry["settings"])
        bound = entry["bound"]
        promise = "none" if bound is None else f"{bound['measure']} ≤ {bound['limit']}"
        greedy = "no bound" if bound is None else bound["at_temperature_0"]
        greedy = "greedy decoding" if greedy == "0" else greedy
        rows.append(f"| {names} | {entry['summary']} {entry['paper']}. | {promise} | {greedy} | {settings} |")
    return "\n".join(rows)


def controllers_table() -> str:
    """Every controller that a user may name, what it does, and which methods it fits."""
    rows = ["| controller | what it does | fits | paper |", "|---|---|---|---|"]
    for kind in controllers():
        names = f"`{kind.name}`" + "".join(f", `{alias}`" for alias in kind.aliases)
        rows.append(f"| {names} | {kind.summary} | {kind.fits} | {kind.paper} |")
    return "\n".join(rows)


def controller_settings() -> str:
    """Every setting of every controller, with its default."""
    rows = ["| controller | `--controller-param` | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{kind.name}` | `{key}` | `{field.get_default(call_default_factory=True)}` | {field.description or ''} |"
        for kind in controllers()
        for key, field in kind.Settings.model_fields.items()
    ]
    return "\n".join(rows)


def heads_table() -> str:
    """Every kind of head, the methods that draft with it, and its own settings with their defaults."""
    rows = ["| head | methods | paper | settings (`outpace train --param`) |", "|---|---|---|---|"]
    for name, head in kinds().items():
        users = ", ".join(f"`{method}`" for method in drafting_with(name))
        settings = "; ".join(
            f"`{key}={field.get_default()}` {field.description or ''}".strip()
            for key, field in head.Options.model_fields.items()
        )
        rows.append(f"| `{name}` | {users} | {head.paper} | {settings} |")
    return "\n".join(rows)


def layouts_table() -> str:
    """Every layout of other engines, and the kinds of heads that it is read and written for."""
    rows = ["| layout | heads | |", "|---|---|---|"]
    rows += [
        f"| `{name}` | {', '.join(f'`{one.kind}`' for one in same)} | {'' if same[0].writes else 'read only'} |"
        for name, same in ((name, list(group)) for name, group in groupby(layouts(), key=lambda one: one.name))
    ]
    return "\n".join(rows)


def _takes(rule: AcceptanceRule, proposal: Proposal) -> bool:
    try:
        rule.check("tree", proposal)
    except BadInput:
        return False
    return True


def hardware_table() -> str:
    """The presets of `outpace simulate`, with their sources."""
    lines = ["| name | kind | 16-bit TFLOPS | GB/s | GB | watts | figures from |", "|---|---|---|---|---|---|---|"]
    for one in PRESETS.values():
        watts = "not stated" if one.watts is None else f"{one.watts:g}"
        figures = f"{one.peak / 1e12:g} | {one.bandwidth / 1e9:g} | {one.memory / 1e9:g} | {watts}"
        lines.append(f"| `{one.name}` | {one.kind} | {figures} | <{one.source}>: {one.note} |")
    return "\n".join(lines)


def shapes_list() -> str:
    """The names of the models whose sizes are known."""
    return ", ".join(f"`{name}`" for name in SHAPES)
