"""How well does ``auto`` choose? Its rounds on known answers, at times that are stated and not measured.

    python benchmarks/auto_replay.py --prompts PROMPTS.jsonl --limit 96

The model answers the prompts once. Then each method decodes the known answers again, one request at a time, in an order
that mixes the tasks, with its real drafts and decisions (:mod:`outpace.engine.replay`). Times are made up, of forwards
by rows, of a learned draft, of what a head reads of a prompt, as ``--machine`` states them; only the sizes of a head's
trees follow what its levels take here. So two versions of ``auto`` are compared nearly without noise, in a minute, on
any machine. With ``--temperature`` the model answers in truth, as what is accepted then depends on what is drawn; times
are as stated all the same. Printed for each method: tokens per stated time beside autoregressive decoding, the
geometric mean of the tasks and each task; and in how many rounds the learned part drafted.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import outpace
from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.drafting.base import Drafter
from outpace.engine.known_answers import close_answers
from outpace.engine.method import Method
from outpace.engine.replay import replay
from outpace.engine.request import Request
from outpace.engine.round_records import UNCOUNTED, RoundRecord, record_rounds
from outpace.methods.combination.auto_drafter import Auto
from outpace.methods.combination.auto_state import AutoState
from outpace.methods.registry import build
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts
from outpace.targets.cost_protocol import Costs, Scorer
from scripts import answered, exit_status

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_READ = 1024
_SETTLED = 9
"""Times after which a clock is sure."""


@dataclass(frozen=True)
class Machine:
    """Milliseconds: of a forward over each of ``_ROWS`` rows after a short text, of each row per 1,024 tokens of text,
    of a round beside forward and draft, of a learned draft, of what a round takes longer after one, and of reading
    1,024 tokens."""

    forward: tuple[float, ...]
    attention: float
    overhead: float
    draft: float
    after: float
    reading: float


MACHINES = {
    "rows-cost": Machine((4.1, 4.9, 5.9, 8.4, 13.0, 23.0, 41.0), 0.3, 0.1, 1.1, 0.1, 24.0),
    "rows-cheap": Machine((4.5, 4.7, 5.2, 7.4, 13.0, 24.0, 46.0), 0.3, 0.4, 1.1, 0.15, 25.0),
    "rows-fast": Machine((2.7, 2.9, 3.3, 3.4, 5.7, 9.5, 19.1), 0.2, 0.1, 0.85, 0.1, 12.0),
    "rows-tiles": Machine((15.6, 15.8, 16.1, 16.8, 19.0, 28.0, 47.0), 0.3, 0.35, 1.9, 0.1, 25.0),
}
"""SmolLM2 with its shipped head on two cores: in int4 of an Intel Emerald Rapids, of an AMD Zen 4 and a Zen 5; and in
bfloat16 on the matrix tiles of the first, whose times over 2, 4, 8 and 32 rows lie between those that were
measured."""


class Stated(Costs):
    """The costs of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.overhead = machine.overhead / 1e3

    def seconds(self, rows: int, context: int = 0) -> float:
        known = self.machine.forward
        at = max(0, min(rows - 1, _ROWS[-1]).bit_length() - 1)
        low, high = _ROWS[at], _ROWS[min(at + 1, len(_ROWS) - 1)]
        share = (rows - low) / (high - low) if high > low else 0.0
        flat = known[at] + share * (known[min(at + 1, len(known) - 1)] - known[at])
        return (flat + rows * self.machine.attention * context / 1024) / 1e3

    def draft(self, read: Read) -> float:
        """Seconds of a learned draft, with what is read first and what it does to its round."""
        machine = self.machine
        return 0.0 if read is None else (machine.draft + machine.after + machine.reading * read / _READ) / 1e3

    def once(self, name: str, measure: Callable[[], float]) -> float:
        return self.machine.draft / 1e3

    def beside(self, model: Scorer, name: str) -> Costs:
        return self


Decode = Callable[[Method], Sequence[RoundRecord]]
"""All prompts, one at a time, with a method."""
Read = int | None
"""Tokens of a text that a learned part has read in a round before its draft; None where it was not asked."""


