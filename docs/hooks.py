"""Tables of the documentation, generated from the registry when it is built: they cannot go stale."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.registry import rules
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.heads.kinds import kinds
from outpace.heads.layouts.registry import layouts
from outpace.methods.registry import drafting_with

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
    tables = {"rules": rules_table, "heads": heads_table, "layouts": layouts_table}
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
