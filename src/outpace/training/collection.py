"""The data of one training: as many tokens as were asked for, or as many as there is time for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from outpace.heads.head_config import HeadConfig
from outpace.model import Model
from outpace.prompts.overlap import Overlap
from outpace.training.data import Collected, Collector, open_folder
from outpace.training.data_config import DataConfig
from outpace.training.given_states import GivenStates, opened
from outpace.training.processes import Processes
from outpace.training.run import Run
from outpace.training.run_state import write_seconds_spent
from outpace.training.shards import Shards
from outpace.training.state_server import StateServer, is_address, opened_server
from outpace.training.time_plan import TimePlan, TrainingSpeed
from outpace.training.training_progress import Report, TrainingProgress

TOKENS = 1_000_000
"""Tokens of answers, where neither they nor a time are given."""
_APART = 30.0
"""Seconds between two notes of the time that has been spent."""


def collect(
    collector: Collector,
    shards: Shards,
    tokens: int | None,
    plan: TimePlan,
    speed: Callable[[], TrainingSpeed],
    report: Report,
) -> Collected:
    """Collect ``tokens`` of answers; None: as the plan has time for, else ``TOKENS``. Never longer than the plan says.

    ``speed`` measures how fast a head learns from what there is. After Ctrl-C what is on disk is kept, and the same
    call goes on.
    """
    try:
        if tokens is None and plan.bounded:
            collected = _as_time_allows(collector, plan, speed, report)
        else:
            collected = _until(collector, TOKENS if tokens is None else tokens, report)
    except KeyboardInterrupt:
        kept = shards.answer_tokens()
        report(TrainingProgress("stopped", kept, TOKENS if tokens is None else tokens, str(shards.folder), "tokens"))
        raise
    removed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(collected.removed.items()))
    found = f"{collected.tokens:,} tokens of {collected.prompts:,} answers in {shards.folder}"
    found += f"; prompts left out: {removed}" if removed else ""
    if tokens is not None and collected.tokens < tokens and plan.data_over():
        found += f"; --max-minutes ended it before {tokens:,} tokens"
    report(TrainingProgress("collected", collected.tokens, collected.tokens, found))
    return collected


def opened_for(
    model: Model,
    layers: Sequence[int],
    config: HeadConfig,
    processes: Processes,
    where: Path,
    states: str | Path | None,
) -> tuple[Shards | GivenStates, StateServer | None]:
    """The conversations to learn from: given in the folder ``states``, or collected in ``where``.

    And the server at ``states``, where that is an address. ``layers``: those that a new folder keeps.
    """
    server = None
    if states is not None and is_address(states):
        server = opened_server(str(states), config.aux_hidden_state_layers, model.target)
    elif states is not None:
        return opened(Path(states), config.aux_hidden_state_layers, model.target), None
    if not processes.first:
        processes.wait()  # for the data
    return open_folder(where, model.target, model.name, layers), server


def collected_for(
    run: Run, shards: Shards | GivenStates, wanted: DataConfig, excluded: Overlap, tokens: int | None, report: Report
) -> Collected:
    """What there is to learn from, once the first of several processes has collected it."""
    if isinstance(shards, GivenStates):
        return shards.collected()
    found = Collected()
    if run.processes.first:
        if run.server is not None:  # states are asked for when they are needed, and not kept
            room = run.server.context_length
            wanted = replace(wanted, answering=run.server.answered, cache_bytes=0, room=room)
        collector = Collector(run.model, shards, wanted, excluded)
        found = collect(collector, shards, tokens, run.bound, run.speed, _Noting(run, report))
        run.processes.wait()
    return found


class _Noting:
    """Notes on the way how much time has been spent, which a run that is killed would otherwise have once more."""

    def __init__(self, run: Run, report: Report) -> None:
        self._run, self._report = run, report
        self._noted = -math.inf

    def __call__(self, now: TrainingProgress) -> None:
        bound = self._run.bound
        if now.stage in ("stopped", "collected") or bound.clock() - self._noted > _APART:
            self._noted = bound.clock()
            write_seconds_spent(self._run.folder, bound.spent)
        self._report(now)


def _until(collector: Collector, tokens: int, report: Report) -> Collected:
    def watch(now: Collected) -> None:
        report(TrainingProgress("data", now.tokens, tokens, now.doing, "tokens"))

    return collector.run(watch, tokens)


def _as_time_allows(
    collector: Collector, plan: TimePlan, speed: Callable[[], TrainingSpeed], report: Report
) -> Collected:
    """A short start measures how fast prompts are answered and how fast a head learns; the plan follows from both."""
    state, rate = collector.state, 0.0

    def more(tokens: int) -> bool:
        """Collect up to so many tokens, and measure how fast; False when there were no more to be had."""
        nonlocal rate
        before, began = state.tokens, plan.clock()
        _until(collector, tokens, report)
        rate = (state.tokens - before) / max(plan.clock() - began, 1e-9) or rate
        return state.tokens > before

    if not state.tokens:
        more(1)  # the smallest block
    if not plan.left:
        return state
    training = speed()
    plan.divide(state.tokens, rate, training)
    expected = plan.prediction(state.tokens, state.prompts, rate, training)
    report(TrainingProgress("plan", state.tokens, state.tokens, expected))
    going = True
    while going and not plan.data_over():
        # By the speed so far; larger blocks are faster, so that there may be time for another.
        going = more(state.tokens + max(1, round(plan.data_left * rate)))
    return state