def watched(drafter: Drafter[Any], machine: Machine, *, sampled: bool) -> list[Read]:
    """What ``auto`` asks of its learned part in each round to come. Its clock shows the machine's times."""
    found: list[Read] = []
    if not isinstance(drafter, Auto):
        return found
    shared = drafter.times.shared(sampled)
    clock, after = shared.clock, shared.after
    step = machine.forward[0] + machine.overhead
    for _ in range(_SETTLED):
        after.saw(step + machine.after, step)
        clock.read(1, machine.draft / 1e3)
        clock.read_text(_READ, machine.reading / 1e3)
    # Where the model runs in truth, neither follows its clock.
    drafter.times.took = lambda *_, **__: None  # type: ignore[method-assign]
    drafter._compare = lambda *_, **__: None  # type: ignore[method-assign]
    ask, observe = drafter.ask, drafter.observe_batch
    read: list[Read] = [None]

    def asked(index: int, states: Sequence[AutoState], budgets: Sequence[Budget]) -> list[TokenTree]:
        if index == 1:
            read[0] = sum(state.unread for state in states)
        return ask(index, states, budgets)

    def observed(states: Sequence[AutoState], verdicts: Sequence[Verdict]) -> None:
        found.append(read[0])
        read[0] = None
        observe(states, verdicts)

    drafter.ask, drafter.observe_batch = asked, observed  # type: ignore[method-assign]
    return found


def alone(drafter: Drafter[Any], rounds: Sequence[RoundRecord]) -> list[Read]:
    """The same of a method that drafts with a head in every round, or with none."""
    if not drafter.aux_hidden_state_layers:
        return [None] * len(rounds)
    before = [UNCOUNTED, *(one.requests[0] for one in rounds)]
    most = drafter.recent_tokens or sys.maxsize
    return [
        min(one.contexts[0], most) if one.requests[0] != last else 0 for one, last in zip(rounds, before, strict=False)
    ]


def rates(method: Method, costs: Stated, decode: Decode, count: int, *, sampled: bool) -> tuple[list[float], float]:
    """Of each of ``count`` answers, tokens per second over those of autoregressive decoding; and the share of rounds
    with drafts of the learned part."""
    drafts = watched(method.drafter, costs.machine, sampled=sampled)
    rounds = decode(method)
    if not isinstance(method.drafter, Auto):
        drafts = alone(method.drafter, rounds)
    spent, plain = [0.0] * count, [0.0] * count
    for one, read in zip(rounds, drafts, strict=True):
        number, context = one.requests[0], one.contexts[0]
        spent[number] += costs.seconds(sum(one.rows), context) + costs.overhead + costs.draft(read)
        plain[number] += one.committed[0] * (costs.seconds(1, context) + costs.overhead)
    asked = sum(read is not None for read in drafts)
    return [before / after for before, after in zip(plain, spent, strict=True)], asked / len(rounds)


def sampled_requests(
    model: outpace.Model, prompts: Sequence[Prompt], method: Method, options: argparse.Namespace
) -> Iterator[Request]:
    """As a server has them: each with a seed of its own, and free to depend on what others have shown."""
    for number, one in enumerate(prompts):
        params = SamplingParams(temperature=options.temperature, seed=number)
        text = tuple(model.tokenizer.chat(one.messages))
        yield Request(text, method, params, options.tokens, model.eos_ids, repeats=False)


def compare(options: argparse.Namespace) -> None:
    """Print a line for each method."""
    model = outpace.load(options.model)
    prompts = load_prompts(options.prompts)
    random.Random(1).shuffle(prompts)
    prompts = prompts[: options.limit]
    costs, names = Stated(MACHINES[options.machine]), options.methods.split(",")
    layers = {layer for name in names for layer in build(name, model.context()).drafter.aux_hidden_state_layers}
    sampled = options.temperature > 0
    answers = [] if sampled else answered(model, prompts, options.tokens, layers, model.eos_ids)
    model.target.__dict__["costs"] = costs

    def decode(method: Method) -> Sequence[RoundRecord]:
        if not sampled:
            return replay(model.target, answers, method)
        return record_rounds(model.target, list(sampled_requests(model, prompts, method, options)))

    try:
        for name in names:
            found, drafted = rates(build(name, model.context()), costs, decode, len(prompts), sampled=sampled)
            tasks = defaultdict(list)
            for one, rate in zip(prompts, found, strict=True):
                tasks[one.category].append(rate)
            means = {task: geometric_mean(each) for task, each in sorted(tasks.items())}
            line = "  ".join(f"{task} {mean:.2f}" for task, mean in means.items())
            print(f"{name:<8}{geometric_mean(means.values()):>7.3f}{drafted:>7.0%}  {line}", flush=True)
    finally:
        close_answers(model.target, answers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--methods", default="auto,sam,eagle3", help="auto, methods that copy, and ones that draft with a head"
    )
    parser.add_argument("--limit", type=int, default=96, help="prompts, in an order that mixes their tasks")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 the model runs in truth")
    parser.add_argument("--machine", choices=MACHINES, default="rows-cost")
    options = parser.parse_args(argv)
    return exit_status(lambda: compare(options))


if __name__ == "__main__":
    sys.exit(main())
