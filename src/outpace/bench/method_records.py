"""What one method did in a bench so far, and the part of it that one row of the result is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from outpace.bench.records import Difference, Record
from outpace.bench.statistics import Rate, repeated_ngrams
from outpace.core.metrics import ratio, total
from outpace.engine.method import Method
from outpace.model import Model

if TYPE_CHECKING:
    from outpace.bench.quality.prompt_quality import PromptQuality


@dataclass(slots=True, eq=False)
class MethodRecords:
    """One method: its records and first differences by the prompt's id.

    ``label``: METHOD or METHOD#LABEL. ``settings``: those that were given. ``error`` ended its part in the bench.
    """

    label: str
    method: Method
    settings: Mapping[str, Any] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)
    error: str | None = None
    failed: dict[str, str] = field(default_factory=dict)
    """By the prompt's id, what ended an answer to it; such prompts have no record."""
    quality: dict[str, PromptQuality] = field(default_factory=dict)
    """By the prompt's id, where the bench measures it."""

    def namespace(self, name: str) -> str:
        """Its own part of the bench's namespace, so that no method learns from another; "" without one."""
        return name and f"{name}/{self.label}"

    def answered(self, records: Mapping[str, Record]) -> dict[str, Record]:
        """Those of ``records``, by the prompt's id, that no error ended."""
        return {prompt: one for prompt, one in records.items() if prompt not in self.failed}

    def rates(self) -> list[Rate]:
        """(tokens after the first round, seconds after it) of every prompt."""
        return [record.decode_rate for record in self.records.values()]


@dataclass(frozen=True)
class Measured:
    """Some prompts of one method: what a row's columns are read from. ``compared``: answers were, token by token."""

    of: MethodRecords
    records: Sequence[Record]
    autoregressive: MethodRecords
    compared: bool
    seed: int

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The figures of :mod:`outpace.core.metrics`, over all answers."""
        return total(record.metrics for record in self.records).figures()

    @cached_property
    def pairs(self) -> tuple[list[Rate], list[Rate]]:
        """Decode rates of the prompts that both answered: the method's, and autoregressive decoding's. Those of one
        batch count together, since they had the machine at the same time."""
        batches: dict[int, list[Record]] = {}
        for one in self.records:
            if self._paired(one):
                batches.setdefault(one.batch, []).append(one)
        theirs = self.autoregressive.records
        ours = [_summed(one.decode_rate for one in batch) for batch in batches.values()]
        return ours, [_summed(theirs[one.prompt].decode_rate for one in batch) for batch in batches.values()]

    @property
    def ttft_ms(self) -> float | None:
        """Mean time to the first token, in milliseconds, over the answers that have one."""
        waits = [answer.ttft for record in self.records for answer in record.answers if answer.tokens]
        return ratio(1e3 * sum(waits), len(waits))

    @property
    def incomplete(self) -> int | None:
        """Answers that the length limit cut before they were complete under their grammar; None without grammars."""
        if not self.figures["constraint_weighting"]:
            return None
        return sum(answer.incomplete for record in self.records for answer in record.answers)

    @property
    def repeated_ngrams(self) -> float | None:
        """Share of the answers' 4-grams that occurred before in the same answer."""
        counts = [repeated_ngrams(answer.tokens) for record in self.records for answer in record.answers]
        return ratio(sum(seen for seen, _ in counts), sum(count for _, count in counts))

    @property
    def identical(self) -> dict[str, int] | None:
        """Prompts with identical answers, prompts compared, near ties; None where answers were not compared."""
        if not self.compared:
            return None
        prompts = [one.prompt for one in self.records if self._paired(one)]
        found = [self.of.differences[prompt] for prompt in prompts if prompt in self.of.differences]
        ties = sum(difference.near_tie for difference in found)
        return {"same": len(prompts) - len(found), "of": len(prompts), "near_ties": ties}

    def _paired(self, record: Record) -> bool:
        return record.prompt in self.autoregressive.records


def _summed(rates: Iterable[Rate]) -> Rate:
    rates = list(rates)
    return sum(tokens for tokens, _ in rates), sum(seconds for _, seconds in rates)


def labelled(model: Model, methods: Sequence[Method], settings: Mapping[str, Mapping[str, Any]]) -> list[MethodRecords]:
    """Autoregressive decoding first; methods of one name are told apart by a number. ``settings``: by name."""
    plain = [method for method in methods if method.name == "none"][:1] or [model.method("none")]
    taken = {method.name for method in methods}
    found: list[MethodRecords] = []
    for method in (*plain, *(method for method in methods if method.name != "none")):
        label = method.name
        if any(one.label == label for one in found):
            label = next(name for i in count(2) if (name := f"{method.name}#{i}") not in taken)
            taken.add(label)
        found.append(MethodRecords(label, method, settings.get(method.name, {})))
    return found
