"""What a datastore costs: building it (time, memory), its size, opening it, looking a context up.

    python benchmarks/datastore.py DATA/*.jsonl --megabytes 20

The corpus is made of the given files' texts, repeated until it is as large as asked for, each repetition with a word in
``--change`` replaced by another word of the corpus: long matches, but not the same ones everywhere. The build runs in a
process of its own, so that its peak of memory is its own. Lookups are made after contexts of the corpus with a changed
word somewhere in their last tokens; every context is looked up once, in random order, after a round to warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def varied(files: list[str], size: int, change: float, seed: int) -> Iterator[str]:
    """Lines of text, about ``size`` bytes in all."""
    from outpace.datastore.corpus import read_corpus

    texts = [piece.text for piece in read_corpus(files)]
    words = " ".join(texts).split(" ")
    rng = random.Random(seed)
    written = 0
    while True:
        for text in texts:
            line = " ".join(rng.choice(words) if rng.random() < change else word for word in text.split(" "))
            written += len(line.encode()) + 1
            yield line + "\n"
            if written >= size:
                return


def build(corpus: str, place: str, model: str) -> None:
    """The child: build, and say what it took."""
    import outpace.loading
    from outpace.datastore.build import build_datastore
    from outpace.datastore.corpus import read_corpus, tokenise

    tokenizer = outpace.loading.load_tokenizer(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    marks = {"reading": began}

    def advance(what: str, done: int, total: int) -> None:
        marks[what] = time.perf_counter()

    header = build_datastore(
        place, tokenise(read_corpus([corpus]), tokenizer), tokenizer.fingerprint, model, advance=advance
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.perf_counter() - began
    figures = {
        "tokens": header.tokens,
        "build_seconds": seconds,
        "tokenising_seconds": marks["reading"] - began,
        "sorting_seconds": marks["sorting"] - marks["reading"],
        "peak_megabytes": peak / 1e3,
        "megabytes_before": before / 1e3,
        "file_megabytes": header.size / 1e6,
    }
    print(json.dumps(figures))


def look_up(place: str, count: int, seed: int) -> dict[str, float]:
    """Opening the file, and microseconds a lookup: the search, and the search with 64 continuations of 10 tokens."""
    import numpy as np

    from outpace.datastore.store import open_datastore

    began = time.perf_counter()
    store = open_datastore(place)
    opening = time.perf_counter() - began
    rng = np.random.default_rng(seed)
    end = store.header.separator
    text = store._text
    contexts = []
    for at in rng.integers(64, len(text) - 64, count).tolist():
        context = [token for token in text[at : at + 64][::-1].tolist() if token != end]
        context[-int(rng.integers(1, 48))] = int(text[int(rng.integers(1, len(text)))]) % end
        contexts.append(context)
    figures: dict[str, float] = {"open_seconds": opening}
    lengths = [found.length if (found := store.find(context)) else 0 for context in contexts]  # warms up
    for name, most in (("find", 0), ("find_and_read", 64)):
        times = []
        for context in contexts:
            began = time.perf_counter_ns()
            found = store.find(context)
            if found is not None and most:
                store.continuations(found, most, 10)
            times.append((time.perf_counter_ns() - began) / 1e3)
        figures[f"{name}_microseconds_median"] = statistics.median(times)
        figures[f"{name}_microseconds_p99"] = statistics.quantiles(times, n=100)[-1]
    figures["mean_match"] = statistics.mean(lengths)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--change", type=float, default=0.05, help="share of words that are replaced")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lookups", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        corpus, place = options.files
        build(corpus, place, options.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        text, place = Path(folder, "corpus.txt"), str(Path(folder, "corpus.datastore"))
        with text.open("w", encoding="utf-8") as file:
            file.writelines(varied(options.files, int(options.megabytes * 1e6), options.change, options.seed))
        command = [sys.executable, __file__, str(text), place, "--model", options.model, "--child"]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        if run.returncode:
            sys.exit(run.stderr.strip().splitlines()[-1])
        figures: dict[str, Any] = {"corpus_megabytes": text.stat().st_size / 1e6, **json.loads(run.stdout)}
        figures |= look_up(place, options.lookups, options.seed)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
