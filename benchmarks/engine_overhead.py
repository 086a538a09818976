"""What the plug-in for vLLM costs beside the model: microseconds of ``Proposer.propose`` for each row.

    python benchmarks/engine_overhead.py --rows 1,8,64
    python benchmarks/engine_overhead.py --methods recycling,merge

Rows have 512 to 1024 tokens of text in which a third of the tokens repeat earlier passages, and gain one to four tokens
a call. ``rest`` copies from a datastore of 200,000 tokens of the same words. Shown are the median over calls, of the
quickest of three runs, and apart from it the call in which a request joins, whose prompt is read into the index. No
model runs, and vLLM need not be installed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from outpace.datastore.build import build_datastore
from outpace.datastore.corpus import TokenPiece
from outpace.integrations.vllm import plugin
from outpace.integrations.vllm.proposer import Proposer

METHODS = ("sam", "pld", "recycling", "cacheback", "rest", "cascade", "merge", "auto")
CONTEXT, PROMPT, CORPUS = 1024, 512, 200_000


def text(rng: random.Random, length: int = CONTEXT) -> list[int]:
    """Random words, a third of them in passages that occurred before."""
    found = [rng.randrange(2000) for _ in range(64)]
    while len(found) < length:
        if rng.random() < 0.04:
            at = rng.randrange(len(found) - 24)
            found += found[at : at + 16]
        else:
            found.append(min(rng.randrange(2000) for _ in range(3)))
    return found[:length]


def measured(options: Mapping[str, Any], rows: int, calls: int) -> tuple[float, float]:
    """(microseconds a row and call, microseconds of a row's first call)."""
    rng = random.Random(1)
    config = SimpleNamespace(
        additional_config={"outpace": options},
        speculative_config=SimpleNamespace(num_speculative_tokens=16),
        model_config=SimpleNamespace(max_model_len=CONTEXT, get_vocab_size=lambda: 49152),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
    )
    one = Proposer(config)
    ids = [f"request {row}" for row in range(rows)]
    one.runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=ids), requests={})
    tokens = np.array([text(rng) for _ in range(rows)], np.int32)
    counts = np.full(rows, PROMPT, np.int32)
    took = []
    for _ in range(calls):
        gained = [rng.choice((1, 1, 1, 2, 4)) for _ in range(rows)]
        counts += np.array(gained, np.int32)
        if counts.max() >= CONTEXT - 1:
            break
        ends = counts.tolist()
        sampled = [tokens[row, ends[row] - gained[row] : ends[row]].tolist() for row in range(rows)]
        began = perf_counter()
        one.propose(sampled, counts, tokens, slot_mappings=None)
        took.append(1e6 * (perf_counter() - began) / rows)
    return statistics.median(took[1:]), took[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1,8,64", help="sizes of batches; default: %(default)s")
    parser.add_argument("--methods", default=",".join(METHODS), help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=150)
    given = parser.parse_args()
    plugin.check_running_version = lambda: None
    plugin.show_runner = lambda: None
    print(f"{'method':10} {'rows':>5} {'us a row':>9} {'first call':>11}")
    with tempfile.TemporaryDirectory() as folder:
        datastore = Path(folder) / "words"
        for method in given.methods.split(","):
            options = {"method": method}
            if method == "rest":
                build_datastore(datastore, [TokenPiece(text(random.Random(2), CORPUS), True)], "random words")
                options["datastore"] = str(datastore)
            for rows in map(int, given.rows.split(",")):
                runs = [measured(options, rows, given.calls) for _ in range(3)]
                usual, first = min(one[0] for one in runs), min(one[1] for one in runs)
                print(f"{method:10} {rows:5} {usual:9.1f} {first:11.1f}", flush=True)


if __name__ == "__main__":
    main()
