"""Where the time of a learned draft goes, for methods of the EAGLE family.

    python benchmarks/draft_time.py questions.jsonl --method eagle3 --limit 8 --categories chat
    python benchmarks/draft_time.py questions.jsonl --param max_nodes=4 --batch 4 --temperature 0.8 --dtype bfloat16

Timers are put around the drafter's parts; each part's time is its own, without that of the parts inside it. Medians
over rounds, for a draft is now and then interrupted. Beside them: a round's other time, and a round of autoregressive
decoding.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import outpace
from outpace.api.requests import request
from outpace.cli.options import settings_by_method
from outpace.core.metrics import total
from outpace.drafting.dynamic_tree import DynamicTree
from outpace.drafting.mixed_tree import MixedTree
from outpace.engine.decoder import Decoder
from outpace.heads.committed_rows import CommittedRows
from outpace.heads.feature_drafter import FeatureDrafter
from outpace.methods.registry import find
from outpace.model import Model
from outpace.prompts.questions import load_prompts
from outpace.targets.dense.native_branches import NativeBranches

KERNELS = "the head's kernels"
PARTS: list[tuple[Any, str, str]] = [
    (FeatureDrafter, "propose_batch", "the rest of drafting"),
    (CommittedRows, "root", "rows of committed tokens"),
    (NativeBranches, "_run", KERNELS),
    (NativeBranches, "begin", "Python around the kernels"),
    (NativeBranches, "grow", "Python around the kernels"),
    (DynamicTree, "take_best", "choosing tokens"),
    (DynamicTree, "tree", "choosing tokens"),
    (MixedTree, "read", "choosing tokens"),
    (FeatureDrafter, "observe_batch", "hidden states of committed tokens"),
]


class Clock:
    """Time by part, exclusive; ``rounds``: each closed round's."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, timed as a part."""

        def timed(*arguments: Any, **more: Any) -> Any:
            if function.__name__ == "propose_batch":
                self._close()
            self._inner.append(0.0)
            began = perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                spent = perf_counter() - began
                self._now[part] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return timed

    def _close(self) -> None:
        if self._now:
            self.rounds.append(dict(self._now))
            self._now.clear()


@contextmanager
def timed_parts(clock: Clock) -> Iterator[None]:
    """Timers around the drafter's parts."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS]
    for owner, name, part in PARTS:
        setattr(owner, name, clock.around(getattr(owner, name), part))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def decoded(model: Model, method: Any, questions: list[str], length: int, batch: int, temperature: float) -> Any:
    """Metrics of all questions, ``batch`` at a time."""
    sampling = {"temperature": temperature, "seed": 0}
    found = []
    for first in range(0, len(questions), batch):
        decoder = Decoder(model.target, model.tokenizer)
        for question in questions[first : first + batch]:
            asked = request(model, question, method=method, max_new_tokens=length, ignore_eos=batch > 1, **sampling)
            found.append(decoder.submit(asked))
        decoder.run()
    return total([one.metrics for one in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="Spec-Bench questions, JSON lines or text")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="eagle3", help="eagle, eagle2 or eagle3")
    parser.add_argument("--head", type=Path, help="default: the one that comes with the package")
    parser.add_argument("--param", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--categories", default="", help="chat, qa, ...; default: all")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="questions that are answered together")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", help="of the target; default: that of its file")
    parser.add_argument("--least", action="store_true", help="the quickest tenth of the rounds instead of medians")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = outpace.load(arguments.model, dtype=arguments.dtype)
    wanted = {one for one in arguments.categories.split(",") if one}
    prompts = [one for one in load_prompts(arguments.prompts) if not wanted or one.category in wanted]
    questions = [one.turns[0] for one in prompts[: arguments.limit]]
    head = None if arguments.head is None else [arguments.head]
    settings = settings_by_method(arguments.param, {arguments.method: find(arguments.method).setting_names()})
    method = model.method(arguments.method, settings[arguments.method], head=head)
    batch, length, temperature = arguments.batch, arguments.max_new_tokens, arguments.temperature
    plain, clock = model.method("none"), Clock()
    for bundle in (plain, method):  # the first answers warm up
        decoded(model, bundle, questions[: 2 * batch], length, batch, temperature)
    alone = decoded(model, plain, questions, length, batch, temperature).figures()
    with timed_parts(clock):
        sums = decoded(model, method, questions, length, batch, temperature)
    figures, rounds = sums.figures(), clock.rounds
    print(f"{arguments.method}: {figures['mean_acceptance_length']:.2f} tokens a round, {len(rounds)} rounds\n")
    usual = (lambda values: sorted(values)[len(values) // 10]) if arguments.least else statistics.median
    print(f"| part | ms a round, {'quickest tenth' if arguments.least else 'median'} |")
    print("|---|---|")
    names = dict.fromkeys([KERNELS, *(part for _, _, part in PARTS)])
    for name in names:
        print(f"| {name} | {1e3 * usual([one.get(name, 0.0) for one in rounds]):.2f} |")
    whole = [sum(one.values()) for one in rounds]
    print(f"| all of drafting | {1e3 * usual(whole):.2f} |")
    pace = figures["mean_acceptance_length"] / figures["decode_tokens_per_second"]
    print(f"| a whole round, mean | {1e3 * pace:.2f} |")
    print(f"| a round of autoregressive decoding, mean | {1e3 / alone['decode_tokens_per_second']:.2f} |")


if __name__ == "__main__":
    main()
