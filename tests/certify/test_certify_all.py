"""The full certification: every lossless method in every setting of the matrix, every rule on every kind of tree.

Run by ``make certify-all``. ``make certify`` has every method and rule too, each in a part of its settings, another one
every day. Both are too long for ``make test``, which looks at a rotating slice.
"""

from __future__ import annotations

import os

import pytest
import torch

from certify_cases import Case, cases, hidden_choices
from outpace.certify.exact import Setting, cells_of, certify_exact, matrix, tiny_context
from outpace.engine.method import Method
from outpace.methods.registry import Context, build
from rotation import SEED

OUTCOMES = 4_000
"""Cells with more are sampled; those of chains and certain trees have fewer."""
ALPHA = 1e-4
"""Of one certificate: there are dozens of them, and a lossless method should pass all."""
PARTS = int(os.environ.get("OUTPACE_PARTS", "1"))
"""Of the settings of a case one in so many is looked at."""


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

    chosen = cells(case)[SEED % PARTS :: PARTS]
    certificate = certify_exact(case.name, make, chosen, samples=1500, alpha=ALPHA, outcomes=OUTCOMES)
    print(certificate.verdict)
    if PARTS > 1 and certificate.lossless is None:
        assert "drafted nothing" in certificate.verdict  # in none of these settings is there anything to draft
        return
    assert certificate.lossless, f"OUTPACE_SEED={SEED}, OUTPACE_PARTS={PARTS}: {certificate.verdict}"
    assert not hidden_choices(certificate)
