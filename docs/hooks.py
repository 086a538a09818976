"""Tables of the documentation, generated from the registry when it is built: they cannot go stale."""

from __future__ import annotations

from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.drafters.base import Proposal
from outpace.errors import BadInput
from outpace.method import methods, rules

KINDS = {
    "chain, certain": Proposal(),
    "chain, sampled": Proposal(sampled=True),
    "tree, certain": Proposal(tree=True),
    "tree, with replacement": Proposal(tree=True, sampled=True),
    "tree, without": Proposal(tree=True, sampled=True, replacement=False),
    "tree, one sampled": Proposal(tree=True, sampled=True, single=True),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this for every page."""
    return markdown.replace("<!-- table: methods -->", methods_table()).replace("<!-- table: rules -->", rules_table())


def methods_table() -> str:
    """Every registered method."""
    rows = ["| method | family | lossless | paper | what it does | when it pays |", "|---|---|---|---|---|---|"]
    rows += [
        f"| `{info.name}` | {info.family} | {'yes' if info.lossless else 'no'} | {info.paper} | {info.summary} "
        f"| {info.pays} |"
        for info in methods()
    ]
    return "\n".join(rows)


def rules_table() -> str:
    """Every acceptance rule, and the trees that it takes."""
    rows = [f"| rule | paper | {' | '.join(KINDS)} |", "|---|---|" + "---|" * len(KINDS)]
    for rule in {kind.name: kind() for kind in rules().values()}.values():
        takes = " | ".join("✓" if _takes(rule, proposal) else "" for proposal in KINDS.values())
        rows.append(f"| `{rule.name}` | {rule.paper} | {takes} |")
    return "\n".join(rows)


def _takes(rule: AcceptanceRule, proposal: Proposal) -> bool:
    try:
        rule.check("tree", proposal)
    except BadInput:
        return False
    return True
