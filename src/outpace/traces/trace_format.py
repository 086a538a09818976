"""The format of traces: JSON lines, a header and then one line a request (docs/simulate.md describes every field).

    {"outpace_trace": 1, "written_by": "bench", "model": {...}, "load": {"kind": "closed", "at_once": 4}, ...}
    {"id": "q1", "method": "pld", "arrival": null, "prompt_tokens": 41, "output_tokens": 64, "rounds": {...}, ...}

No text and no token id is in it, unless texts were asked for. ``prefix`` tells which requests begin alike and nothing
else: hashes of the beginnings of a prompt, block by block, keyed with a number that is drawn for the file and not kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from outpace.core.errors import BadInput
from outpace.core.files import parse_json

FORMAT = 1
KEY = "outpace_trace"
"""Of the header, whose value is :data:`FORMAT`."""
BLOCK = 32
"""Tokens of a block of ``prefix``, as large as those that the server's prefix cache keeps."""
COLUMNS = ("drafted", "accepted", "committed", "batch", "ms", "draft_ms")
"""Of ``rounds``: lists of one length, an entry for each round."""
LEVELS = "levels"
"""Another of them, which a trace may lack."""
LONGEST, LARGEST = 10_000_000, 100_000
"""Tokens of a prompt or an answer, and tokens or requests of a round, at most: a single wrong number would keep a
simulation busy for days."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of one request. ``drafted``, ``accepted`` and ``committed`` tokens; ``batch``: requests in the round;
    ``ms`` of the round and ``draft_ms`` of its drafter, for all its requests; ``levels`` of the draft's tree, () in
    traces that were written without them."""

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    committed: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    ms: tuple[float, ...] = ()
    draft_ms: tuple[float, ...] = ()
    levels: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.committed)

    def public(self) -> dict[str, list[float]]:
        found = {name: list(getattr(self, name)) for name in COLUMNS}
        return found | ({LEVELS: list(self.levels)} if self.levels else {})


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request. Times are in seconds: ``arrival`` after the beginning of the trace (None where requests came as
    others ended), ``first_token`` and ``seconds`` after the arrival.

    ``output_tokens``: all that rounds committed. ``finish``: stop, length, cancelled, error, or refused for one that
    was never admitted. ``prefix``: hashes of the prompt's beginnings of 32, 64, 96, ... tokens.
    """

    id: str
    method: str
    prompt_tokens: int
    output_tokens: int
    rounds: Rounds = field(default_factory=Rounds)
    task: str = ""
    arrival: float | None = None
    first_token: float | None = None
    seconds: float | None = None
    cached_tokens: int = 0
    temperature: float = 0.0
    finish: str = ""
    prefix: tuple[str, ...] = ()
    prompt: str | None = None
    answer: str | None = None

    def public(self) -> dict[str, Any]:
        """The line of the file."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("prompt", "answer")}
        texts = {} if self.prompt is None else {"prompt": self.prompt, "answer": self.answer}
        return {**found, "rounds": self.rounds.public(), "prefix": list(self.prefix), **texts}


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What all requests of a trace have in common. ``model``: name, parameters, vocab_size and the like. ``kind``:
    "open" where requests arrived by themselves, "closed" where ``at_once`` of them ran all the time; ``at_once`` is the
    largest batch in either."""

    model: Mapping[str, Any]
    kind: Literal["open", "closed"]
    at_once: int
    written_by: str
    version: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    texts: bool = False

    @property
    def model_name(self) -> str:
        return str(self.model.get("name", ""))

    def public(self) -> dict[str, Any]:
        """The first line of the file."""
        return {
            KEY: FORMAT,
            "version": self.version,
            "written_by": self.written_by,
            "model": dict(self.model),
            "machine": dict(self.machine),
            "load": {"kind": self.kind, "at_once": self.at_once},
            "settings": dict(self.settings),
            "texts": self.texts,
        }


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as it was read. ``notes``: what was left out of it, in words."""

    header: TraceHeader
    requests: tuple[TracedRequest, ...]
    notes: tuple[str, ...] = ()

    def by_method(self) -> dict[str, list[TracedRequest]]:
        """Requests that have rounds, by method, in the order of the file."""
        found: dict[str, list[TracedRequest]] = {}
        for one in self.requests:
            if len(one.rounds):
                found.setdefault(one.method, []).append(one)
        return found


