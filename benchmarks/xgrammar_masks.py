"""What ``grammar_masks.py`` measures, of xgrammar: the same grammars, vocabulary, answers and steps.

python benchmarks/grammar_masks.py --cases out/cases.json
.peers/vllm/bin/python benchmarks/xgrammar_masks.py out/cases.json

It runs where xgrammar is installed (``make peers`` brings it with vLLM), and needs nothing of outpace but the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import xgrammar


def microseconds(compiled: Any, tokens: list[int], bits: Any) -> list[float]:
    """One step and one mask at each node along an answer."""
    matcher = xgrammar.GrammarMatcher(compiled)
    found: list[float] = []
    for token in (None, *tokens):
        began = perf_counter()
        taken = token is None or matcher.accept_token(token)
        if not matcher.is_terminated():
            matcher.fill_next_token_bitmask(bits)
        found.append(1e6 * (perf_counter() - began))
        assert taken, "the grammar does not allow its example"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, help="the file that grammar_masks.py --cases has written")
    given = json.loads(parser.parse_args().cases.read_text(encoding="utf-8"))
    vocabulary = [text.encode("latin-1") for text in given["vocabulary"]]
    began = perf_counter()
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=given["size"], stop_token_ids=given["stop_ids"])
    print(f"vocabulary of {len(vocabulary):,} tokens, read in {perf_counter() - began:.2f} s")
    bits = xgrammar.allocate_token_bitmask(1, given["size"])
    print(f"{'grammar':10} {'compile ms':>10} {'first p50':>10} {'p99':>8} {'later p50':>10} {'p99':>8}")
    for name, case in given["cases"].items():
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        began = perf_counter()
        if case["kind"] == "schema":
            compiled = compiler.compile_json_schema(case["source"], any_whitespace=False, strict_mode=False)
        else:
            compiled = compiler.compile_grammar(case["gbnf"])
        compile_ms = 1e3 * (perf_counter() - began)
        first = microseconds(compiled, case["tokens"], bits)
        later = [one for _ in range(5) for one in microseconds(compiled, case["tokens"], bits)]
        cells = [np.percentile(one, at) for one in (first, later) for at in (50, 99)]
        print(f"{name:10} {compile_ms:10.1f} {cells[0]:10.0f} {cells[1]:8.0f} {cells[2]:10.0f} {cells[3]:8.0f}")


if __name__ == "__main__":
    main()
