"""The runner: every method on every prompt, interleaved, on one target.

For each prompt the methods run in slices of a tenth of a second (:mod:`outpace.bench.slices`), in an order that is
shuffled each time, so that a machine that grows slower or faster during the run favours none of them. A batch size of N
takes several times N prompts of one category instead of one prompt, and answers N of them at once. Autoregressive
decoding (method ``none``) always runs. What methods learn is kept from prompt to prompt only in a namespace.

Conversations: at temperature 0 a lossless method continues its own earlier answers, which are those of autoregressive
decoding but for near ties. At temperature > 0, and for lossy methods, later turns continue the answers of
autoregressive decoding, so that contexts are the same. A turn that has no room left in the context is left out for
every method, and counted.

A prompt of which a method's answer ends in an error of its own, because its grammar came to a dead end for one, does
not count for that method, and has no further turns; the other prompts and methods go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from outpace.bench.columns import method_row, prompt_rows
from outpace.bench.method_records import MethodRecords, labelled
from outpace.bench.quality.measured_nodes import MeasuredNodes
from outpace.bench.quality.prompt_quality import PromptQuality, QualityMeter
from outpace.bench.quality.quality_row import quality_row
from outpace.bench.records import Answer, AnswerBatch, Record, answer_together, first_difference
from outpace.bench.results import plain_figures
from outpace.bench.settings import BenchSettings, Progress
from outpace.bench.slices import in_slices
from outpace.bench.statistics import total_rate
from outpace.bench.turn_contexts import characters, check_room, context, contexts
from outpace.certify.near_ties import near_tie_gap
from outpace.constraints.compiler import compiled
from outpace.controllers.oracle import Oracle
from outpace.core import machine
from outpace.core.constraint import Constraint
from outpace.core.errors import BadInput, said
from outpace.core.future_validity import MASKED, NO_GRAMMAR, ConstraintWeighting
from outpace.core.sampling import SamplingParams
from outpace.core.version import __version__
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.engine.warm_up import measure_drafts
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import batches, unique

Asked = Mapping[MethodRecords, Mapping[Prompt, tuple[int, ...]]]
"""The tokens that the prompts begin with, for each method."""

_SAMPLE_CHARACTERS = 1500
_TELLING = 0.5
"""Seconds from one report of progress to the next, at least."""
_ATTEMPTS = 3
"""How often prompts are answered until no costs are measured meanwhile."""
_REFILLS = 2
"""How many times the places of a batch are filled before the next method's turn: fewer make more turns, which the
intervals are taken over, and more of the time goes to requests that only keep places."""


def run(
    model: Model,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Run all methods and return the JSON object; :func:`outpace.bench.benchmark.bench` is the function for users.

    Ctrl-C ends the run early, with ``complete`` false and whole prompts only. A method that fails gets its ``error``,
    and the others go on. Raises BadInput for prompts or methods that do not fit the context or the parameters.
    """
    work = _Run(model, methods, prompts, settings, on_progress)
    try:
        work.go()
    except KeyboardInterrupt:
        return work.result(complete=False)
    return work.result(complete=True)


