"""What vLLM shows a proposer, without vLLM: a batch whose rows move, prompts in chunks, calls that are left out.

Written after vLLM 0.32: GPUModelRunner.propose_draft_token_ids and InputBatch; ``tests/integrations/vllm_calls.json``
holds calls that were recorded there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outpace.integrations.vllm import plugin
from outpace.integrations.vllm.proposer import Proposer

VOCABULARY = 1000


def config(
    options: Mapping[str, Any] | None = None, tokens: int = 8, context: int = 512, requests: int = 8
) -> SimpleNamespace:
    """As much of a VllmConfig as a proposer reads."""
    return SimpleNamespace(
        additional_config={} if options is None else {"outpace": dict(options)},
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        model_config=SimpleNamespace(max_model_len=context, get_vocab_size=lambda: VOCABULARY),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
    )


def proposer(monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Any] | None = None, **sizes: int) -> Proposer:
    """A proposer in a process without vLLM."""
    monkeypatch.setattr(plugin, "check_running_version", lambda: None)
    monkeypatch.setattr(plugin, "show_runner", lambda: None)
    one = Proposer(config(options, **sizes))
    monkeypatch.setattr(one.costs, "saw", lambda rows, seconds: None)  # no test depends on a clock
    return one


@dataclass
class Row:
    """A request: its id, its prompt, the answer that the model will give, and how much of each was done."""

    name: str
    prompt: list[int]
    answer: list[int]
    temperature: float = 0.0
    namespace: str | None = None
    done: int = 0
    read: int = 0
    drafted: list[int] = field(default_factory=list)
    rounds: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer[: self.done]


class Engine:
    """Runs requests and verifies drafts against the answers that it knows. ``named``: whether ids are shown."""

    def __init__(self, one: Proposer, *, named: bool = True, context: int = 512, chunk: int = 10_000) -> None:
        self.proposer, self.context, self.chunk = one, context, chunk
        self.rows: list[Row] = []
        self.token_ids = np.zeros((8, context), np.int32)
        if named:
            one.runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=[]), requests={})

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.proposer.runner is not None:
            asked = None if row.namespace is None else {"namespace": row.namespace}
            params = SimpleNamespace(temperature=row.temperature, extra_args=asked)
            self.proposer.runner.requests[row.name] = SimpleNamespace(sampling_params=params)

    def step(self, *, call: bool = True) -> None:
        """One step of all rows; ``call``: whether the proposer is called after it."""
        sampled: list[list[int]] = []
        for row in self.rows:
            if row.read < len(row.prompt):
                row.read = min(len(row.prompt), row.read + self.chunk)
                sampled.append([] if row.read < len(row.prompt) else self._verified(row))
            else:
                sampled.append(self._verified(row))
        for index, row in enumerate(self.rows):
            self.token_ids[index] = 0
            self.token_ids[index, : len(row.tokens)] = row.tokens
        counts = np.array([len(row.tokens) for row in self.rows], np.int32)
        drafts: Seq[Seq[int]] = [[] for _ in self.rows]
        if call:
            if self.proposer.runner is not None:
                self.proposer.runner.input_batch.req_ids = [row.name for row in self.rows]
            drafts = self.proposer.propose(sampled, counts, self.token_ids, slot_mappings=None)
        assert len(drafts) == len(self.rows)
        for row, draft in zip(self.rows, drafts, strict=True):
            assert len(draft) <= self.proposer.most
            assert len(row.tokens) + len(draft) < self.context
            assert all(type(token) is int and 0 <= token < VOCABULARY for token in draft)
            row.drafted = list(draft)
        finished = [row for row in self.rows if row.done >= len(row.answer)]
        # vLLM fills the place of a row that has finished with the last one.
        for row in finished:
            if self.proposer.runner is not None:
                del self.proposer.runner.requests[row.name]
            index = self.rows.index(row)
            last = self.rows.pop()
            if last is not row:
                self.rows[index] = last

    def run(self) -> None:
        while self.rows:
            self.step()

    def _verified(self, row: Row) -> list[int]:
        left = row.answer[row.done :]
        taken = 0
        while taken < min(len(row.drafted), len(left) - 1) and row.drafted[taken] == left[taken]:
            taken += 1
        row.done += taken + 1
        row.rounds += 1
        return left[: taken + 1]
