"""A training from prompts to a head on disk.

head = outpace.train(outpace.load("smollm2"), "eagle3", "heads/eagle3", tokens=100_000)
outpace.generate(model, "Why is the sky blue?", method=head.method, head=head.folder)
"""

from __future__ import annotations

import inspect
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.core.errors import BadInput
from outpace.core.names import normalised
from outpace.heads import checkpoint
from outpace.heads.base import parameters
from outpace.heads.head_config import TargetFacts
from outpace.heads.kinds import find_kind, kinds, plan
from outpace.methods.named_weights import DraftModels
from outpace.methods.registry import drafting_with, methods
from outpace.model import Model
from outpace.prompts.given_passages import GivenPassages
from outpace.prompts.overlap import Overlap
from outpace.prompts.questions import bench_texts
from outpace.prompts.sources import source
from outpace.training.collection import TOKENS, collected_for, opened_for
from outpace.training.data import layers_of_all_kinds
from outpace.training.data_config import BatchConfig, DataConfig
from outpace.training.gates.job import TAKES, check_taken, train_gate
from outpace.training.gates.registry import GateTraining, find_gate
from outpace.training.job_checks import (
    check_amounts,
    check_drafter,
    check_folder,
    check_lengths,
    check_shares,
    check_sources,
)
from outpace.training.memory import ran_out
from outpace.training.processes import started_together, take_own_gpu
from outpace.training.run import Run, train_to_the_end, written
from outpace.training.run_state import check_same_run, seconds_spent
from outpace.training.starting_head import SIZE, begun_from, planned
from outpace.training.state_server import is_address
from outpace.training.time_plan import TimePlan
from outpace.training.training_progress import Report, TrainingProgress
from outpace.training.trial import try_head

