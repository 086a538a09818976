"""The trace of a bench: every counted answer of every method, for ``outpace simulate``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outpace.bench.method_records import MethodRecords
from outpace.bench.records import Answer
from outpace.core.errors import BadInput
from outpace.engine.method import Method
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.traces.trace_format import TracedRequest
from outpace.traces.trace_records import PrefixHashes, header_of, rounds_of, traced_name
from outpace.traces.trace_writer import write_trace


def check_traceable(methods: Iterable[Method]) -> None:
    """Raise BadInput for methods whose rounds a trace cannot hold."""
    for one in methods:
        if one.population is not None:
            raise BadInput(
                f"--trace: method '{one.name}' decodes several sequences for each answer, and a trace has the rounds "
                "of one; leave the method out, or --trace"
            )


class BenchTrace:
    """Collects answers while a bench runs. ``texts``: with prompts and answers."""

    def __init__(self, path: Path, *, texts: bool = False) -> None:
        self.path, self.texts = path, texts
        self._hashes = PrefixHashes()
        self._requests: list[TracedRequest] = []

    def add(
        self, model: Model, of: MethodRecords, prompt: Prompt, turn: int, answer: Answer, temperature: float
    ) -> None:
        """An answer of a method that counts. ``turn``: from 0."""
        decode, rounds = model.tokenizer.decode, rounds_of(answer.counts)
        self._requests.append(
            TracedRequest(
                id=f"{prompt.id}/{turn + 1}",
                method=traced_name(of.method, of.label),
                prompt_tokens=len(answer.context),
                output_tokens=sum(rounds.committed),
                rounds=rounds,
                task=prompt.category,
                first_token=answer.ttft if answer.tokens else None,
                seconds=answer.wall if answer.tokens else None,
                cached_tokens=answer.metrics.cached_tokens,
                temperature=float(temperature),
                finish="length" if answer.cut_off else "stop",
                prefix=self._hashes.of(answer.context),
                prompt=decode(answer.context) if self.texts else None,
                answer=decode(answer.tokens) if self.texts else None,
            )
        )

    def write(self, model: Model, at_once: int, command: str) -> None:
        """Write the file. Raises BadInput where it cannot be written."""
        header = header_of(model, "bench", at_once=at_once, closed=True, texts=self.texts, command=command)
        write_trace(self.path, header, self._requests)
