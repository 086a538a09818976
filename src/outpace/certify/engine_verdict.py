"""The verdict on a server: what refuses the certificate, what leaves it open, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace.certify.certificate import Check, Rescored
from outpace.certify.engine_greedy import GreedyResult


@dataclass(frozen=True, slots=True)
class Evidence:
    """The results of all tests. ``adjusted``: p-value of the ``tests`` sampled ones together; None without any.
    ``bias``: the smallest bias, in total variation, that all of them would have seen."""

    greedy: GreedyResult | None
    sampled: Sequence[Check]
    rescored: Rescored | None
    structured: Check
    adjusted: float | None
    tests: int
    bias: float | None


def conclude(found: Evidence, doubts: Sequence[str], drafted: int | None) -> tuple[bool | None, bool, str]:
    """Whether the server is lossless (None: not known), whether the tests were inconclusive, and why in words.

    ``doubts``: what speaks against the tests themselves, or what none of them covered. ``drafted``: how many tokens the
    server drafted meanwhile; None where it does not count them.
    """
    refused = _reasons(found)
    if refused:
        return False, False, "not lossless: " + "; ".join(refused)
    if doubts:
        return None, True, "inconclusive: " + "; ".join(doubts)
    parts = [str(found.greedy)] if found.greedy else []
    if found.adjusted is not None:
        size = "" if found.bias is None else f" above {found.bias:.2g} (total variation)"
        parts.append(f"no bias{size} in {found.tests} tests, adjusted p = {found.adjusted:.2g}")
    parts += [str(found.rescored)] if found.rescored is not None else []
    verdict = "; ".join(parts)
    if drafted == 0:
        return None, False, f"no test found a difference, but the server drafted nothing; {verdict}"
    return True, False, verdict


def _reasons(found: Evidence) -> list[str]:
    """What refuses the certificate, in words."""
    reasons = []
    if found.greedy is not None and found.greedy.wrong:
        reasons.append(f"{found.greedy.wrong} of {len(found.greedy.checks)} greedy answers differ beyond a near tie")
    failed = [one for one in found.sampled if one.passed is False]
    if failed:
        worst = min(failed, key=lambda one: one.p_value or 0.0)
        reasons.append(
            f"{len(failed)} of {len(found.sampled)} sampled tests reject, most '{worst.name}', "
            f"adjusted p = {found.adjusted:.2g}"
        )
    if found.rescored is not None and not found.rescored.passed:
        reasons.append(str(found.rescored))
    if found.structured.passed is False:
        reasons.append(f"structured outputs: {found.structured.note}")
    return reasons
