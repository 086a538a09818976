"""How many schemas of a collection can be used, how many are refused, and whether any accepts what it must not.

python benchmarks/schema_suite.py FOLDER_OR_JSONL ... [--walks 4] [--seconds 5] [--every N] [--limit N] [--json FILE]

Reads ``*.json`` files and JSON lines: a schema; an object with ``schema`` (or ``json_schema``, as text too) and perhaps
``tests``; or a list of such objects, as the JSON-Schema-Test-Suite has them. ``tests`` have ``data`` and ``valid``.

Every schema is compiled for a vocabulary. Of those that compile, each given instance is offered to the constraint, laid
out as answers are, and random answers are drawn under its masks, which the package jsonschema judges. So are tricks:
valid instances and answers with another pair behind one object's, whose key is a named one in escapes, or one that is
there already, and whose value has another type; and keys written twice to make up a number. An instance that must be
refused and is accepted, or an answer that does not validate, is *wrong*. A valid instance that is not accepted is
counted apart: keys have an order, and text one layout.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import outpace
from outpace.constraints import Grammar, GrammarLimits, compiled
from outpace.constraints.compiler import ParsedConstraint
from outpace.core.constraint import ConstraintState, tokens_of
from outpace.core.errors import BadInput
from outpace.core.files import write_atomically

LONGEST = 400
"""Tokens of a random answer; one that is not complete by then is given up."""
_TRICKED = 4
"""Objects of a value, and keys of each, that are tried."""
_OTHERS = ("null", "7", '"x"', "[]", "{}")
_CLOSING = ('"', "}", "]", '"}', '"]', "}]", '",', "},")


@dataclass(slots=True)
class Case:
    """A schema, where it stands, and its instances: (value, whether it is valid)."""

    name: str
    schema: Any
    tests: list[tuple[Any, bool]] = field(default_factory=list)


def cases(path: Path, broken: list[str]) -> Iterator[Case]:
    """All schemas of a file or a folder. Raises BadInput for a file that is no JSON; such files of a folder are
    ``broken``."""
    if path.is_dir():
        for one in sorted(path.rglob("*.json*")):
            try:
                yield from cases(one, broken)
            except BadInput as error:
                broken.append(str(error))
        return
    try:
        lines = path.read_text(encoding="utf-8").split("\n") if path.suffix == ".jsonl" else [path.read_text("utf-8")]
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read schemas from {path}: {error}") from None
    for number, row in enumerate(rows, 1):
        for inner, one in enumerate(row if isinstance(row, list) else [row], 1):
            yield _case(f"{path.name}:{number}.{inner}", one)


def _case(name: str, row: Any) -> Case:
    key = next((key for key in ("schema", "json_schema") if isinstance(row, dict) and key in row), None)
    if key is None:
        return Case(name, row)
    try:
        schema = json.loads(row[key]) if isinstance(row[key], str) else row[key]
    except ValueError as error:
        raise BadInput(f"{name}: its '{key}' is no JSON: {error}") from None
    tests = [(one["data"], bool(one["valid"])) for one in row.get("tests", ()) if "data" in one]
    return Case(name, schema, tests)


class Judge:
    """What jsonschema says of a random answer; None where it cannot read the schema."""

    def __init__(self, schema: Any) -> None:
        import jsonschema  # type: ignore[import-untyped, unused-ignore]

        def pattern(validator: Any, wanted: str, value: Any, _: Any) -> Iterator[Any]:
            # ECMA-262, which JSON schema refers to, has digits and letters of ASCII and the white space of Unicode.
            if isinstance(value, str) and not (re.search(wanted, value, re.ASCII) or re.search(wanted, value)):
                yield jsonschema.ValidationError(f"{value!r} does not match {wanted!r}")

        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        self._validator = jsonschema.validators.extend(kind, {"pattern": pattern})(schema)

    def valid(self, value: Any) -> bool | None:
        """Whether the schema describes the value."""
        try:
            return bool(self._validator.is_valid(value))
        except Exception:  # references that it does not find, patterns that it cannot read, recursion
            return None


class Walker:
    """Random answers under a constraint's masks; tokens that close something are preferred, so that answers end."""

    def __init__(self, model: outpace.Model, seed: int) -> None:
        self.tokenizer, self.size = model.tokenizer, model.target.vocab_size
        self.chance = random.Random(seed)
        texts = [model.tokenizer.token_text(token) for token in range(len(model.tokenizer))]
        self.closing = np.array([text.strip() in _CLOSING for text in texts])

    def answer(self, constraint: ParsedConstraint) -> str | None:
        """A whole answer; None where it grows too long, or nothing follows."""
        state: ConstraintState | None = constraint.begin()
        tokens: list[int] = []
        while state is not None and len(tokens) < LONGEST:
            found = tokens_of(state.allowed(self.size), self.size)
            if state.complete and (not len(found) or self.chance.random() < 0.5):
                return self.tokenizer.decode(tokens)
            if not len(found):
                return None
            closing = found[self.closing[np.minimum(found, len(self.closing) - 1)]]
            among = closing if len(closing) and self.chance.random() < 0.7 else found
            tokens.append(int(self.chance.choice(among)))
            state = state.advance(tokens[-1])
        return None


