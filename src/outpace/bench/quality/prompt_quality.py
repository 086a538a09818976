"""What one method's answers to one prompt are worth, measured after they were timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.bench.method_records import MethodRecords
from outpace.bench.quality.edit_distance import edit_distance
from outpace.bench.quality.likelihood import Likelihood, likelihood
from outpace.bench.quality.realised_tv import Variation, variation
from outpace.bench.quality.task_scores import scorable, score
from outpace.bench.records import Answer, Record
from outpace.core.lru import Lru
from outpace.core.sampling import SamplingParams
from outpace.model import Model
from outpace.prompts.prompt import Prompt

_KEPT = 256  # answers: those of a few prompts


@dataclass(frozen=True, slots=True)
class PromptQuality:
    """Sums over the answers to a prompt's turns; ratios of their totals are a row's figures.

    ``tv`` over ``tv_nodes``; at ``tv_lost`` nodes it could not be had. ``edits`` of at most ``longest`` tokens; both 0
    where answers are not compared. ``right``: of the last turn's answer, None where there is nothing to score.
    ``answered``: it gave a final answer. ``cut_off``: it reached the length limit. ``answer``: the text that was
    scored, None where none was.
    """

    tokens: int = 0
    nll: float = 0.0
    not_first: int = 0
    tv: float = 0.0
    tv_nodes: int = 0
    edits: int = 0
    longest: int = 0
    right: bool | None = None
    answered: bool = True
    cut_off: bool = False
    near_ties: int = 0
    tv_lost: int = 0
    answer: str | None = None


@dataclass(slots=True)
class QualityMeter:
    """Measures the answers of a batch of prompts. Answers that methods share are scored by the target once.

    ``under``: the sampling parameters of a prompt, by its id, with its grammar: that is a part of the target.
    """

    model: Model
    params: SamplingParams
    under: Callable[[str], SamplingParams]
    _known: Lru[tuple[int, tuple[int, ...], tuple[int, ...]], Likelihood] = field(default_factory=lambda: Lru(_KEPT))

    _begun: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """K/V of contexts, which the answers of all methods go on from."""

    def traces(self, entry: MethodRecords) -> bool:
        """Whether the method's rounds must be kept to measure it."""
        rule = entry.method.rule
        return not (self.params.greedy or rule.lossless) and bool(rule.by_node)

    def measure(
        self,
        prompts: Iterable[Prompt],
        entry: MethodRecords,
        found: Mapping[str, Record],
        reference: Mapping[str, Record],
    ) -> dict[str, PromptQuality]:
        """The quality of a method's answers, by the prompt's id. ``reference``: autoregressive decoding's."""
        return {one.id: self._measured(one, entry, found[one.id], reference.get(one.id)) for one in prompts}

    def _measured(
        self, prompt: Prompt, entry: MethodRecords, record: Record, reference: Record | None
    ) -> PromptQuality:
        params = self.under(prompt.id)
        likely = [self._likelihood(answer, params) for answer in record.answers]
        varied = [self._variation(entry, answer, params) for answer in record.answers]
        compared = zip(record.answers, reference.answers if reference and self.params.greedy else (), strict=False)
        pairs = [(ours.tokens, theirs.tokens) for ours, theirs in compared]
        text, right, answered, cut_off = self._score(prompt, record)
        return PromptQuality(
            sum(one.tokens for one in likely),
            sum(one.nll for one in likely),
            sum(one.not_first for one in likely),
            sum(one.total for one in varied),
            sum(one.nodes for one in varied),
            sum(edit_distance(ours, theirs) for ours, theirs in pairs),
            sum(max(len(ours), len(theirs)) for ours, theirs in pairs),
            right,
            answered,
            cut_off,
            sum(one.near_ties for one in likely),
            sum(one.lost for one in varied),
            text,
        )

    def _likelihood(self, answer: Answer, params: SamplingParams) -> Likelihood:
        key = id(params.constraint), answer.context, answer.tokens
        found = self._known.get(key)
        if found is None:
            found = likelihood(self.model.target, answer.context, answer.tokens, params, self._context(answer.context))
            self._known.put(key, found)
        return found

    def _variation(self, entry: MethodRecords, answer: Answer, params: SamplingParams) -> Variation:
        if not answer.rounds:
            return Variation()
        target, rule, begun = self.model.target, entry.method.rule, self._context(answer.context)
        found = variation(target, answer.context, answer.rounds, rule, params, answer.nodes, begun)
        answer.rounds = ()  # trees with their q rows: megabytes
        return found

    def _context(self, context: tuple[int, ...]) -> Any:
        """K/V of all its tokens but the last: a prompt takes longer to read than an answer to score."""
        if context not in self._begun:
            target = self.model.target
            sequence = target.sequence(context)
            target.prefill([sequence])
            self._begun[context] = sequence.kv
        return self._begun[context]

    def __enter__(self) -> None:
        """Measure answers whose contexts are kept until the end."""

    def __exit__(self, *_: object) -> None:
        for kv in self._begun.values():
            self.model.target.close(kv)
        self._begun.clear()

    def _score(self, prompt: Prompt, record: Record) -> tuple[str | None, bool | None, bool, bool]:
        """The last answer's text, and whether it is right, gave a final answer, and was cut off."""
        if prompt.task is None or len(record.answers) < len(prompt.turns) or not scorable(prompt.task):
            return None, None, True, False
        last = record.answers[-1]
        text = self.model.tokenizer.decode(last.tokens)
        right = score(prompt.task, text)
        return text, bool(right), right is not None, last.cut_off
