"""Answers that ship with the package: ordinary text for methods that begin with a corpus, where the user names none.

``answers/answers.jsonl`` holds what SmolLM2-135M-Instruct answered to prompts that it wrote itself; ``provenance.json``
says how (``benchmarks/cold_start.py``). They are text, so that every tokenizer can read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from outpace.core.text import Encoder

_ANSWERS = Path(__file__).parent / "answers" / "answers.jsonl"


def shipped_answers(tokenizer: Encoder, most: int) -> Iterator[list[int]]:
    """Tokens of the answers, each a document, until ``most`` tokens are read; the last is cut."""
    for line in _ANSWERS.read_text().splitlines():
        if most <= 0:
            return
        tokens = tokenizer.encode(json.loads(line)["text"])[:most]
        most -= len(tokens)
        yield tokens