def laid_out(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tricks(value: Any, schema: Any) -> Iterator[str]:
    """Texts of a valid value, each with a key of one object written twice: JSON that a parser reads as other values.

    Another pair has a named key, or one that is there, as it is and in escapes, and any type of value; or the first
    pair stands in the place of the last.
    """
    names = list(dict.fromkeys(_named(schema)))
    for inner, write in islice(_places(value, str), _TRICKED):
        pairs = [(laid_out(key), laid_out(one)) for key, one in inner.items()]
        if len(pairs) > 1:
            yield write(_object([*pairs[:-1], pairs[0]]))
        for name in [one for one in dict.fromkeys((*inner, *names)) if one][:_TRICKED]:
            for key in (laid_out(name), f'"{_escaped(name[0])}{laid_out(name[1:])[1:]}'):
                for other in _OTHERS:
                    yield write(_object([*pairs, (key, other)]))


def _places(value: Any, write: Callable[[str], str]) -> Iterator[tuple[dict[str, Any], Callable[[str], str]]]:
    """All objects of a value, each with what writes the whole with another text in its place."""
    if isinstance(value, dict):
        yield value, write
    for at, inner in enumerate(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()):

        def within(text: str, at: int = at) -> str:
            texts = [laid_out(one) for one in (value.values() if isinstance(value, dict) else value)]
            texts[at] = text
            if isinstance(value, list):
                return write(f"[{', '.join(texts)}]")
            return write(_object(list(zip(map(laid_out, value), texts, strict=True))))

        yield from _places(inner, within)


def _object(pairs: list[tuple[str, str]]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in pairs)}}}"


def _escaped(sign: str) -> str:
    units = sign.encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _named(schema: Any) -> Iterator[str]:
    """Keys that a schema names, at any depth."""
    if isinstance(schema, dict) and isinstance(named := schema.get("properties"), dict):
        yield from named
    for one in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _named(one)


def offer_tricks(value: Any, case: Case, constraint: ParsedConstraint, judge: Judge, found: dict[str, Any]) -> None:
    for text in tricks(value, case.schema):
        if not constraint.accepts(text):
            found["instances"]["trick", "rejected"] += 1
            continue
        judged = judge.valid(json.loads(text))
        outcome = "not judged" if judged is None else "valid" if judged else "wrong"
        found["instances"]["trick", outcome] += 1
        if judged is False:
            found["wrong"].append(text[:120])


