"""A round of groups, beside the ordinary requests of the same forward."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter

from outpace.core.errors import OutpaceError
from outpace.core.metrics import PHASES, Timed
from outpace.core.tree import TokenTree
from outpace.engine.populations.base import GroupVerdict, Hypothesis
from outpace.engine.request import Generation
from outpace.targets.base import Scores, Sequence, Target


def draft_groups(groups: Seq[Generation], split: Seq[dict[str, float]]) -> list[tuple[Sequence, TokenTree]]:
    """The trees of all groups, group by group. One whose drafter fails ends with its error."""
    batch: list[tuple[Sequence, TokenTree]] = []
    for one, phases in zip(groups, split, strict=True):
        assert one.group is not None
        with Timed([phases], "draft"):
            try:
                batch += one.group.propose()
            except OutpaceError as error:
                one.fail(error)
                batch += one.group.undrafted()
    return batch


def judge_groups(
    target: Target, groups: Seq[Generation], scores: Scores, first: int, split: Seq[dict[str, float]], began: float
) -> None:
    """Decide about every group and keep the K/V of its heirs. Their trees are the parts of ``scores`` from ``first``
    on; what cannot go on ends with its error."""
    for one, phases in zip(groups, split, strict=True):
        group = one.group
        assert group is not None
        count = len(group.members)
        verdict: GroupVerdict | None = None
        if one.error is None:
            with Timed([phases], "accept"):
                try:
                    verdict = group.judge(scores, first)
                except OutpaceError as error:
                    one.fail(error)
        if verdict is not None:
            nodes, depth = group.drafted
            group.take(target, verdict, scores, first)
            one.metrics.count_round(nodes, verdict.layers, verdict.tokens, depth)
            if verdict.ended is not None:
                _put_out(one, verdict.ended[0])
        first += count
        _close_books(one, phases, began)


def _put_out(one: Generation, answer: Hypothesis) -> None:
    """The answer of a group, which is known at its end."""
    one.sequence.tokens.extend(answer.tokens)
    for token in answer.tokens:
        if token in one.request.stop_ids:
            break
        one.tokens.append(token)
        one.release(token)
    one.finish(answer.finish_reason)


def _close_books(one: Generation, phases: dict[str, float], began: float) -> None:
    now, metrics = perf_counter(), one.metrics
    phases["other"] = now - began - sum(phases.values())
    for phase in PHASES:
        metrics.phase_seconds[phase] += phases.get(phase, 0.0)
    if not metrics.answered:  # every sequence of the group has its first token now
        metrics.answered, metrics.first_tokens, metrics.first_token_seconds = 1, 1, now - one.started
    metrics.tokens = len(one.tokens)
    metrics.seconds = now - one.started
