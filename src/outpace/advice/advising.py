"""advise(): measures costs and acceptance once, predicts every candidate, recommends one or none.

    advice = outpace.advise("smollm2", batches=(1, 4, 16))
    print(advice)                                     # in words;  advice.result is the JSON object

1. The target answers the prompts, autoregressively and in batches (:mod:`outpace.engine.known_answers`).
2. Rounds with so and so many draft tokens are timed for each batch (:mod:`outpace.advice.round_costs`).
3. Each candidate decodes the answers once more, which are known by now: its target's forwards do not run
   (:mod:`outpace.engine.replay`, :mod:`outpace.engine.teacher_forcing`). That gives the accepted lengths of each round.
4. The best length or tree of each candidate and batch is tried in a few real rounds, for its draft's time.
5. :mod:`outpace.advice.prediction` puts these together, :mod:`outpace.advice.recommendation` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outpace.advice.advice_report import AdviceReport
from outpace.advice.candidates import ENGINES, Candidate, Shape, candidates
from outpace.advice.engine_commands import Offer, Typed, commands
from outpace.advice.measuring import LEAST_PROMPTS, TRIALS, EngineCosts, Measurements, Timer
from outpace.advice.prediction import Played, Prediction, of_chains, of_records, predict
from outpace.advice.recommendation import Recommendation, Row, recommend
from outpace.advice.round_costs import fits, kept_bytes
from outpace.advice.trial import Trial
from outpace.core import machine
from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.core.turns import ROUNDS
from outpace.core.version import __version__
from outpace.engine.method import Method
from outpace.engine.populations.group import free_memory
from outpace.engine.replay import replayable
from outpace.methods.bindings import Bindings
from outpace.methods.named_weights import DRAFT_LM, DraftModels, Heads
from outpace.methods.registry import Context, build
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import prompts_of, stratified, unique, without_grammars
from outpace.targets.base import Target

MINUTES = 5.0
BATCHES = (1, 4, 16)
PROMPTS = 64
"""Most prompts that are answered."""
_TRIED = 3
"""Draft tokens of the chain by which a draft model's levels are timed."""
_KEPT = 0.4
"""Share of a batch's time that earlier batches leave to it."""
_CLOSE = 1.01
"""A shape must be expected to be so much better than the method's own choice in every round."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A shape at one batch. ``how`` acceptance was found: replayed, decoded or teacher-forced. ``draft_steps``: what
    drafting takes in a round, in autoregressive ones, where it was not run with the rounds."""

    shape: Shape
    method: Method
    played: Played
    how: str
    guess: Prediction
    draft_steps: float | None = None


@dataclass(frozen=True, slots=True)
class _Tried:
    """A candidate at one batch, all its shapes and the ``best`` of them with its trial, where there was time for it."""

    candidate: Candidate
    found: list[_Found]
    best: _Found
    trial: Trial | None


def advise(
    model: Model | str,
    prompts: Seq[Prompt | str] | str | Path | None = None,
    *,
    batches: Seq[int] = BATCHES,
    params: SamplingParams | None = None,
    head: Heads = None,
    draft_model: DraftModels = None,
    engine: str = "outpace",
    minutes: float = MINUTES,
    max_new_tokens: int = 64,
    ignore_eos: bool = False,
    engine_costs: EngineCosts | None = None,
    typed: Typed | None = None,
) -> AdviceReport:
    """Which method is expected to decode prompts like these fastest on this machine, at each of ``batches``; or none.

    ``model``: a Model, or a name for :func:`outpace.load`. ``prompts``: questions, texts or the path of a file; None
    takes the embedded set. ``params``: None is greedy. ``head`` and ``draft_model``: those of :meth:`Model.method`.
    ``engine``: outpace, vllm, sglang or llama.cpp; candidates are those that it can run. ``minutes``: what all of it
    may take. ``max_new_tokens``: per answer; ``ignore_eos``: answers go on after their end. ``engine_costs``: measures
    costs in ``engine``; without it those of outpace are assumed there. ``typed``: what the commands of the advice name.

    Raises BadInput for no prompts, prompts that do not fit the context, heads and draft models that do not fit the
    model, and batches whose K/V do not fit into memory.

    >>> print(outpace.advise("smollm2", batches=(1, 4)))  # doctest: +SKIP
    """
    if engine not in ENGINES:
        raise BadInput(f"--engine must be one of {', '.join(ENGINES)}, not {engine}")
    questions = without_grammars(prompts_of(prompts), "advise")
    if not isinstance(model, Model):
        import outpace.loading

        model = outpace.loading.load(model)
    with ROUNDS:
        work = _Advising(model, questions, batches, params or SamplingParams(), engine, minutes, max_new_tokens)
        work.ends = frozenset() if ignore_eos else model.eos_ids
        context = model.context(head=head, draft_model=draft_model)
        work.typed = typed or _typed(model, context.bindings)
        return work.run(context, engine_costs)