def line(value: Mapping[str, Any]) -> str:
    """A line of the file. Raises ValueError for what JSON has not."""
    return json.dumps(_rounded(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _rounded(value: Any) -> Any:
    """Times to the microsecond: a trace of a day would be twice as long with all their digits."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def read_trace(path: Path) -> Trace:
    """The trace in a file. A last line that was cut, by a server that was killed, is left out, with a note.

    Raises BadInput, naming the line, for what is no trace.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(f"cannot read the trace {path}: {reason}") from None
    notes = []
    if len(lines) > 1 and _cut_off(lines[-1]):
        lines.pop()
        notes.append(f"the last line of {path} was cut off and is left out")
    objects = list(_objects(path, lines))
    if not objects or objects[0][1].get(KEY) is None:
        raise BadInput(f"{path} is no trace: its first line has no '{KEY}' (write one with --trace of bench or serve)")
    first = objects[0][1]
    if first[KEY] != FORMAT:
        raise BadInput(f"{path} is a trace of format {first[KEY]!r}; this version reads format {FORMAT}")
    requests = tuple(_checked(path, number, _request, one) for number, one in objects[1:])
    if not any(len(one.rounds) for one in requests):
        raise BadInput(f"{path} has no answered request of one sequence in it")
    if left_out := sum(not len(one.rounds) for one in requests):
        notes.append(f"{left_out} requests without rounds are left out: not answered, or of several sequences")
    return Trace(_checked(path, 1, _header, first), requests, tuple(notes))


def _cut_off(text: str) -> bool:
    """Whether this is the beginning of a line that was not written to its end: one that is whole is JSON."""
    if not text.strip():
        return False
    try:
        parse_json(text)
    except ValueError:
        return True
    return False


def _objects(path: Path, lines: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            found = parse_json(text)
        except ValueError:
            raise BadInput(f"{path}, line {number}: not valid JSON") from None
        if not isinstance(found, dict):
            raise BadInput(f"{path}, line {number}: not a JSON object")
        yield number, found


def _checked(path: Path, number: int, read: Any, found: dict[str, Any]) -> Any:
    try:
        return read(found)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise BadInput(f"{path}, line {number}: {what}") from None


def _header(found: dict[str, Any]) -> TraceHeader:
    kind = found["load"]["kind"]
    if kind not in ("open", "closed"):
        raise ValueError(f"'load.kind' must be open or closed, not {kind!r}")
    return TraceHeader(
        dict(found["model"]),
        kind,
        _count(found["load"], "at_once", 1, LARGEST),
        str(found["written_by"]),
        str(found.get("version", "")),
        dict(found.get("machine", {})),
        dict(found.get("settings", {})),
        bool(found.get("texts", False)),
    )


def _request(found: dict[str, Any]) -> TracedRequest:
    names = COLUMNS if found["rounds"].get(LEVELS) is None else (*COLUMNS, LEVELS)
    rounds = Rounds(**{name: tuple(_numbers(found["rounds"], name)) for name in names})
    if len({len(getattr(rounds, name)) for name in names}) > 1:
        raise ValueError("the lists of 'rounds' differ in length")
    if any(kept > drafted for kept, drafted in zip(rounds.accepted, rounds.drafted, strict=True)):
        raise ValueError("a round accepts more tokens than it drafted")
    levels = rounds.levels or rounds.drafted
    if any(not min(most, 1) <= one <= most for one, most in zip(levels, rounds.drafted, strict=True)):
        raise ValueError("a draft has at least one level, and not more than tokens")
    if sum(rounds.committed) != (tokens := _count(found, "output_tokens", 0)):
        raise ValueError(f"'output_tokens' is {tokens}, and the rounds committed {sum(rounds.committed)}")
    return TracedRequest(
        id=str(found["id"]),
        method=str(found["method"]),
        prompt_tokens=_count(found, "prompt_tokens", 1),
        output_tokens=tokens,
        rounds=rounds,
        task=str(found.get("task", "")),
        arrival=_time(found, "arrival"),
        first_token=_time(found, "first_token"),
        seconds=_time(found, "seconds"),
        cached_tokens=_count(found, "cached_tokens", 0) if "cached_tokens" in found else 0,
        temperature=float(found.get("temperature", 0.0)),
        finish=str(found.get("finish", "")),
        prefix=tuple(map(str, found.get("prefix", ()))),
        prompt=found.get("prompt"),
        answer=found.get("answer"),
    )


def _numbers(found: Mapping[str, Any], name: str) -> list[Any]:
    times = name in ("ms", "draft_ms")
    values = found[name]
    for one in values:
        whole = isinstance(one, int) and not isinstance(one, bool)
        if not (whole or (times and isinstance(one, float))) or not math.isfinite(one) or one < 0:
            raise ValueError(f"'rounds.{name}' holds {one!r}")
        if not times and one > LARGEST:
            raise ValueError(f"'rounds.{name}' holds {one:,}, which is more than {LARGEST:,}")
    return list(values)


def _count(found: Mapping[str, Any], name: str, least: int, most: int = LONGEST) -> int:
    value = found[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"'{name}' must be a whole number of at least {least}, not {value!r}")
    if value > most:
        raise ValueError(f"'{name}' must be at most {most:,}, not {value:,}")
    return value


def _time(found: Mapping[str, Any], name: str) -> float | None:
    value = found.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"'{name}' must be a number of seconds, not {value!r}")
    return float(value)
