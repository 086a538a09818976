"""Microseconds that a grammar takes at a node: one step and one mask, p50 and p99, along answers to several schemas.

python benchmarks/grammar_masks.py [--model smollm2] [--cases FILE]

The first answer of a grammar builds parts of its tables; ``later`` is the same answer again. ``--cases`` writes the
grammars, the vocabulary and the answers for ``xgrammar_masks.py``, which measures another engine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import outpace
from outpace.constraints import Grammar, compiled
from outpace.constraints.token_trie import token_trie
from outpace.core.constraint import ConstraintState
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", type=Path)
    asked = parser.parse_args()
    model = outpace.load(asked.model)
    if asked.cases:
        asked.cases.parent.mkdir(parents=True, exist_ok=True)
        asked.cases.write_text(json.dumps(cases(model)), encoding="utf-8")
    began = perf_counter()
    token_trie(model.tokenizer)
    print(f"vocabulary of {len(model.tokenizer):,} tokens, read in {perf_counter() - began:.2f} s")
    print(f"{'grammar':10} {'compile ms':>10} {'first p50':>10} {'p99':>8} {'later p50':>10} {'p99':>8}")
    for name, (grammar, text) in CASES.items():
        compile_ms = 1e3 * compiled(grammar, model.tokenizer).seconds
        first = microseconds(grammar, text, model)
        later = [one for _ in range(5) for one in microseconds(grammar, text, model)]
        cells = [np.percentile(one, at) for one in (first, later) for at in (50, 99)]
        print(f"{name:10} {compile_ms:10.1f} {cells[0]:10.0f} {cells[1]:8.0f} {cells[2]:10.0f} {cells[3]:8.0f}")


if __name__ == "__main__":
    main()