def _typed(model: Model, bindings: Bindings) -> Typed:
    """As a command line would name what a caller gave."""
    drafts = {one.name: DRAFT_LM if one.shipped else one.origin for one in bindings.draft_models}
    return Typed(model.name, [one.option for one in bindings.heads], drafts)


class _Advising:
    def __init__(
        self,
        model: Model,
        prompts: Seq[Prompt],
        batches: Seq[int],
        params: SamplingParams,
        engine: str,
        minutes: float,
        max_new_tokens: int,
    ) -> None:
        if not prompts:
            raise BadInput("there are no prompts to advise on; give --prompts a file with at least one")
        if not batches or min(batches) < 1:
            raise BadInput("--batch takes numbers of requests of at least 1, such as 1,4,16")
        if not minutes > 0:
            raise BadInput(f"--minutes must be above 0, not {minutes:g}")
        if max_new_tokens < 2:
            raise BadInput(
                f"--max-new-tokens must be at least 2, not {max_new_tokens}: an answer's first token comes with its "
                "prompt, and only later ones can be drafted"
            )
        self.model, self.target = model, model.target
        self.batches = tuple(dict.fromkeys(sorted(batches)))
        self.params, self.engine, self.max_new_tokens = params, engine, max_new_tokens
        self.timer = Timer(minutes)
        self.ends: frozenset[int] = frozenset()
        self.prompts = unique(stratified(prompts, PROMPTS))
        contexts = {tuple(model.tokenizer.chat(one.messages)): one for one in self.prompts}
        self.contexts, self.prompts = list(contexts), list(contexts.values())
        self._check_prompts()
        self.offers: list[Offer] = []
        self.typed = Typed()

    def _check_prompts(self) -> None:
        room = self.target.context_length
        for prompt, context in zip(self.prompts, self.contexts, strict=True):
            if not 0 < len(context) < room:
                raise BadInput(
                    f"prompt '{prompt.id}' has {len(context)} tokens; the model's context holds {room}, answer included"
                )

    def _check_memory(self, drafts: Seq[Target], layers: int) -> None:
        """Raise BadInput for a batch that does not fit. ``drafts``: draft models, each with K/V of its own; ``layers``:
        whose hidden states are kept with the answers."""
        room = self.target.context_length
        lengths = [min(room, len(one) + self.max_new_tokens) for one in self.contexts]
        free, kept = free_memory(self.target), kept_bytes(self.target, lengths, layers)
        for batch in self.batches:
            beside = kept + batch * sum(one.kv_bytes(None, max(lengths)) for one in drafts)
            # In a trial as many requests are decoded autoregressively beside those of the candidate.
            if not fits(self.target, 2 * batch, max(lengths), free - beside):
                raise BadInput(
                    f"--batch {batch}: the K/V of {batch} requests of {max(lengths)} tokens, with a candidate and "
                    f"without, and {len(lengths)} kept answers do not fit into memory ({free / 1e9:.1f} GB are free); "
                    "choose a smaller batch, or fewer or shorter prompts"
                )

    def run(self, context: Context, engine_costs: EngineCosts | None) -> AdviceReport:
        self.context = context
        greedy = self.params.greedy
        offered, left_out = candidates(context, self.engine, greedy=greedy)
        built = {one.method: [build(one.method, context, shape.settings) for shape in one.shapes] for one in offered}
        self.work = Measurements(self.target, build("none", context), self.params, self.batches, self.timer)
        for label in left_out:
            self.work.notes.append(f"{label} is left out: {self.engine} does not draft with it.")
        layers = {layer for each in built.values() for one in each for layer in one.drafter.aux_hidden_state_layers}
        drafts = [one.load() for one in context.bindings.draft_models]
        self._check_memory(drafts, len(layers))
        try:
            self.work.answer(self.contexts, self.max_new_tokens, self.ends, layers)
            self.work.ask_engine(self.engine, engine_costs)
            if not greedy:
                self.work.notes.append(f"Holds for temperature {self.params.temperature:g}, which requests state.")
            rows: list[Row] = []
            for later, batch in zip(reversed(range(len(self.batches))), self.batches, strict=True):
                if self.timer.left <= 0:
                    self.work.notes.append(f"Nothing was measured at batch {batch}: the time was over.")
                    continue
                self.work.cost(batch)
                kept = 0.0  # for the first candidate of later batches at least
                tried: list[_Tried] = []
                for one in offered:
                    tried += self._candidate(one, built[one.method], batch, kept)
                    kept = later * _KEPT * self.timer.whole / len(self.batches)
                rows += [self._row(each, batch) for each in tried]
                self.work.note_unsteady(batch)
        finally:
            self.work.close()
        return self._report(rows)

    def _candidate(self, one: Candidate, methods: Seq[Method], batch: int, kept: float) -> list[_Tried]:
        """What was found of it, unless no more than ``kept`` seconds are left."""
        with stage(f"{one.method}, batch {batch}", brief=True):
            if self.timer.left < kept:
                self.work.notes.append(f"{one.method} was not measured at batch {batch}: the time was over.")
                return []
            found = self._forced(one, methods, batch) if one.teacher_forced else self._played(one, methods, batch)
            if not found:
                self.work.notes.append(
                    f"{one.method} was not measured at batch {batch}: it would take too long, "
                    "requests join in nearly every round, or answers end in their first one."
                )
                return []
            best = max(found, key=lambda each: each.guess.speedup)
            own = next((each for each in found if not each.shape.settings), None)
            if own is not None and best.guess.speedup < _CLOSE * own.guess.speedup:
                best = own
            return [_Tried(one, found, best, self.work.trial(best.method, batch))]

    def _row(self, tried: _Tried, batch: int) -> Row:
        """Its row, once all trials of the batch have been run: what the machine was like in them holds for all."""
        one, best = tried.candidate, tried.best
        prediction = self._predicted(best, tried.trial, batch)
        # What the trial has shown of the best one holds for the others of the method too.
        for each in tried.found:
            share = each.guess.speedup / best.guess.speedup
            speedup, lower = share * prediction.speedup, share * prediction.interval[0]
            self.offers.append(Offer(one.method, each.shape, speedup, lower, one.head, batch))
        return Row(one.method, best.shape, batch, prediction, best.how, best.played.tokens_per_round)

    def _predicted(self, best: _Found, trial: Trial | None, batch: int) -> Prediction:
        """Rounds of a trial are outpace's own: of another engine's only the draft's time, in autoregressive rounds, is
        taken over."""
        own, costs = self.work.own[batch], self.work.costs[batch]
        noise, untried = self.work.noise(batch), self.work.untried
        if costs is not own or self.engine != "outpace":
            steps = best.draft_steps
            if trial is not None and steps != 0.0:  # 0: the engine's rounds hold what drafting takes
                steps = float(trial.draft_steps()[0])
            return predict(best.played, costs, None, draft_steps=steps, noise=noise, untried=untried)
        steps, slowdowns = best.draft_steps if trial is None else None, self.work.slowdowns(batch)
        found = predict(best.played, costs, trial, draft_steps=steps, slowdowns=slowdowns, noise=noise, untried=untried)
        if trial is not None:
            self.work.tried(best.guess.speedup, found.speedup)
        return found

    def _played(self, one: Candidate, methods: Seq[Method], batch: int) -> list[_Found]:
        found: list[_Found] = []
        costs = self.work.costs[batch]
        for shape, method in zip(one.shapes, methods, strict=True):
            if found and self.timer.left < TRIALS * self.timer.whole:
                break
            # Replays of a draft model run all of its forwards.
            free = replayable(method, self.params) and not one.runs_models
            answers = self.work.answers if free else self.work.affordable(batch, len(one.shapes))
            if not free and len(answers) < LEAST_PROMPTS:
                continue
            plain = self.work.plain_rounds(batch)[: len(answers)]
            each = of_records(answers, self.work.rounds(answers, method, batch), costs, plain)
            if not each.plain.sum():  # the answers end in their first round
                continue
            how = "replayed" if replayable(method, self.params) else "decoded"
            own = self.work.own[batch]
            steps = None
            if costs is not own:
                # Drafts take as many autoregressive rounds of another engine as of this one, which has made them; but
                # its own rounds, as they were measured, hold what it takes to copy.
                copies = one.head is None and not one.runs_models
                steps = 0.0 if copies else float(each.drafting.sum() / (max(each.asked.sum(), 1e-9) * own.step))
            found.append(_Found(shape, method, each, how, predict(each, costs, None, draft_steps=steps), steps))
        return found

    def _forced(self, one: Candidate, methods: Seq[Method], batch: int) -> list[_Found]:
        """Chains of fixed length need a trial, which shows what drafting takes; there is none where time is short."""
        costs = self.work.costs[batch]
        middle = next((at for at, shape in enumerate(one.shapes) if shape.chain == _TRIED), 0)
        trial = self.work.trial(methods[middle], batch)
        found: list[_Found] = []
        for shape, method in zip(one.shapes, methods, strict=True):
            if not shape.chain:  # lengths that are chosen in each round: by running the draft model
                found += self._played(replace(one, shapes=(shape,)), [method], batch)
                continue
            if trial is None:
                continue
            ratios = self.work.ratios(methods[0])
            answers, plain = self.work.answers[: len(ratios)], self.work.plain_rounds(batch)[: len(ratios)]
            each = of_chains(answers, ratios, shape.chain, costs, plain)
            if not each.plain.sum():
                continue
            steps = float(trial.draft_steps()[0]) * shape.chain / max(1, one.shapes[middle].chain)
            guess = predict(each, costs, None, draft_steps=steps)
            found.append(_Found(shape, method, each, "teacher-forced", guess, steps))
        return found

    def _advised(self, chosen: Recommendation) -> Offer | None:
        """What outpace's command is for: the shape and batch of the recommendation's settings."""
        row = chosen.first
        if row is None:
            return None
        head = next((one.head for one in self.offers if one.method == row.method), None)
        return Offer(row.method, row.shape, row.prediction.speedup, row.prediction.interval[0], head, row.batch)

    def _report(self, rows: Seq[Row]) -> AdviceReport:
        if not rows:
            raise BadInput("no candidate could be measured within --minutes; give more minutes")
        costs = self.work.costs
        chosen = recommend(rows, costs, self.batches)
        lines = commands(self.typed, self._advised(chosen), self.offers)
        result: dict[str, Any] = {
            "version": __version__,
            "complete": True,
            "recommendation": chosen.public(),
            "candidates": [
                *(
                    {"method": "none", "settings": {}, "batch": batch, "speedup": 1.0, "interval": [1.0, 1.0]}
                    for batch in self.batches
                ),
                *(one.public() for one in rows),
            ],
            "words": chosen.words,
            "notes": [*self.work.notes, *self._of_other_engines(lines)],
            "engine": self.engine,
            "costs": {
                str(batch): {
                    "draft_tokens": [int(size) for size in one.sizes],
                    "relative": [float(value) for value in one.relative_sizes()],
                    "step_seconds": one.step,
                    "assumed": self.engine != "outpace" and one is self.work.own.get(batch),
                }
                for batch, one in costs.items()
            },
            "settings": {
                "prompts": len(self.work.answers),
                "tokens": sum(len(one.tokens) for one in self.work.answers),
                "max_new_tokens": self.max_new_tokens,
                "temperature": self.params.temperature,
                "batches": list(self.batches),
            },
            "machine": machine.describe(),
            "model": {"name": self.model.name, "context_length": self.target.context_length, **self.model.info},
            "seconds": self.timer.spent,
            "commands": lines,
        }
        return AdviceReport.of(result)

    def _of_other_engines(self, lines: Mapping[str, str]) -> list[str]:
        """Whose costs the other engines' commands rest on."""
        measured = any(one is not self.work.own.get(batch) for batch, one in self.work.costs.items())
        whose = self.engine if measured else "outpace"
        others = [one for one, line in lines.items() if one not in (self.engine, whose) and not line.startswith("#")]
        if not others:
            return []
        return [f"Costs of {whose} on this machine are assumed in the commands of {', '.join(others)}."]
