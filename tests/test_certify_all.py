"""The full certification: every lossless method, under every rule that takes it, in every setting of the matrix.

Run by ``make certify-all``; too long for ``make test``, which looks at a rotating slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outpace.certify.exact import Setting, certify_exact, matrix, tiny_context
from outpace.errors import BadInput
from outpace.method import Context, Method, build, methods, rules

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "draft-model": [{"confidence": 0.4}, {"width": 2, "nodes": 4}],
    "rsd": [{"branching": (1, 1), "beam": 2}],
    "sampled-tree": [{"draws": "greedy"}],
    "pld": [{"length": 1}],
}
"""Settings beside the registered tiny ones that change what is drafted or how."""


def cells(name: str) -> list[Setting]:
    """The whole matrix; of the cells whose outcomes run into the hundred thousands for sampled trees, one."""
    large = [cell for cell in matrix() if (cell.vocab_size, cell.length) == (4, 3)]
    left_out = large[1:] if name in ("rsd", "sampled-tree") else []
    return [cell for cell in matrix() if cell not in left_out]


def cases() -> Iterator[Any]:
    # Other tests define rules too, wrong ones among them, and a subclass is a registered rule.
    ours = [kind for kind in rules().values() if kind.__module__.startswith("outpace.")]
    names = sorted({kind.name for kind in ours if kind.lossless and not kind.greedy_only})
    for info in methods():
        if not info.lossless:
            continue
        for variant in ({}, *VARIANTS.get(info.name, ())):
            settings = {**info.tiny, **variant}
            for rule in names:
                try:
                    build(info.name, tiny_context(3, 0), settings, rule)
                except BadInput:
                    continue  # refused when built, as the tests of rules show
                label = "-".join([info.name, rule, *map(str, variant)])
                yield pytest.param(info.name, settings, rule, id=label)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "rule"), list(cases()))
def test_lossless_in_every_setting(name: str, settings: dict[str, Any], rule: str) -> None:
    torch.set_num_threads(1)  # toy targets are too small to share

    def make(context: Context) -> Method:
        return build(name, context, settings, rule)

    certificate = certify_exact(name, make, cells(name), samples=1500)
    print(certificate.verdict)
    assert certificate.lossless, certificate.verdict
