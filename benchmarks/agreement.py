"""How often draft tokens are right that a copying drafter and a head propose for one position, beside what each stated.

    python benchmarks/agreement.py PROMPTS... --limit 60 --temperature 0

Decodes with `auto` while its learned part is asked in every round, and compares the two drafts of each round with the
tokens that were committed, as far as both drafts contain them. ``drafting/agreement.py`` states the probabilities of
united drafts by this table.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import outpace
from outpace.acceptance.base import Verdict
from outpace.api.requests import prompt_ids
from outpace.controllers.yields import Yield
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.agreement import following
from outpace.engine.decoder import Decoder
from outpace.engine.request import Request
from outpace.methods.combination.auto_drafter import Auto
from outpace.methods.combination.auto_state import AutoState
from outpace.prompts.questions import load_prompts

BOUNDS = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 1.0)
FEW = 10
"""Cells with fewer draft tokens are not shown."""


@dataclass(slots=True)
class Cell:
    """Draft tokens of one kind: how many, how many were right, and the sums of what both drafters stated."""

    count: int = 0
    hits: int = 0
    copied: float = 0.0
    read: float = 0.0


Table = dict[str, dict[tuple[float, float], Cell]]


def compare(table: Table, copied: TokenTree, read: TokenTree, committed: Seq[int]) -> None:
    """Count the draft tokens of both drafts along what was committed."""
    at: list[int | None] = [ROOT, ROOT]
    for token in committed:
        copies, own = [
            {} if node is None else following(tree, node) for tree, node in zip((copied, read), at, strict=True)
        ]
        for other in copies.keys() | own.keys():
            kind = "both" if other in copies and other in own else "copied alone" if other in copies else "read alone"
            if kind == "copied alone" and not own:
                kind = "copied, nothing read"
            stated = copies.get(other, max(copies.values(), default=0.0)), own.get(other, sum(own.values()))
            cell = table[kind][_bound(stated[0]), _bound(stated[1])]
            cell.count += 1
            cell.hits += other == token
            cell.copied += stated[0]
            cell.read += stated[1]
        at = [None if node is None else tree.child(node, token) for tree, node in zip((copied, read), at, strict=True)]


def _bound(prob: float) -> float:
    return next(bound for bound in BOUNDS if prob <= bound or bound == BOUNDS[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    model = outpace.load("smollm2")
    table: Table = defaultdict(lambda: defaultdict(Cell))
    observe = Auto.observe_batch

    def observed(drafter: Auto, states: Seq[AutoState], verdicts: Seq[Verdict]) -> None:
        for state, verdict in zip(states, verdicts, strict=True):
            if state.asked is not None:
                compare(table, state.free, state.asked.learned, verdict.committed)
        observe(drafter, states, verdicts)

    def always(*_: object) -> list[float]:
        return [0.9] * 5

    Auto.observe_batch, Yield.expected = observed, always  # type: ignore[method-assign,assignment]
    method = model.method("auto")
    params = SamplingParams(temperature=args.temperature, seed=7) if args.temperature else SamplingParams()
    for prompt in [prompt for path in args.prompts for prompt in load_prompts(path, args.limit)]:
        decoder = Decoder(model.target, model.tokenizer)
        ids = tuple(prompt_ids(model, prompt.turns[0]))
        decoder.submit(Request(ids, method, params, max_new_tokens=args.length, stop_ids=model.eos_ids))
        decoder.run()
    for kind, cells in sorted(table.items()):
        print(f"{kind}: copies stated, head stated (of other tokens together where it lacks this one), right, of")
        for _, cell in sorted(cells.items()):
            if cell.count >= FEW:
                figures = cell.copied / cell.count, cell.read / cell.count, cell.hits / cell.count
                print("  " + "  ".join(f"{figure:.3f}" for figure in figures) + f"  {cell.count:6d}")


if __name__ == "__main__":
    main()
