"""advise(): measures costs and acceptance once, predicts every candidate, recommends one or none.

    advice = outpace.advise("smollm2", batches=(1, 4, 16))
    print(advice)                                     # in words;  advice.result is the JSON object

1. The target answers the prompts, autoregressively and in batches (:mod:`outpace.engine.known_answers`).
2. Rounds with so and so many draft tokens are timed for each batch (:mod:`outpace.advice.round_costs`).
3. Each candidate decodes the answers once more, which are known by now: its target's forwards do not run
   (:mod:`outpace.engine.replay`, :mod:`outpace.engine.teacher_forcing`). That gives the accepted lengths of each round.
4. The best length or tree of each candidate and batch is tried in a few real rounds, beside those of a probe.
5. :mod:`outpace.advice.prediction` puts these together, :mod:`outpace.advice.recommendation` chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from outpace.advice.advice_report import AdviceReport
from outpace.advice.candidates import ENGINES, candidates
from outpace.advice.comparing import Comparison
from outpace.advice.engine_commands import Offer, Typed, commands
from outpace.advice.measuring import EngineCosts, Measurements, Timer
from outpace.advice.recommendation import Recommendation, Row, recommend
from outpace.advice.round_costs import fits, kept_bytes
from outpace.core import machine
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.turns import ROUNDS
from outpace.core.version import __version__
from outpace.engine.populations.group import free_memory
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
_KEPT = 0.4
"""Share of a batch's time that earlier batches leave to it."""


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
            # In a trial as many requests of a probe are decoded beside those of the candidate.
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
                comparing = Comparison(self.work, self.engine, batch)
                for one in offered:
                    comparing.measure(one, built[one.method], kept)
                    kept = later * _KEPT * self.timer.whole / len(self.batches)
                found, offers = comparing.outcome()
                rows += found
                self.offers += offers
                self.work.note_unsteady(batch)
        finally:
            self.work.close()
        return self._report(rows)

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
        costs = self.work.usual_costs()
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
                    "assumed": self.engine != "outpace" and not self.work.measured_elsewhere(batch),
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
        measured = any(map(self.work.measured_elsewhere, self.work.costs))
        whose = self.engine if measured else "outpace"
        others = [one for one, line in lines.items() if one not in (self.engine, whose) and not line.startswith("#")]
        if not others:
            return []
        return [f"Costs of {whose} on this machine are assumed in the commands of {', '.join(others)}."]
