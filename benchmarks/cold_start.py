"""Write the answers that ship with the package, from which ``cacheback`` fills its second table where no datastore is
named.

The model writes the prompts itself and answers them, as for training (``outpace train --self-written 1``); prompts that
overlap with the bench's, or with a file given by ``--exclude``, are left out. Usage::

    python benchmarks/cold_start.py --model smollm2 --tokens 60000 --exclude QUESTIONS.jsonl --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import outpace
from outpace.core.files import write_atomically
from outpace.prompts.overlap import Overlap
from outpace.prompts.questions import bench_texts
from outpace.training.data import Collector, open_folder
from outpace.training.data_config import DataConfig


def main() -> None:
    """Collect the answers and write ``answers.jsonl`` and ``provenance.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--exclude", type=Path, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    wanted = parser.parse_args()
    model = outpace.load(wanted.model)
    config = DataConfig(wanted.tokens, self_written=1.0, cache_bytes=0, seed=wanted.seed, together=wanted.together)
    with tempfile.TemporaryDirectory() as scratch:
        shards = open_folder(Path(scratch), model.target, model.name, ())
        collected = Collector(model, shards, config, Overlap(bench_texts(wanted.exclude))).run(
            lambda state: print(state.doing, state.tokens, end="\r", flush=True)
        )
        answers = [model.tokenizer.decode(one.answer) for path in shards.paths for one in shards.read(path)]
    wanted.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in answers)
    write_atomically(wanted.out / "answers.jsonl", lines.encode())
    about = {
        "model": Path(model.name).name,
        "command": f"python benchmarks/cold_start.py --model {Path(wanted.model).name} --tokens {wanted.tokens} "
        f"--exclude {' '.join(one.name for one in wanted.exclude)} --seed {wanted.seed}",
        "data": collected.public(),
        "seed": wanted.seed,
    }
    write_atomically(wanted.out / "provenance.json", (json.dumps(about, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
