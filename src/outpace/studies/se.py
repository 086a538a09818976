"""``se``: speculation on software engineering: generation, repair and edit of code (Li et al. 2026, arXiv 2604.26469).

Methods that draft with a model (*model-based*) and methods that look drafts up (*model-free*) answer the same prompts
about code. The paper finds that the first suit generation, the second repair and edit, whose answers repeat what the
prompt shows; so how much of an answer repeats is measured as well: the share of its runs of four tokens that stand
somewhere before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field

from outpace.bench.records import Answer
from outpace.core.errors import BadInput
from outpace.core.validation import StrictModel
from outpace.prompts.prompt import Prompt
from outpace.studies.claims import FROM, TO, Claim, above, interval, resampled_within, single
from outpace.studies.decoded import Figures, decode, speedup, tokens_per_round, whole
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study

TASKS = ("generation", "repair", "edit")
BASED, FREE = "model-based", "model-free"
_BETTER = {"generation": BASED, "repair": FREE, "edit": FREE}
"""What the paper finds to suit each task."""
_RUN = 4
"""Tokens of a run that counts as repeated."""


class SeSettings(StrictModel):
    """Settings of ``se``."""

    based: list[str] = Field(
        ["draft-model", "eagle3"], min_length=1, description="model-based methods; the best of them counts"
    )
    free: list[str] = Field(["pld", "sam"], min_length=1, description="model-free methods; the best of them counts")
    draft_model: str = Field("", description="draft model of methods that take one; by default what is shipped")
    max_new_tokens: int = Field(64, ge=2, description="tokens of an answer, at most")


@study(
    "se",
    title="Generation, repair and edit of code: model-based against model-free",
    paper="Li et al. 2026, arXiv 2604.26469",
    prompts="software",
)
def se(context: StudyContext, settings: SeSettings) -> Findings:
    """Let model-based and model-free methods answer prompts about code."""
    kinds = {**dict.fromkeys(settings.based, BASED), **dict.fromkeys(settings.free, FREE)}
    if len(kinds) < len(settings.based) + len(settings.free):
        raise BadInput("a method is named twice; a method is either model-based or model-free")
    prompts = _of_tasks(context.prompts)
    model, draft = context.model, context.draft_model(settings.draft_model)
    methods = {name: model.method(name, draft_model=draft) for name in ("none", *kinds)}
    found = decode(model, methods, prompts, max_new_tokens=settings.max_new_tokens, seed=context.seed)
    tasks = [one.category for one in _of_tasks(found.prompts)]  # of those that fit into the model's context
    weights, once = resampled_within(tasks, context.seed), whole(len(tasks))
    repeats = np.array([repeated(one) for one in found.answers["none"]])
    members = {task: np.array([one == task for one in tasks], float) for task in TASKS}
    rows: list[dict[str, Any]] = []
    for task, member in members.items():
        for name, kind in kinds.items():
            some = (once if single(member) else weights) * member
            low, high = interval(tokens_per_round(some, found.answers[name]))
            slow, fast = interval(speedup(some, found.answers[name], found.answers["none"]))
            rows.append(
                {
                    "task": task,
                    "method": name,
                    "kind": kind,
                    "prompts": int(member.sum()),
                    "tokens": float(tokens_per_round(once * member, found.answers[name])[0]),
                    "low": low,
                    "high": high,
                    "speedup": float(speedup(once * member, found.answers[name], found.answers["none"])[0]),
                    "speedup_low": slow,
                    "speedup_high": fast,
                    "repeats": float(member @ repeats / member.sum()),
                }
            )
    columns = {"task": "task", "method": "method", "kind": "kind", "prompts": "prompts", "tokens": "tokens/round"}
    columns |= {"low": FROM, "high": TO, "speedup": "speed-up", "speedup_low": FROM, "speedup_high": TO}
    columns |= {"repeats": "repeated runs"}
    series = {
        f"{name} ({kind})": [
            PlotPoint(float(TASKS.index(row["task"]) + 1), row["speedup"], row["speedup_low"], row["speedup_high"])
            for row in rows
            if row["method"] == name
        ]
        for name, kind in kinds.items()
    }
    labels = {float(number): task for number, task in enumerate(TASKS, 1)}
    both = _Both(found.answers, kinds, weights, once)
    claims = [
        *(both.faster(task, member) for task, member in members.items()),
        *(both.longer(task, member) for task, member in members.items()),
        both.repetition(repeats),
    ]
    return Findings(
        rows,
        columns,
        claims,
        Plot("Speed-up by task", "task", "times autoregressive decoding", series, labels=labels),
        [f"Repeated runs: the share of an answer's runs of {_RUN} tokens that stand before in prompt or answer."],
    )


def _of_tasks(prompts: Seq[Prompt]) -> list[Prompt]:
    """The prompts of the three tasks. Raises BadInput where a task has none."""
    found = [one for one in prompts if one.category in TASKS]
    lacking = [task for task in TASKS if all(one.category != task for one in found)]
    if lacking:
        raise BadInput(
            f"there are no prompts of category {' and '.join(lacking)}: the study compares the categories "
            f"{', '.join(TASKS)}, as the set 'software' has them (at least 3 with --limit)"
        )
    return found


def repeated(answer: Answer) -> float:
    """The share of the answer's runs of four tokens that stand before, in the prompt or in the answer itself."""
    tokens = (*answer.context, *answer.tokens)
    seen: set[tuple[int, ...]] = set()
    runs = hits = 0
    for at in range(len(tokens) - _RUN + 1):
        run = tokens[at : at + _RUN]
        if at >= len(answer.context):
            runs += 1
            hits += run in seen
        seen.add(run)
    return hits / runs if runs else 0.0


