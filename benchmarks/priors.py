"""How often each kind of draft token is right: where drafters' expectations before anything is known come from.

    python benchmarks/priors.py PROMPTS... --methods pld,sam,recycling --limit 40

Decodes greedily and counts, for every kind that a drafter sorts its candidates into, how many were right, given that
those before them were. Candidates that were not drafted count too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import outpace
from outpace.api.requests import prompt_ids
from outpace.drafting.calibration import Calibration, Kind
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.prompts.questions import load_prompts

Counts = dict[Kind, list[int]]


class Counting:
    """Counts what calibrations learn."""

    def __init__(self) -> None:
        self.counts: Counts = {}
        self._learn = Calibration.learn

    def __enter__(self) -> Counting:
        learn, counts = self._learn, self.counts

        def counted(calibration: Calibration, kind: Kind, hit: bool) -> None:
            count = counts.setdefault(kind, [0, 0])
            count[0] += hit
            count[1] += 1
            learn(calibration, kind, hit)

        Calibration.learn = counted  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Calibration.learn = self._learn  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--methods", default="pld,sam,recycling,cacheback")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--datastore", type=Path, help="for rest, and sam's static automaton")
    parser.add_argument("--namespace", default="", help="share what is learned among the prompts")
    args = parser.parse_args()
    model = outpace.load("smollm2")
    prompts = [prompt for path in args.prompts for prompt in load_prompts(path, args.limit)]
    for name in args.methods.split(","):
        method = model.method(name, datastore=args.datastore)
        with Counting() as counting:
            for prompt in prompts:
                decoder = Decoder(model.target, model.tokenizer)
                ids = prompt_ids(model, prompt.turns[0])
                decoder.submit(
                    Request(
                        tuple(ids), method, max_new_tokens=args.length, stop_ids=model.eos_ids, namespace=args.namespace
                    )
                )
                decoder.run()
        print(f"{name}: {len(prompts)} prompts")
        for kind, (hits, tries) in sorted(counting.counts.items(), key=str):
            print(f"  {kind!s:>12}  {hits:6d} of {tries:6d}  {hits / tries:.3f}")


if __name__ == "__main__":
    main()
