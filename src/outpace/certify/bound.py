"""The bound level: does a rule keep its promise about the committed token? Every outcome, at small vocabularies.

Two enumerations, for the settings at the corners of what the rule takes. *Nodes*: one round of the rule alone, over
many target distributions and everything that a drafter may propose after the root; here a promise is reached if it
can be. *Outputs*: whole outputs of the method through the decoder; the distribution of the next token after every
beginning is compared with the target's. A promise that holds at every node holds there as well, because divergences
are convex. Settings that mean lossless are compared with autoregressive decoding. Rules that promise nothing are only
measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.lossy import LossyRule
from outpace.acceptance.registry import configured
from outpace.certify.certificate import BoundCheck, Certificate
from outpace.certify.distributions import (
    Output,
    OutputDistribution,
    autoregressive_distribution,
    distance,
    enumerated_distribution,
)
from outpace.certify.exact import PROMPTS, SAMPLING, TOLERANCE, Setting, requests
from outpace.certify.rule_findings import RuleFindings
from outpace.certify.rule_nodes import enumerate_nodes
from outpace.certify.toy_grammar import Brackets
from outpace.core.chance import NotEnumerable
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.engine.method import Method
from outpace.methods.registry import Context
from outpace.targets.base import TreeScores
from outpace.targets.table import Table, TableTarget, random_table

NODES = 12
UNTESTED = "no output differed: drafts and outputs are too short for what these settings allow"
NEAR = 0.5
"""Share of a limit from which on a node counts as near to it."""
MakeWith = Callable[[Context, AcceptanceRule], Method]
"""Builds the method under test with a rule, afresh, for a tiny target."""
_OUTCOMES = 5_000
"""Most outcomes of one enumeration; where there are more, shorter outputs are enumerated."""
MATRIX = {**SAMPLING, "greedy, grammar": SamplingParams(constraint=Brackets())}
"""What is decoded with: rules that change greedy answers must leave alone what is forbidden."""
_SHORTEST = 2
"""Tokens of an output before which something may be drafted."""


def corners_of(rule: AcceptanceRule) -> list[AcceptanceRule]:
    """The rule at the corners of its settings; those that were given stay as they are."""
    if not isinstance(rule, LossyRule) or not rule.corners:
        return [rule]
    given = {name: getattr(rule.settings, name) for name in rule.settings.model_fields_set}
    found: dict[str, AcceptanceRule] = {}
    for corner in rule.corners:
        one = configured(type(rule), {**corner, **given})
        found[one.described] = one
    return list(found.values())


def cells(corner: int, sampling: Mapping[str, SamplingParams] = SAMPLING, *, turn: int, turns: int) -> list[Setting]:
    """The settings in which whole outputs are enumerated for one corner: of the sampling parameters every ``turns``-th
    from ``turn`` on, and greedy ones always."""
    names = [name for name, params in sampling.items() if not params.greedy and not params.weighting.weighs]
    greedy = [name for name, params in sampling.items() if params.greedy]
    drawn = names[turn % turns :: turns] or names[:1]
    return [
        Setting(name, (3, 4, 3)[number % 3], 3, PROMPTS[(corner + number) % 2], "alone", 40 * corner + number)
        for number, name in enumerate(dict.fromkeys([*drawn, *greedy]))
    ]


def certify_bound(
    name: str,
    make: MakeWith,
    rule: AcceptanceRule,
    *,
    sampling: Mapping[str, SamplingParams] = MATRIX,
    most: int | None = None,
    nodes: int = NODES,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Certificate:
    """Test what ``rule`` promises, at the corners of its settings, alone and as the rule of the method.

    ``most``: enumerate whole outputs in so many settings for each corner; None: in all of :func:`cells`. ``nodes``: how
    many target distributions are enumerated for each corner and each kind of sampling.
    """
    corners = corners_of(rule)
    relaxing = [corner for corner in corners if not corner.exact]
    checks = []
    for number, corner in enumerate(corners):
        if on_progress is not None:
            on_progress(number, len(corners), corner.described)
        found = RuleFindings(corner)
        if corner.bound is not None:
            enumerate_nodes(found, sampling, nodes)
        # Together the corners that relax are enumerated with all sampling parameters.
        turn, turns = (number, 3) if corner.exact else (relaxing.index(corner), len(relaxing))
        for cell in cells(number, sampling, turn=turn, turns=turns)[:most]:
            _enumerate_outputs(found, make, cell, sampling[cell.sampling])
        if corner.bound is None and not corner.exact and found.total_variation <= TOLERANCE:
            found.notes.append(UNTESTED)
        checks.append(found.check())
    return _conclude(name, rule, checks)


# ---------------------------------------------------------------------------------------------------------- outputs


def _enumerate_outputs(found: RuleFindings, make: MakeWith, cell: Setting, params: SamplingParams) -> None:
    table = random_table(cell.vocab_size, cell.seed)
    batch = partial(requests, lambda context: make(context, found.rule), cell, params)
    try:
        outputs, drafted = enumerated_distribution(batch, _OUTCOMES)
    except NotEnumerable as reason:
        if cell.length > _SHORTEST:
            found.notes.append(f"{cell}: shortened by a token: {reason}")
            _enumerate_outputs(found, make, replace(cell, length=cell.length - 1), params)
        else:
            found.notes.append(f"{cell} was not enumerated: {reason}")
        return
    plain = autoregressive_distribution(table, cell.vocab_size, params, cell.prompt, cell.length)
    found.total_variation = max(found.total_variation, _variation(outputs, plain))
    if found.rule.exact and (error := distance(outputs, plain)) > TOLERANCE:
        found.fail(error, f"{cell}: settings that mean lossless, but output probabilities are off by {error:.2g}")
    if not drafted:
        found.notes.append(f"{cell}: nothing was drafted")
    elif not params.greedy or found.rule.greedy_only or not (found.rule.lossless or found.rule.keeps_greedy):
        found.outputs += 1  # else another rule decided, the greedy walk
    for start, h in _continuations(outputs, cell.vocab_size):
        found.see(_after(table, cell, params, start), h, f"{cell}, after {list(start)}")


def _variation(one: OutputDistribution, other: OutputDistribution) -> float:
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def _continuations(outputs: OutputDistribution, vocab_size: int) -> Iterator[tuple[Output, Tensor]]:
    """Every beginning of an output, and the distribution of the token after it."""
    found: dict[Output, Tensor] = defaultdict(lambda: torch.zeros(vocab_size, dtype=torch.float64))
    for output, weight in outputs.items():
        for length, token in enumerate(output):
            found[output[:length]][token] += weight
    for start, weights in found.items():
        if (total := float(weights.sum())) > 1e-4:  # rounding would show in what nearly never happens
            yield start, weights / total


def _after(table: Table, cell: Setting, params: SamplingParams, start: Output) -> TreeScores:
    """The target's scores after an output's beginning, without a draft."""
    target = TableTarget(cell.vocab_size, table)
    sequence = target.sequence(list(cell.prompt), params)
    sequence.sampler.extend(start)
    return TreeScores(sequence, TokenTree(), table((*cell.prompt, *start))[None], {})


# ------------------------------------------------------------------------------------------------------- conclusion


def _conclude(name: str, rule: AcceptanceRule, checks: list[BoundCheck]) -> Certificate:
    broken = [check for check in checks if check.holds is False]
    unbounded = [check for check in checks if check.holds is None]
    loose = [check for check in checks if check.holds and any(one < NEAR for one in check.nearest)]
    lossless = [check for check in checks if check.lossless]
    untested = [check.rule for check in checks if UNTESTED in check.note]
    unseen = [check.rule for check in checks if not check.outputs and "was not enumerated" in check.note]
    undrafted = [check.rule for check in checks if not check.outputs and "was not enumerated" not in check.note]
    nodes = sum(check.nodes for check in checks)
    if broken:
        verdict = f"the bound does not hold: {broken[0].rule}: {broken[0].where}"
    elif unbounded:
        most = max(check.total_variation for check in unbounded)
        verdict = (
            f"rule '{rule.name}' states no bound; whole outputs differ by up to {most:.3g} (total variation) from "
            "those of autoregressive decoding"
        )
    elif rule.bound is None:
        verdict = f"rule '{rule.name}' states no bound; with these settings it is lossless"
    else:
        verdict = f"the bound holds at {nodes:,} nodes, with {len(checks)} choices of settings"
    if not broken and lossless and not rule.lossless:
        verdict += f"; identical in distribution with {', '.join(check.rule for check in lossless)}"
    if not broken and untested:
        verdict += f"; not tested by outputs this short: {', '.join(untested)}"
    if not broken and unseen:
        verdict += f"; whole outputs could not be enumerated with {', '.join(unseen)}"
    if not broken and undrafted:
        verdict += f"; no draft was judged in whole outputs with {', '.join(undrafted)}"
    if not broken and loose:
        verdict += f"; never near its limit (below {NEAR:.0%} of it) with {', '.join(check.rule for check in loose)}"
    # Of outputs that could not be enumerated nothing is known; what is broken at a node is known all the same.
    unknown = rule.exact and (unseen or undrafted) and not broken
    certificate = Certificate(name, "bound", None if unknown else rule.exact and not broken, verdict)
    return replace(certificate, bounds=tuple(checks))