VOCABULARY = 8192
"""Tokens that a head can draft, by default: reading the LM head is most of a draft's cost."""
_STAND_IN = TargetFacts(name="", hidden_size=64, vocab_size=64, num_layers=1000, fingerprint=[])
"""For a check of the settings before the model is loaded."""


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A head or a gate on disk. ``method``: one that drafts with it; ``provenance``: what its ``training.json`` says.

    Of a head, ``provenance["trial"]["gains"]``: whether the target accepts enough of what it drafts to be worth using.
    """

    kind: str
    method: str
    folder: Path
    provenance: dict[str, Any]


def train(
    model: Model | Callable[[], Model],
    kind: str,
    output: str | Path,
    *,
    prompts: Sequence[str | Path] | None = None,
    tokens: int | None = None,
    self_written: float | None = None,
    passages: float = 0.2,
    texts: Sequence[str | Path] | None = None,
    turns: int = 2,
    prompt_tokens: int = 1536,
    answer_tokens: int = 512,
    exclude: Sequence[str | Path] | None = None,
    data: str | Path | None = None,
    states: str | Path | None = None,
    cache_bytes: float | None = None,
    state_bits: int = 16,
    max_minutes: float | None = None,
    epochs: float | None = None,
    resume: bool = False,
    init: str | Path | None = None,
    rate: float | None = None,
    size: str | None = None,
    vocabulary: int | None = None,
    rank: int = 0,
    row_tokens: int = BatchConfig.row_tokens,
    batch_tokens: int = BatchConfig.batch_tokens,
    pack: bool = BatchConfig.pack,
    evaluate_tokens: int = BatchConfig.evaluate_tokens,
    accumulate: int = BatchConfig.accumulate,
    prefetch: int = BatchConfig.prefetch,
    shard: bool = BatchConfig.shard,
    draft_model: DraftModels | Callable[[], DraftModels] = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    on_progress: Report = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> TrainedHead:
    """Train a head that drafts for a model, on the model's own answers to prompts; or a gate.

    ``model``: or what loads it, called after everything else has been checked. ``kind``: of head, or a method that
    drafts with one. ``output``: the folder to write. ``prompts``: files of JSON lines or data sets of the hub; what
    they lack the model writes itself. ``tokens``: of answers to train on; None takes a million, or with ``max_minutes``
    as many as there is time for. ``self_written``: share of prompts that the model writes; ``passages``: share of
    prompts about passages, those of the files ``texts`` or the model's own longer answers. ``turns``: of a
    conversation, at most; ``prompt_tokens``: of one prompt with the turns before it; ``answer_tokens``: of one answer.
    ``exclude``: files of prompts to keep out of the data. ``data``: the folder of conversations, "data" in ``output``
    by default. ``states``: a folder of conversations and hidden states that another engine wrote, in place of all that
    (:mod:`outpace.training.given_states`), or the address of a vLLM server that answers and gives the states
    (:mod:`outpace.training.state_server`). ``cache_bytes``: disk for hidden states, ``state_bits`` (16 or 8) of their
    numbers. ``max_minutes``: of data and training together, over all runs; what was trained until then is the head.
    ``epochs``: passes over the data; None is one, or where ``max_minutes`` decides the amount of data as many as there
    is time for. ``init``: a head to begin from, its folder or the kind of a shipped one, whose sizes, draft vocabulary
    and settings are kept where none are given, and whose weights remain the head until others have a lower held-out
    loss. ``rate``: largest learning rate of matrices, by default the kind's own (0.02); the others follow it.
    ``size``: tiny, small, base or large; None is base, or that of ``init``. ``vocabulary``: tokens that the head can
    draft, 0 for all; None takes 8,192, or all with ``rank``, that of a low-rank LM head. ``row_tokens``,
    ``batch_tokens``, ``pack``, ``evaluate_tokens``, ``accumulate``, ``prefetch``, ``shard``: as
    :class:`~outpace.training.data_config.BatchConfig` has them. ``draft_model``: of a gate
    (:mod:`outpace.training.gates.kinds`), or what loads it; None: the shipped one. ``options``: the kind's own
    settings. ``on_progress`` is called all along and may raise KeyboardInterrupt. ``clock``: seconds.

    A KeyboardInterrupt, from Ctrl-C as well, keeps data and run and is raised again; ``resume=True`` goes on. Raises
    BadInput for options out of range, files that cannot be read, a folder that holds something else, and memory or disk
    that ran out.
    """
    if (gate := find_gate(kind)) is not None:
        return _trained_gate(gate, {name: value for name, value in locals().items() if name in _PARAMETERS})
    check_drafter(draft_model)
    head_kind, method = kind_and_method(kind)
    folder, settings = Path(output), dict(options or {})
    if vocabulary is None and init is None:
        vocabulary = 0 if rank else VOCABULARY
    check_amounts(tokens, rank, vocabulary, max_minutes, epochs, cache_bytes, rate)
    plan(find_kind(head_kind), _STAND_IN, size=size or SIZE, rank=rank, options=settings)
    check_shares(self_written, passages, bool(prompts), bool(texts))
    collecting = _changed(
        tokens=tokens,
        prompts=prompts,
        self_written=self_written,
        passages=passages,
        texts=texts,
        turns=turns,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        exclude=exclude,
    )
    caching = _changed(cache_bytes=cache_bytes, state_bits=state_bits)
    check_sources(states, data, state_bits, _flags(collecting), _flags(caching))
    check_lengths(turns, prompt_tokens, answer_tokens)
    batches = BatchConfig(row_tokens, batch_tokens, pack, evaluate_tokens, accumulate, prefetch, shard)
    batches.check()
    check_folder(folder, resume)
    spent = seconds_spent(folder) if resume else 0.0
    bound = TimePlan(math.inf if max_minutes is None else 60.0 * max_minutes, clock, spent)
    wanted = DataConfig(
        tokens=TOKENS if tokens is None else tokens,
        sources=[source(str(one), seed) for one in prompts or ()],
        self_written=self_written,
        passages=passages,
        texts=GivenPassages([Path(one) for one in texts], seed) if texts else None,
        most=answer_tokens,
        longest=prompt_tokens,
        turns=turns,
        state_bits=state_bits,
        cache_bytes=None if cache_bytes is None else int(cache_bytes),
        seed=seed,
        plan=bound,
    )
    excluded = Overlap(bench_texts([Path(one) for one in exclude or ()]))
    passes = epochs or (math.inf if tokens is None and bound.bounded else 1.0)

    take_own_gpu()
    start, model = begun_from(init, head_kind, model)
    if resume:
        check_same_run(folder, seed=seed, began="" if start is None else start.weights)
    processes = started_together(str(model.info.get("device", "cpu")))
    facts = checkpoint.facts(model.target, model.name)
    config = planned(start, head_kind, facts, size=size, vocabulary=vocabulary, rank=rank, options=settings)
    layers = sorted({*config.aux_hidden_state_layers, *layers_of_all_kinds(model.target)})
    where = folder / "data" if data is None else Path(data)
    shards, server = opened_for(model, layers, config, processes, where, states)
    run = Run(model, config, shards, folder, bound, passes, seed, batches, processes, server, start, rate)
    collected = collected_for(run, shards, wanted, excluded, tokens, on_progress)
    try:
        trainer = run.trainer(resume=resume)
        train_to_the_end(trainer, folder, on_progress if processes.first else lambda _: None)
        if not processes.first:
            processes.wait()  # for the head
            return TrainedHead(head_kind, method, folder, checkpoint.read_provenance(folder) or {})
        on_progress(TrainingProgress("evaluation", 0, 1, "held-out conversations"))
        trial = try_head(model, trainer.head, method, run.shards)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise BadInput(
            "memory ran out in training; the saved state is kept: free some memory, or give a smaller --size, and "
            "continue with --resume"
        ) from error
    command = _command(
        head_kind,
        {
            "model": Path(model.name).name,
            "tokens": tokens,
            "prompts": [one.name for one in wanted.sources],
            "self-written": self_written,
            "states": str(states) if is_address(states) else states and Path(states).name,
            "passages": passages,
            "texts": [Path(one).name for one in texts or ()],
            **_changed(
                turns=turns,
                prompt_tokens=prompt_tokens,
                answer_tokens=answer_tokens,
                state_bits=state_bits,
                row_tokens=row_tokens,
                batch_tokens=batch_tokens,
                evaluate_tokens=evaluate_tokens,
                accumulate=accumulate,
                prefetch=prefetch,
            ),
            **({} if pack else {"no-pack": ""}),
            **({"shard": ""} if shard else {}),
            "max-minutes": max_minutes,
            "epochs": epochs,
            "from": None if init is None else Path(init).name,
            "rate": rate,
            "size": size,
            "vocabulary": vocabulary,
            "rank": rank or None,
            "param": [f"{key}={value}" for key, value in settings.items()],
            "seed": seed,
        },
    )
    about = {"command": command, "data": collected.public(), "seed": seed, "parameters": parameters(trainer.head)}
    about |= {"trial": trial.public()} | ({} if start is None else {"from": start.public()})
    made = written(trainer, folder, about)
    processes.wait()
    return TrainedHead(head_kind, method, folder, made)


def kind_and_method(named: str) -> tuple[str, str]:
    """The kind of head that was named, itself or by a method that drafts with it; and a method to use it with."""
    kind = next((one for one in kinds() if normalised(one) == normalised(named)), None)
    if kind is None:
        for info in methods():
            if info.head is not None and normalised(named) in map(normalised, (info.name, *info.aliases)):
                return info.head, info.name
        kind = named
    return kind, (drafting_with(kind) or [kind])[0]


def _command(kind: str, flags: Mapping[str, Any]) -> str:
    """The command that trains such a head; None leaves a flag out, a list repeats it, "" gives it no value."""
    words = ["outpace", "train", kind]
    for flag, value in flags.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            words.append(f"--{flag}")
            if one != "":
                words.append(f"{one:g}" if isinstance(one, float) else str(one))
    return shlex.join(words)


def _changed(**given: Any) -> dict[str, Any]:
    """The flags among parameters of :func:`train` that are not as they are by default."""
    return {name.replace("_", "-"): value for name, value in given.items() if value != _PARAMETERS[name].default}


def _flags(given: Mapping[str, Any]) -> list[str]:
    return [f"--{name}" for name, value in given.items() if value]


_PARAMETERS = inspect.signature(train).parameters
_OF_ALL = ("model", "kind", "output", "draft_model", "options", "seed", "on_progress", "clock")
"""Parameters that the training of heads and of gates have in common."""


def _trained_gate(kind: GateTraining, given: Mapping[str, Any]) -> TrainedHead:
    """The training of a gate. Raises BadInput for parameters that only heads have."""
    rest = {name: value for name, value in given.items() if name not in _OF_ALL}
    check_taken(kind.name, _changed(**rest))
    folder = Path(given["output"])
    about = train_gate(
        given["model"],
        kind,
        folder,
        draft_model=given["draft_model"],
        options=given["options"] or {},
        seed=given["seed"],
        report=given["on_progress"],
        clock=given["clock"],
        **{name: rest[name] for name in TAKES},
    )
    return TrainedHead(kind.name, kind.name, folder, about)
