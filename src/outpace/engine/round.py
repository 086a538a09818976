"""The round, written once: draft, score, accept, commit, observe. Nothing here knows the name of a method.

One target forward scores the trees of all active requests, whatever their drafters, rules and sampling parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from time import perf_counter
from typing import TypeVar

from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.constraint import AnswerComplete
from outpace.core.metrics import PHASES, Timed
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.grammar_pruning import without_forbidden
from outpace.engine.certain_rows import mark_certain_rows
from outpace.engine.future_validity import look_ahead
from outpace.engine.populations.group_round import draft_groups, judge_groups
from outpace.engine.request import Generation, Logprob, RoundCount, RoundTrace
from outpace.engine.row_sharing import reusable_forward, share_rows
from outpace.engine.worth_drafting import asking_steps, by_clock, expected_steps, payoff_of
from outpace.targets.base import Scores, Target

K = TypeVar("K")
Item = TypeVar("Item")


def run_round(target: Target, active: Seq[Generation], groups: Seq[Generation] = ()) -> None:
    """One round over the active requests. One that cannot go on ends with its error; the others are unaffected.

    ``groups``: requests that own several sequences, which the same forward scores.
    """
    began = perf_counter()
    split: list[dict[str, float]] = [{} for _ in (*active, *groups)]
    measurements = target.costs.measurements
    payoff = None if groups else payoff_of(target, active)
    rests = payoff is not None and not payoff.drafts
    trees = [TokenTree() for _ in active] if rests else _draft(target, active, split)
    drafting = perf_counter() - began
    for one, tree in zip(active, trees, strict=True):
        if one.request.params.constraint is not None:
            mark_certain_rows(one, tree)
    expected = 1.0 if payoff is None else expected_steps(target, active, trees)
    asking = 0.0 if payoff is None or rests or payoff.clocked else asking_steps(target, active)
    others = draft_groups(groups, split[len(active) :]) if groups else []

    with Timed(split, "score"):
        layers = _layers_to_read(active, 0 if payoff is None else payoff.idle)
        batch = [*((one.sequence, tree) for one, tree in zip(active, trees, strict=True)), *others]
        reusable = None if groups else reusable_forward(active)
        scores = target.score(batch, layers, resume=reusable)
        looked_ahead = look_ahead(target, active, scores)

    judged = _accept(active, scores, split)
    verdicts = [_keep(one, verdict, target.context_length) for one, verdict in zip(active, judged, strict=True)]
    _commit(target, active, scores, verdicts)
    _observe(active, verdicts, split, rested=rests and not layers)
    _close_books(active, split, began)
    undisturbed = target.costs.measurements == measurements  # else most of the time was for measuring
    if payoff is not None:
        committed = sum(len(verdict.committed) for verdict in verdicts if verdict is not None) / len(active)
        joined = sum(one.metrics.rounds == 1 for one in active) / len(active)
        if not payoff.clocked:
            payoff.saw(committed, expected + asking, asking, joined, expected)
        elif undisturbed:
            payoff.saw(committed, target.lasted(perf_counter() - began, drafting), drafting, joined, expected)
    if groups:
        judge_groups(target, groups, scores, len(active), split[len(active) :], began)
    elif undisturbed and reusable is None and not looked_ahead and not any(tree.certain_rows for tree in trees):
        _compare_costs(target, active, trees, split, perf_counter() - began)


def _draft(target: Target, active: Seq[Generation], split: list[dict[str, float]]) -> list[TokenTree]:
    # Rows are shared out by the costs of all: where one answer must repeat, none goes by what rounds take.
    repeatable = not by_clock(active)
    budgets = [_budget(target, one, len(active), repeatable) for one in active]
    drafting = [index for index, budget in enumerate(budgets) if budget.depth > 0]
    trees: dict[int, TokenTree] = {}
    for drafter, members in grouped(drafting, lambda i: active[i].drafter):
        with Timed([split[i] for i in members], "draft"):
            proposed = drafter.propose_batch([active[i].draft_state for i in members], [budgets[i] for i in members])
        for index, tree in zip(members, proposed, strict=True):
            one = active[index]
            trees[index] = without_forbidden(one.drafter, one.draft_state, one.sequence, tree)
    return share_rows(active, budgets, [trees[at] if at in trees else TokenTree() for at in range(len(active))])


def _budget(target: Target, one: Generation, batch: int, repeatable: bool) -> Budget:
    # A path longer than the room left would be scored in vain; depth is fixed before any draw is made.
    room = min(one.request.max_new_tokens - len(one.tokens), target.context_length - len(one.sequence.tokens))
    return one.request.method.controller.budget(one.metrics, batch, repeatable).limited(room - 1)


def _layers_to_read(active: Seq[Generation], idle: int) -> list[int]:
    """The layers whose hidden states drafters, rules and caches of K/V read. ``idle``: see
    ``Drafter.observed_layers``."""
    found = {layer for one in active for layer in one.rule.aux_hidden_state_layers}
    found.update(layer for one in active if one.sequence.states is not None for layer in one.sequence.states.layers)
    for drafter, members in grouped(active, lambda one: one.drafter):
        if drafter.aux_hidden_state_layers:
            found.update(drafter.observed_layers([one.draft_state for one in members], idle))
    return sorted(found)


def _accept(active: Seq[Generation], scores: Scores, split: list[dict[str, float]]) -> list[Verdict]:
    verdicts: list[Verdict | None] = [None] * len(active)
    for rule, members in grouped(range(len(active)), lambda i: active[i].rule):
        with Timed([split[i] for i in members], "accept"):
            chances = [active[i].sequence.chance.at(len(active[i].sequence.tokens), "accept") for i in members]
            found = rule.accept([scores[i] for i in members], [active[i].rule_state for i in members], chances)
        for index, verdict in zip(members, found, strict=True):
            verdicts[index] = Verdict(verdict.path, verdict.token, scores[index])
    return [verdict for verdict in verdicts if verdict is not None]


def _keep(one: Generation, verdict: Verdict, context_length: int) -> Verdict | None:
    """Put the verdict's tokens out, up to where the answer ends; None where there are none.

    Where no token could follow, as a user's processor failed or banned all, the answer ends with that error.
    """
    scores, path = verdict.scores, verdict.path
    tokens = [*(scores.tree.tokens[node] for node in path), verdict.token]
    failures = ((at, why) for at, node in enumerate((ROOT, *path)) if (why := scores.failure(node)) is not None)
    drawn, failure = next(failures, (len(tokens), None))
    before = len(one.tokens)
    kept = one.take(tokens[:drawn], context_length)
    if one.request.sources:
        one.credit(tokens[: len(path)], len(one.tokens) - before)
    if isinstance(failure, AnswerComplete):
        one.finish("stop")  # unless it has ended before, like the others
    elif failure is not None:
        one.fail(failure)
    return Verdict(path, verdict.token, scores, tuple(kept)) if kept else None


def _commit(target: Target, active: Seq[Generation], scores: Scores, verdicts: Seq[Verdict | None]) -> None:
    paths = [None if v is None else v.path[: len(v.committed) - 1] for v in verdicts]
    target.commit(scores, paths + [None] * (len(scores) - len(paths)))
    for one, verdict in zip(active, verdicts, strict=True):
        if verdict is None:
            continue
        sequence, tree, kept = one.sequence, verdict.scores.tree, verdict.committed
        if sequence.states is not None:
            sequence.states.add_rows(verdict.scores.hidden_states, verdict.rows)
        sequence.tokens.extend(kept)
        depth = max(tree.depths) if tree.depths else 0
        accepted = min(len(verdict.path), len(kept))
        one.metrics.count_round(len(tree), accepted, len(kept), depth)
        if one.request.counts:
            one.round_counts.append(RoundCount(len(tree), accepted, len(kept), levels=depth))
        if one.request.trace:
            one.rounds.append(RoundTrace(tree, verdict.path, kept))
        if one.request.params.logprobs:
            _record_logprobs(one, verdict)
        sequence.sampler.extend(kept)  # last: the scores' distributions read the sampler as it was


def _record_logprobs(one: Generation, verdict: Verdict) -> None:
    params = one.request.params
    for node, token in zip((ROOT, *verdict.path), verdict.committed, strict=False):
        if token not in one.request.stop_ids:
            value, top = verdict.scores.distribution.logprobs(node, token, params.top_logprobs)
            one.logprobs.append(Logprob(token, value, tuple(top)))


def _observe(
    active: Seq[Generation], verdicts: Seq[Verdict | None], split: list[dict[str, float]], *, rested: bool
) -> None:
    judged = {index: verdict for index, verdict in enumerate(verdicts) if verdict is not None}
    for drafter, members in grouped(judged, lambda i: active[i].drafter):
        with Timed([split[i] for i in members], "draft"):
            tell = drafter.rested if rested else drafter.observe_batch
            tell([active[i].draft_state for i in members], [judged[i] for i in members])


def _close_books(active: Seq[Generation], split: list[dict[str, float]], began: float) -> None:
    now = perf_counter()
    for one, phases in zip(active, split, strict=False):
        phases["other"] = now - began - sum(phases.values())
        for phase in PHASES:
            one.metrics.phase_seconds[phase] += phases.get(phase, 0.0)
        if one.round_counts and not one.round_counts[-1].batch:  # that of this round
            last = one.round_counts[-1]
            last.batch, last.seconds, last.draft_seconds = len(active), now - began, phases.get("draft", 0.0)
        if one.tokens and not one.metrics.answered:
            one.metrics.answered = 1
            one.metrics.first_token_seconds, one.metrics.first_tokens = now - one.started, len(one.tokens)
        one.metrics.tokens = len(one.tokens)
        one.metrics.seconds = now - one.started


def _compare_costs(
    target: Target, active: Seq[Generation], trees: Seq[TokenTree], split: Seq[dict[str, float]], seconds: float
) -> None:
    """Tell the target's costs what a round has taken in truth, its draft aside."""
    if len({id(one.drafter) for one in active}) == 1:  # of several drafters' times the sum is not known
        rows = sum(1 + len(tree) + len(tree.auxiliary_tokens) for tree in trees)
        context = sum(len(one.sequence.tokens) for one in active) // len(active)
        greedy = all(one.request.params.greedy for one in active)
        took = seconds - max(phases.get("draft", 0.0) for phases in split[: len(active)])  # not all may have drafted
        target.costs.took(rows, context, took, greedy=greedy, batch=len(active))


def grouped(items: Iterable[Item], key: Callable[[Item], K]) -> list[tuple[K, list[Item]]]:
    """Items by equal key (identity for parts, which do not define equality), in order of first appearance."""
    groups: dict[K, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())
