"""Tokens a second of training eagle3, by setting: each is trained for a pass over the same data, in turns.

    python benchmarks/training_speed.py DATA [--model smollm2] [--threads 2] [--repeats 3] [--settings NAME,...]
    python benchmarks/training_speed.py DATA --graphs

DATA: a folder of conversations (``outpace train --data DATA``). A pass includes reading the batches, not evaluation and
saving. ``--graphs`` counts instead what torch.compile makes of the losses: graphs for each batch, and why it breaks
them; the graphs are not run faster.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import outpace
from outpace.heads import checkpoint
from outpace.heads.base import Batch, Head, Teacher, teacher_of
from outpace.heads.kinds import find_kind, plan
from outpace.model import Model
from outpace.models.placement import training_dtype
from outpace.training.dataset import Conversations, Dataset
from outpace.training.on_policy import with_on_policy
from outpace.training.schedule import Schedule
from outpace.training.shards import Conversation, Shards
from outpace.training.trainer import Trainer

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "prefetch": {"prefetch": 2},
    "accumulate": {"accumulate": 4},
    "padded": {"pack": False},
    "recomputed states": {"recomputed": True},
    "unrolled twice": {"options": {"steps": 2}},
    "half of the later rows": {"options": {"later_rows": 0.5}},
    "replay": {"options": {"replay": 0.25}},
}


class TextAlone:
    """The conversations of a folder, without their hidden states."""

    def __init__(self, shards: Conversations) -> None:
        self._shards = shards

    @property
    def paths(self) -> list[Path]:
        return self._shards.paths

    def read(self, path: Path, layers: Any = (), wanted: Any = lambda _: True) -> Iterator[Conversation]:
        return self._shards.read(path, (), wanted)


def parts(model: Model, shards: Shards, setting: dict[str, Any]) -> tuple[Head, Teacher, Dataset]:
    """A new head, and what it learns from."""
    config = plan(
        find_kind("eagle3"),
        checkpoint.facts(model.target, model.name),
        size="base",
        vocabulary=8192,
        options=setting.get("options", {}),
    )
    layers = sorted({*config.aux_hidden_state_layers, model.target.num_layers})
    source: Conversations = TextAlone(shards) if setting.get("recomputed") else shards
    prefetch, pack = setting.get("prefetch", 0), setting.get("pack", True)
    data = Dataset(source, layers, pack=pack, prefetch=prefetch, target=model.target)
    words = data.words(config.vocabulary, model.target.vocab_size, sorted(model.eos_ids))
    head = checkpoint.new_head(config, model.target, words, 0)
    teacher = teacher_of(model.target, head, torch.device("cpu"))
    head.initialise(model.target, teacher)
    return head, teacher, data


def speed(model: Model, shards: Shards, setting: dict[str, Any]) -> float:
    """Answer tokens a second over one pass."""
    head, teacher, data = parts(model, shards, setting)
    learned_from = with_on_policy(data, head, teacher, model.target, model.eos_ids)
    schedule = Schedule(evaluate_every=float("inf"), save_every=float("inf"), accumulate=setting.get("accumulate", 1))
    with tempfile.TemporaryDirectory() as folder:
        progress = Trainer(head, teacher, learned_from, Path(folder), schedule, torch.device("cpu")).run()
    return progress.tokens / progress.seconds


def graphs(model: Model, shards: Shards, batches: int = 4) -> None:
    """Print what torch.compile makes of the losses."""
    from torch._dynamo.utils import counters

    head, teacher, data = parts(model, shards, {})
    head.to(training_dtype(torch.device("cpu"))).train()
    made: list[int] = []

    def backend(module: Any, _: object) -> Any:
        made.append(len(module.graph.nodes))
        return module.forward

    compiled = torch.compile(head.losses, backend=backend, dynamic=True)
    for number, batch in zip(range(batches), data.train(0), strict=False):
        before = len(made)
        found: dict[str, Tensor] = compiled(_on_cpu(batch), teacher)
        torch.autograd.backward(found["loss"])
        print(f"batch {number}: {len(made) - before} new graphs of {sorted(made[before:])} operations")
    for reason, count in counters["graph_break"].items():
        print(f"{count} breaks: {str(reason).splitlines()[0]}")


def _on_cpu(batch: Batch) -> Batch:
    return batch.to(torch.device("cpu"), training_dtype(torch.device("cpu")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--graphs", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, shards = outpace.load(options.model), Shards(options.data, {})
    if options.graphs:
        graphs(model, shards)
        return
    names = options.settings.split(",")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            found[name].append(speed(model, shards, SETTINGS[name]))
    for name, speeds in found.items():
        print(f"{name}: {statistics.median(speeds):.0f} tokens/s ({min(speeds):.0f} to {max(speeds):.0f})")


if __name__ == "__main__":
    main()