@dataclass(frozen=True)
class _Both:
    """Both kinds of methods on the same prompts. ``weights`` (R, P) of the resamples, ``once`` (1, P) of the prompts as
    they are."""

    answers: Mapping[str, list[Answer]]
    kinds: Mapping[str, str]
    weights: Figures
    once: Figures

    def faster(self, task: str, member: Figures) -> Claim:
        """That the kind which the paper finds to suit the task is faster. ``member`` (P,): 1 for its prompts."""
        plain = self.answers["none"]
        return self._compared("is faster than", lambda some, one: speedup(some, one, plain), task, member)

    def longer(self, task: str, member: Figures) -> Claim:
        """That it commits more tokens a round, whatever its drafts take."""
        return self._compared("commits more tokens a round than", tokens_per_round, task, member)

    def _compared(
        self, words: str, figure: Callable[[Figures, Seq[Answer]], Figures], task: str, member: Figures
    ) -> Claim:
        better = _BETTER[task]
        worse = FREE if better == BASED else BASED

        def best(kind: str, some: Figures) -> Figures:
            names = [name for name, its in self.kinds.items() if its == kind]
            found: Figures = np.max([figure(some * member, self.answers[name]) for name in names], axis=0)
            return found

        def ratio(some: Figures) -> Figures:
            found: Figures = best(better, some) / np.maximum(best(worse, some), 1e-9)
            return found

        says = f"{task}: the best {better} method {words} the best {worse} one"
        return above(says, float(ratio(self.once)[0]), ratio(self.once if single(member) else self.weights), 1.0)

    def repetition(self, repeats: Figures) -> Claim:
        """That model-free methods commit more where answers repeat more. ``repeats`` (P,): the share of each."""
        free = [self.answers[name] for name, kind in self.kinds.items() if kind == FREE]
        tokens = np.mean([tokens_per_round(np.eye(len(repeats)), one) for one in free], axis=0)
        return above(
            "model-free methods commit more tokens a round where more of the answer repeats (correlation over prompts)",
            float(correlation(self.once, repeats, tokens)[0]),
            correlation(self.weights, repeats, tokens),
            0.0,
        )


def correlation(weights: Figures, x: Figures, y: Figures) -> Figures:
    """(R,): Pearson's, of two figures (P,) of the prompts in each resample; 0 where one of them does not vary."""
    shares = weights / weights.sum(axis=1, keepdims=True)
    from_x, from_y = x - (shares @ x)[:, None], y - (shares @ y)[:, None]
    spread = np.sqrt((shares * from_x**2).sum(axis=1) * (shares * from_y**2).sum(axis=1))
    found: Figures = np.divide(
        (shares * from_x * from_y).sum(axis=1), spread, out=np.zeros_like(spread), where=spread > 1e-12
    )
    return found
