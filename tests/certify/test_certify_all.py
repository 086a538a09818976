"""The full certification: every lossless method in every setting of the matrix, every rule on every kind of tree.

Run by ``make certify-all``; too long for ``make test``, which looks at a rotating slice.
"""

from __future__ import annotations

import pytest
import torch

from certify_cases import Case, cases, hidden_choices
from outpace.certify.exact import Setting, cells_of, certify_exact, matrix, tiny_context
from outpace.engine.method import Method
from outpace.methods.registry import Context, build

OUTCOMES = 4_000
"""Cells with more are sampled; those of chains and certain trees have fewer."""
ALPHA = 1e-4
"""Of one certificate: there are dozens of them, and a lossless method should pass all."""


def cells(case: Case) -> list[Setting]:
    """All of its cells; of those with the most outcomes one of each size, where only the rule is another."""
    if case.rule is None:
        return cells_of(build(case.name, tiny_context(3, 0), case.settings))
    chosen, sizes = [], set[tuple[int, int]]()
    for cell in matrix():
        size = (cell.vocab_size, cell.length)
        if size in ((3, 3), (5, 2)) or size not in sizes:
            chosen.append(cell)
        sizes.add(size)
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.label) for case in cases()])
def test_lossless_in_every_setting(case: Case) -> None:
    torch.set_num_threads(1)  # toy targets are too small to share

    def make(context: Context) -> Method:
        return build(case.name, context, case.settings, case.rule)

    certificate = certify_exact(case.name, make, cells(case), samples=1500, alpha=ALPHA, outcomes=OUTCOMES)
    print(certificate.verdict)
    assert certificate.lossless, certificate.verdict
    assert not hidden_choices(certificate)