class _Run:
    def __init__(
        self,
        model: Model,
        methods: Sequence[Method],
        prompts: Sequence[Prompt],
        settings: BenchSettings,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        if not prompts:
            raise BadInput("the bench needs at least one prompt")
        self.model, self.settings, self.on_progress = model, settings, on_progress
        self.params = settings.params
        self.methods = labelled(model, methods, settings.extra.get("method_settings", {}))
        for entry in self.methods:
            entry.method.rule_for(self.params)
        self.reference = self.methods[0]
        self.prompts = unique(prompts)
        self.numbers = {prompt.id: number for number, prompt in enumerate(self.prompts)}
        self.constraints: dict[str, Constraint] = {}
        for prompt in self.prompts:
            check_room(model, prompt)
            grammar = prompt.grammar or settings.grammar
            if grammar is not None:
                self.constraints[prompt.id] = compiled(grammar, model.tokenizer, settings.grammar_limits)
        if not self.constraints and ConstraintWeighting.read(self.params.constraint_weighting).weighs:
            raise BadInput(NO_GRAMMAR)
        under = partial(self._under, params=settings.params)
        self.meter = QualityMeter(model, settings.params, under) if settings.quality else None
        size = settings.batch_size
        self.batches = batches(self.prompts, size if size == 1 else size * _REFILLS)
        self.references = tuple(tuple(model.tokenizer.encode(text)) for text in settings.references)
        self.done, self.total = 0, len(self.methods) * sum(max(len(one.turns) for one in each) for each in self.batches)
        self.skipped_turns = 0
        self.samples: dict[str, dict[str, Any]] = {}

    def go(self) -> None:
        self._warm_up()
        for number, batch in enumerate(self.batches):
            self._run_batch(number, batch)
        self._tell("", "")

    def _warm_up(self) -> None:
        """Short answers of every method, not counted: first calls compile, allocate and page in.

        To a prompt of each range of lengths: costs are measured once for each range of context lengths, which takes
        longer than an answer. So is what drafts take for each size of batch.
        """
        tokens = min(self.settings.warmup_tokens, self.settings.max_new_tokens)
        if tokens < 1:
            return
        # In no namespace: nothing of it must be known when the first prompt comes.
        short = replace(self.settings, namespace="", max_new_tokens=tokens)
        first = [batch[: self.settings.batch_size] for batch in self.batches]
        ranges = {characters(batch).bit_length(): batch for batch in reversed(first)}
        for entry in self.methods:
            self._tell(entry.label, "warm-up")
            try:  # a batch shrinks as its answers end, and what drafts for fewer requests take is asked for then
                measure_drafts(
                    self.model.target, entry.method, self.settings.batch_size, sampled=not self.params.greedy
                )
            except Exception as error:
                entry.error = said(error)
            for _, batch in sorted(ranges.items()):
                self._undisturbed([entry], {entry: {one: context(self.model, one, []) for one in batch}}, 0, short)

    def _run_batch(self, number: int, batch: Sequence[Prompt]) -> None:
        found = {entry.label: {one.id: Record(one.id, one.category, number) for one in batch} for entry in self.methods}
        live = list(batch)
        for turn in range(max(len(prompt.turns) for prompt in batch)):
            active = [entry for entry in self.methods if entry.error is None]
            begun = {entry.label: self._contexts(entry, live, found, turn) for entry in active}
            due = [prompt for prompt in live if turn < len(prompt.turns)]
            live = [prompt for prompt in due if all(prompt in begun[entry.label] for entry in active)]
            self.skipped_turns += sum(len(prompt.turns) - turn for prompt in due if prompt not in live)
            random.Random(f"{self.params.fixed_seed}/{number}/{turn}").shuffle(active)
            self._tell(active[0].label if active else "", batch[0].category)
            if live:
                asked = {entry: {prompt: begun[entry.label][prompt] for prompt in live} for entry in active}
                told = perf_counter()

                def tell(entry: MethodRecords) -> None:
                    nonlocal told
                    if perf_counter() - told > _TELLING:
                        self._tell(entry.label, batch[0].category)
                        told = perf_counter()

                for entry, (answers, peak) in self._undisturbed(active, asked, turn, self.settings, tell).items():
                    for prompt, answer in zip(live, answers, strict=False):
                        if answer.error is not None:
                            entry.failed[prompt.id] = answer.error
                        record = found[entry.label][prompt.id]
                        record.answers.append(answer)
                        record.peak_memory_mb = max(record.peak_memory_mb, peak)
            self.done += len(active)
            live = [prompt for prompt in live if not any(prompt.id in entry.failed for entry in self.methods)]
        self._keep(batch, {entry.label: entry.answered(found[entry.label]) for entry in self.methods})

    def _keep(self, batch: Sequence[Prompt], found: Mapping[str, Mapping[str, Record]]) -> None:
        """Compare with autoregressive decoding, then count the batch for every method that came through it."""
        differences = {
            entry.label: self._differences(entry, found) for entry in self.methods[1:] if entry.error is None
        }
        qualities = self._qualities(batch, found)
        for entry in self.methods:
            if entry.error is None:
                entry.records.update(found[entry.label])
                entry.differences.update(differences.get(entry.label, {}))
                entry.quality.update(qualities[entry.label])
                self._trace(entry, batch, found[entry.label])
        for prompt in batch:
            if prompt.category not in self.samples:
                self.samples[prompt.category] = self._sample(prompt, found)

    def _trace(self, entry: MethodRecords, batch: Sequence[Prompt], found: Mapping[str, Record]) -> None:
        """Add the answers to the trace, where one is asked for."""
        if self.settings.trace is None:
            return
        for prompt in batch:
            for turn, answer in enumerate(found[prompt.id].answers if prompt.id in found else ()):
                self.settings.trace.add(self.model, entry, prompt, turn, answer, self.params.temperature)

    def _qualities(
        self, batch: Sequence[Prompt], found: Mapping[str, Mapping[str, Record]]
    ) -> dict[str, dict[str, PromptQuality]]:
        """What the answers of all methods are worth, where that is asked for; measuring runs their rules, which may
        fail. Prompt by prompt: the K/V of one is held meanwhile."""
        qualities: dict[str, dict[str, PromptQuality]] = {entry.label: {} for entry in self.methods}
        meter, plain = self.meter, {} if self.reference.error else found[self.reference.label]
        if meter is None:
            return qualities
        for prompt in batch:
            with meter:
                for entry in self.methods:
                    if entry.error is None and prompt.id in found[entry.label]:
                        try:
                            measured = meter.measure([prompt], entry, found[entry.label], plain)
                            qualities[entry.label].update(measured)
                        except Exception as error:
                            entry.error = said(error)
        return qualities

    def _differences(self, entry: MethodRecords, found: Mapping[str, Mapping[str, Record]]) -> dict[str, Any]:
        if not self.params.greedy or self.reference.error is not None:
            return {}
        compared = {
            name: first_difference(
                self.model.target, record, found[self.reference.label][name], self._under(name, self.params), self._ends
            )
            for name, record in found[entry.label].items()
            if name in found[self.reference.label]
        }
        return {name: difference for name, difference in compared.items() if difference is not None}

    def _under(self, prompt: str, params: SamplingParams) -> SamplingParams:
        """The sampling parameters of one prompt, with its grammar."""
        constraint = self.constraints.get(prompt)
        if constraint is None:
            return replace(params, constraint_weighting=MASKED)
        return replace(params, constraint=constraint)

    @property
    def _ends(self) -> frozenset[int]:
        return frozenset() if self.settings.ignore_eos else self.model.eos_ids

    def _contexts(
        self, entry: MethodRecords, live: Sequence[Prompt], found: Mapping[str, Mapping[str, Record]], turn: int
    ) -> dict[Prompt, tuple[int, ...]]:
        """The tokens that each prompt's turn begins with; without those that are over or have outgrown the context."""
        own = (self.params.greedy and entry.method.lossless) or self.reference.error is not None
        return contexts(self.model, live, found[entry.label if own else self.reference.label], turn)

    def _undisturbed(
        self,
        entries: Sequence[MethodRecords],
        asked: Asked,
        turn: int,
        settings: BenchSettings,
        on_slice: Callable[[MethodRecords], None] = lambda _: None,
    ) -> dict[MethodRecords, tuple[list[Answer], float]]:
        """:meth:`_answer`, again where a method measured costs in the middle of it: that happens once on a machine. All
        answer again, since each is compared with what the others took at the same moments. Not with a namespace, where
        the second answer would copy from the first."""
        found = dict[MethodRecords, tuple[list[Answer], float]]()
        for _ in range(1 if settings.namespace else _ATTEMPTS):
            found, disturbed = self._answer(entries, asked, turn, settings, on_slice)
            if not disturbed:
                break
        return found

    def _answer(
        self,
        entries: Sequence[MethodRecords],
        asked: Asked,
        turn: int,
        settings: BenchSettings,
        on_slice: Callable[[MethodRecords], None],
    ) -> tuple[dict[MethodRecords, tuple[list[Answer], float]], list[MethodRecords]]:
        """One batch of answers of each method, and its peak memory in MB; none of a method that fails, which ends its
        part in the bench. And the methods that measured costs meanwhile."""
        batches = dict[MethodRecords, AnswerBatch]()
        for entry in entries:
            if entry.error is None:
                try:
                    batches[entry] = self._batch(entry, asked[entry], turn, settings)
                except Exception as error:  # one method's fault must not cost the others their figures
                    entry.error = said(error)
        found = dict[MethodRecords, tuple[list[Answer], float]]()
        for entry, answers in in_slices(batches, on_slice).items():
            if isinstance(answers, Exception):
                entry.error = said(answers)
            else:
                found[entry] = answers, batches[entry].peak_memory_mb
        return found, [entry for entry in found if batches[entry].disturbed]

    def _batch(
        self, entry: MethodRecords, asked: Mapping[Prompt, tuple[int, ...]], turn: int, settings: BenchSettings
    ) -> AnswerBatch:
        traced = self.meter is not None and self.meter.traces(entry)
        requests = [
            Request(
                prompt=tokens,
                method=entry.method,
                params=self._under(prompt.id, settings.seeded(self.numbers[prompt.id] * 64 + turn)),
                max_new_tokens=settings.max_new_tokens,
                stop_ids=self._ends,
                references=self.references,
                reference_texts=settings.references,
                namespace=entry.namespace(settings.namespace),
                trace=traced,
                counts=settings.trace is not None,
                repeats=bool(settings.repeats),
            )
            for prompt, tokens in asked.items()
        ]
        if isinstance(entry.method.controller, Oracle):
            unnamed = [replace(one, namespace="") for one in requests]
            entry.method.controller.rehearse(lambda: answer_together(self.model.target, unnamed, keep_failed=True))
        nodes = [MeasuredNodes(f"{prompt.id}/{turn}") for prompt in asked] if traced else ()
        return AnswerBatch(self.model.target, requests, settings.batch_size, keep_failed=True, nodes=nodes)

    def _sample(self, prompt: Prompt, found: Mapping[str, Mapping[str, Record]]) -> dict[str, Any]:
        texts = {
            entry.label: self.model.tokenizer.decode(found[entry.label][prompt.id].answers[0].tokens)
            for entry in self.methods
            if entry.error is None and prompt.id in found[entry.label] and found[entry.label][prompt.id].answers
        }
        cut = {label: text[:_SAMPLE_CHARACTERS] for label, text in texts.items()}
        return {"id": prompt.id, "category": prompt.category, "prompt": prompt.turns[0], "answers": cut}

    def _tell(self, method: str, category: str) -> None:
        if self.on_progress is not None:
            rates = {entry.label: total_rate(entry.rates()) for entry in self.methods}
            self.on_progress(Progress(self.done, self.total, method, category, rates))

    def result(self, *, complete: bool) -> dict[str, Any]:
        """The JSON object: only plain numbers, text, lists and objects, nothing NaN."""
        seed, greedy = self.params.fixed_seed, self.params.greedy
        settings = self.settings.public() | {
            "prompts": len(self.prompts),
            "categories": list(dict.fromkeys(prompt.category for prompt in self.prompts)),
            "skipped_turns": self.skipped_turns,
            "near_tie_gap": near_tie_gap(self.model.target.dtype),
        }
        rows = [method_row(entry, self.reference, compared=greedy, seed=seed) for entry in self.methods]
        for row, entry in zip(rows, self.methods, strict=True) if self.meter is not None else ():
            row["quality"] = quality_row(
                entry.quality,
                self.reference.quality,
                lossless=entry.method.exact_for(self.params),
                greedy=greedy,
                baseline=entry is self.reference,
                seed=seed,
            )
        found = {
            "version": __version__,
            "complete": complete,
            "machine": machine.describe(),
            "model": {"name": self.model.name, "context_length": self.model.target.context_length, **self.model.info},
            "settings": settings,
            "methods": rows,
            "per_prompt": prompt_rows(self.methods),
            "samples": list(self.samples.values()),
        }
        cleaned: dict[str, Any] = plain_figures(found)
        return cleaned
