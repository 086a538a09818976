"""The answers to rows of an offline batch, by one worker: rows that are given together are decoded together."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outpace.api.requests import ask_one
from outpace.api.result import result
from outpace.core.errors import OutpaceError
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.engine.shared_decoder import Ticket
from outpace.integrations.ray.batch_rows import Row
from outpace.model import Model
from outpace.models.base import Message


class Answerer(Protocol):
    """What computes the results of rows."""

    def __call__(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """A result for each row, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a model. ``options``: of outpace's own API, ``params`` among them, for rows that say nothing else;
    ``system``: a message before prompts that have none.

    A row's seed follows from the batch's and its line, so that it has the same answer after an interruption.
    """

    model: Model
    method: Method
    options: Mapping[str, Any]
    system: str | None = None
    raw: bool = False

    def __call__(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """A result for each row, in their order. A row that cannot be answered says why."""
        results: dict[int, dict[str, Any]] = {}
        requests: list[tuple[Row, Request]] = []
        for row in rows:
            try:
                requests.append((row, self._request(row)))
            except OutpaceError as error:
                results[row.line] = row.failed(str(error))
        for (row, _), ticket in zip(requests, self._finished([one for _, one in requests]), strict=True):
            results[row.line] = _shown(row, ticket)
        return [results[row.line] for row in rows]

    def _request(self, row: Row) -> Request:
        options = {**self.options, **row.options, "method": self.method, "raw": self.raw}
        params: SamplingParams = self.options["params"]
        if row.options.get("temperature", params.temperature) > 0 and "seed" not in row.options:
            options["seed"] = (params.seed or 0) + row.line
        return ask_one(self.model, self._prompt(row), options, "a row")

    def _prompt(self, row: Row) -> Any:
        if self.raw:
            return row.prompt
        messages: list[Message] = (
            [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        )
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _finished(self, requests: Sequence[Request]) -> list[Ticket]:
        left = threading.Semaphore(0)

        def told(_: Ticket, text: str | None) -> None:
            if text is None:
                left.release()

        tickets = self.model.shared.submit([(one, told) for one in requests])
        for _ in tickets:
            left.acquire()
        return tickets


REFUSAL = "refusal"
"""The key of what a worker returns in place of results where its model could not be loaded: why."""


class BatchWorker:
    """A worker of Ray Data: from batches of rows to batches of results, both as JSON texts."""

    def __init__(self, open_answers: Any) -> None:
        self._answers: Answerer | None = None
        self._refusal = ""
        try:
            self._answers = open_answers()
        except Exception as error:  # raised here, it would make Ray start worker after worker
            self._refusal = str(error) if isinstance(error, OutpaceError) else f"{type(error).__name__}: {error}"

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """``row`` to ``result``."""
        if self._answers is None:
            return {"result": [json.dumps({REFUSAL: self._refusal})]}
        rows = [Row.from_dict(json.loads(text)) for text in batch["row"]]
        return {"result": [json.dumps(one) for one in self._answers(rows)]}


def _shown(row: Row, ticket: Ticket) -> dict[str, Any]:
    try:
        found = result(ticket.finished())
    except OutpaceError as error:
        return row.failed(str(error))
    except Exception as error:
        return row.failed(f"the worker failed: {type(error).__name__}: {error}")
    usage = {"prompt_tokens": found.prompt_tokens, "completion_tokens": len(found.tokens)}
    usage["total_tokens"] = sum(usage.values())
    shown: dict[str, Any] = {
        "id": row.id,
        "line": row.line,
        "text": found.text,
        "finish_reason": found.finish_reason,
        "usage": usage,
    }
    known = {"seed": found.seed, "lossy": found.metrics["lossy"]}
    return {**shown, **{name: value for name, value in known.items() if value is not None}}
