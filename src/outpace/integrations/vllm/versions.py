"""Which versions of vLLM outpace works with."""

from __future__ import annotations

import re

from outpace.core.errors import BadInput

LEAST, BELOW = (0, 32), (0, 33)
"""What was tested. vLLM declares the interface of ``custom_class`` experimental, so no later version is assumed."""
REQUIREMENT = f"vllm>={LEAST[0]}.{LEAST[1]},<{BELOW[0]}.{BELOW[1]}"


def supported(version: str) -> bool:
    """Whether a version, such as ``0.32.0+cpu``, is one that was tested."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and LEAST <= (int(found[1]), int(found[2])) < BELOW


def check_version(version: str, where: str) -> None:
    """Raise BadInput for a version that was not tested; ``where``: the interpreter that has it."""
    if not supported(version):
        raise BadInput(f"{where} has vLLM {version}; outpace supports {REQUIREMENT}: install one of these")
