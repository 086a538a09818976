"""Microseconds that a grammar takes at a node: one step and one mask, p50 and p99, along answers to several schemas.

python benchmarks/grammar_masks.py [--model smollm2 --model qwen2.5-coder-0.5b.gguf] [--nodes 2000] [--cases FILE]

Prints a table with two columns for each model's vocabulary. The *first* answer of a grammar builds parts of its tables;
*later* is the same answer again, until ``--nodes`` nodes were measured. ``--cases`` writes the grammars, the vocabulary
and the answers for ``xgrammar_masks.py``, which measures another engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import outpace
from outpace.constraints import Grammar, compiled
from outpace.constraints.token_trie import token_trie
from outpace.core.constraint import ConstraintState
from outpace.core.errors import OutpaceError
from outpace.core.files import write_atomically
from structured_peers import gbnf

ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "title": {"type": "string"},
        "date": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["id", "title", "date", "tags"],
}
ONE = '{"id": 12, "title": "A long road to nowhere", "date": "2024-05-06", "tags": ["red", "blue"]}'
CASES: dict[str, tuple[Grammar, str]] = {
    "object": (Grammar.schema(ITEM), ONE),
    "list": (Grammar.schema({"type": "array", "items": ITEM}), f"[{', '.join([ONE] * 4)}]"),
    "any JSON": (Grammar.schema({"type": "object"}), '{"a": {"b": [1, 2, {"c": "some longer text"}]}, "d": null}'),
    "SQL": (
        Grammar.lark('start: "SELECT " NAME (", " NAME)* " FROM " NAME ";"\nNAME: /[a-z_]{1,20}/'),
        "SELECT name, age FROM people;",
    ),
}


def microseconds(grammar: Grammar, text: str, model: Any) -> list[float]:
    """Of every node along ``text``."""
    state: ConstraintState | None = compiled(grammar, model.tokenizer).begin()
    found: list[float] = []
    for token in (None, *model.tokenizer.encode_batch([text])[0]):
        began = perf_counter()
        assert state is not None
        state = state if token is None else state.advance(token)
        assert state is not None, "the grammar does not allow its example"
        state.allowed(model.target.vocab_size)
        found.append(1e6 * (perf_counter() - began))
    return found


def cases(model: Any) -> dict[str, Any]:
    """What another engine needs to do the same: tokens as text of one character a byte."""
    known = range(len(model.tokenizer))
    return {
        "size": model.target.vocab_size,
        "stop_ids": sorted(model.eos_ids),
        "vocabulary": [(model.tokenizer.token_bytes(token) or b"").decode("latin-1") for token in known],
        "cases": {
            name: {
                "kind": grammar.kind,
                "source": grammar.source,
                "gbnf": gbnf(grammar.source) if grammar.kind == "lark" else "",
                "tokens": model.tokenizer.encode_batch([text])[0],
            }
            for name, (grammar, text) in CASES.items()
        },
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one grammar: what compiling took, and the microseconds of nodes."""

    compile_ms: float
    first: list[float]
    later: list[float]

    def cell(self, times: list[float]) -> str:
        """p50 and p99."""
        return f"{np.percentile(times, 50):,.0f}, {np.percentile(times, 99):,.0f}"


def measure(model: Any, nodes: int) -> dict[str, Measured]:
    """Every grammar over the model's vocabulary, whose own tables are built before."""
    token_trie(model.tokenizer)
    found = {}
    for name, (grammar, text) in CASES.items():
        compile_ms = 1e3 * compiled(grammar, model.tokenizer).seconds
        first, later = microseconds(grammar, text, model), list[float]()
        while len(later) < nodes:
            later += microseconds(grammar, text, model)
        found[name] = Measured(compile_ms, first, later)
    return found


def table(columns: dict[str, dict[str, Measured]]) -> str:
    """A row a grammar, and of each vocabulary: compiling, the first answer, and later ones."""
    heads = [f"{vocabulary}: {what}" for vocabulary in columns for what in ("compile ms", "first", "later")]
    lines = [f"| microseconds a node: p50, p99 | {' | '.join(heads)} |", "|" + "---|" * (1 + len(heads))]
    for name in CASES:
        cells = []
        for found in columns.values():
            one = found[name]
            cells += [f"{one.compile_ms:.1f}", one.cell(one.first), one.cell(one.later)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="given once for each; smollm2 by default")
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--cases", type=Path, help="of the first model")
    asked = parser.parse_args()
    columns: dict[str, dict[str, Measured]] = {}
    try:
        for number, name in enumerate(asked.model or ["smollm2"]):
            model = outpace.load(name)
            if asked.cases and not number:
                asked.cases.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(asked.cases, json.dumps(cases(model)).encode())
            columns[f"{model.target.vocab_size:,} tokens ({Path(name).stem})"] = measure(model, asked.nodes)
    except OutpaceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