def check(case: Case, model: outpace.Model, walker: Walker, walks: int, limits: GrammarLimits) -> dict[str, Any]:
    """What came of one schema."""
    found: dict[str, Any] = {"name": case.name, "wrong": [], "instances": Counter(), "ms": None}
    try:
        constraint = compiled(Grammar.schema(case.schema), model.tokenizer, limits)
    except BadInput as error:
        return found | {"outcome": "refused", "why": str(error)}
    except Exception as error:
        return found | {"outcome": "crashed", "why": f"{type(error).__name__}: {error}"}
    found["ms"] = 1e3 * constraint.seconds
    judge = Judge(case.schema)
    try:
        for value, valid in case.tests:
            accepted = constraint.accepts(laid_out(value))
            found["instances"][("valid" if valid else "invalid", "accepted" if accepted else "rejected")] += 1
            if accepted and not valid:
                found["wrong"].append(laid_out(value)[:120])
            elif accepted:
                offer_tricks(value, case, constraint, judge, found)
        for _ in range(walks):
            text = walker.answer(constraint)
            if text is None:
                found["instances"]["walk", "not finished"] += 1
                continue
            try:
                value = json.loads(text)
                judged = judge.valid(value)
            except ValueError:
                judged = False
            outcome = "not judged" if judged is None else "valid" if judged else "wrong"
            found["instances"]["walk", outcome] += 1
            if judged is False:
                found["wrong"].append(text[:120])
            elif judged:
                offer_tricks(value, case, constraint, judge, found)
    except BadInput as error:
        return found | {"outcome": "ended with an error", "why": str(error)}
    return found | {"outcome": "wrong" if found["wrong"] else "compiled", "why": ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--walks", type=int, default=4, help="random answers for each schema")
    parser.add_argument("--seconds", type=float, default=5.0, help="the limit on compiling a schema")
    parser.add_argument("--every", type=_positive, default=1, help="take every N-th schema alone")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        print("error: the package jsonschema judges the answers; pip install jsonschema", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    began = perf_counter()
    broken: list[str] = []
    try:
        limits = GrammarLimits(seconds=asked.seconds)
        found = [case for path in asked.paths for case in cases(path, broken)]
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if asked.json and not asked.json.parent.is_dir():
        print(f"error: --json {asked.json}: there is no such folder", file=sys.stderr)
        return 2
    chosen = found[asked.every - 1 :: asked.every][: asked.limit]
    for line in broken:
        print(f"left out: {line}", file=sys.stderr)
    model = outpace.load(asked.model)
    walker = Walker(model, seed=0)
    results = [check(case, model, walker, asked.walks, limits) for case in chosen]
    outcomes = Counter(one["outcome"] for one in results)
    print(f"{len(found)} schemas, {len(broken)} files that are no JSON")
    print(f"{len(results)} schemas in {perf_counter() - began:.0f} s: {dict(outcomes)}")
    times = [one["ms"] for one in results if one["ms"] is not None]
    if times:
        print(
            f"compile ms: p50 {np.percentile(times, 50):.1f}, p99 {np.percentile(times, 99):.1f}, max {max(times):.0f}"
        )
    instances: Counter[tuple[str, str]] = sum((one["instances"] for one in results), Counter())
    for (kind, outcome), count in sorted(instances.items()):
        print(f"  {kind} {outcome}: {count}")
    print("refused because:")
    reasons = Counter(_reason(one["why"]) for one in results if one["outcome"] == "refused")
    for reason, count in reasons.most_common(15):
        print(f"  {count:5} {reason}")
    for one in results:
        if one["outcome"] not in ("compiled", "refused"):
            print(f"{one['outcome']}: {one['name']} {one['why']} {one['wrong'][:1]}")
    if asked.json:
        rows = [one | {"instances": {" ".join(key): n for key, n in one["instances"].items()}} for one in results]
        write_atomically(asked.json, json.dumps(rows, indent=1).encode())
    return 1 if outcomes["wrong"] or outcomes["crashed"] else 0


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)


def _reason(why: str) -> str:
    """The line without what differs from schema to schema."""
    why = re.sub(r"^the schema cannot be used: (at \d+\(\d+\):\s*)?", "", why)
    return re.sub(r"[\"'`].*?[\"'`]|\d+", "_", why)[:90]


if __name__ == "__main__":
    sys.exit(main())
