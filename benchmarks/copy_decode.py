"""``copy-decode`` on the embedded code-editing prompts: known edits, and edits that the model writes itself.

python benchmarks/copy_decode.py [--model smollm2] [--dtype bfloat16] [--only known|model|spans] [--json FILE]

*Known*: each prompt has the edit that it asks for (:data:`EDITS`); a program that a diff finds is decoded, and every
choice that a model would have to make is made for it. The same edited text is decoded one token a forward (``none``)
and with lookup (``sam``), with every token decided as well. *Model*: the model writes the program under the automaton.

``tokens`` are those of the edited text, ``program`` what the program has beside them. ``per forward`` counts tokens of
the edited text. K/V is what was committed after the prompt, in KiB; ``in spans``: by forwards that committed a copied
span. Seconds are those after the first token. Where every token is decided, forwards of sixteen tokens and more compute
no logits at all; a model needs those of the last row to go on, so its forwards take one row of the LM head more.
*Spans*: milliseconds of one forward over a span, with the logits of all rows and with those of the last one alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import outpace
from outpace.constraints.copy_program import CopyProgram, lines_of
from outpace.constraints.edit_oracle import Rehearsed, edit_steps, program_tokens, worthwhile
from outpace.core.constraint import Bits, ConstraintState, bits_of
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.prompts.questions import load_prompts

SPAN = 8
"""Tokens that a forward commits at least where it counts as a copied span."""
EDITS: dict[str, str] = json.loads((Path(__file__).parent / "copy_decode_edits.json").read_text(encoding="utf-8"))
"""The edited code, by the prompt's id."""


def code_of(prompt: str) -> str:
    """The code that a prompt shows."""
    return prompt.split("```python\n")[1].partition("```")[0]


@dataclass(frozen=True, slots=True)
class Exactly:
    """A constraint under which only these tokens can be written; it tells nobody in advance."""

    tokens: tuple[int, ...]
    at: int = 0

    def begin(self) -> Exactly:
        return self

    def accepts(self, text: str) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return self.at == len(self.tokens)

    def allowed(self, size: int) -> Bits:
        return bits_of(self.tokens[self.at : self.at + 1], size)

    def advance(self, token: int) -> ConstraintState | None:
        right = not self.complete and token == self.tokens[self.at]
        return Exactly(self.tokens, self.at + 1) if right else None

    def forced(self) -> Sequence[int]:
        return ()


def decoded(model: outpace.Model, prompt: Sequence[int], method: Method, constraint: Any, length: int) -> Generation:
    """A greedy answer, with its rounds."""
    decoder = Decoder(model.target, model.tokenizer)
    params = SamplingParams(constraint=constraint)
    generation = decoder.submit(Request(tuple(prompt), method, params, length, model.eos_ids, trace=True))
    decoder.run()
    generation.raise_error()
    return generation


def figures(model: outpace.Model, one: Generation, text_tokens: int) -> dict[str, Any]:
    """What a decoded edit took."""
    spans = sum(len(each.committed) for each in one.rounds if len(each.committed) > SPAN)
    kib = model.target.kv_bytes_per_token / 1024
    return {
        "tokens": text_tokens,
        "program": len(one.tokens) - text_tokens,
        "forwards": one.metrics.rounds,
        "per_forward": text_tokens / one.metrics.rounds,
        "kv_kib": kib * len(one.tokens),
        "kv_kib_in_spans": kib * spans,
        "seconds": one.metrics.seconds - (one.metrics.first_token_seconds or 0.0),
    }


def known(model: outpace.Model, name: str, prompt: str) -> dict[str, dict[str, Any]]:
    """The known edit of a prompt: as a program, token by token, and with lookup."""
    before = code_of(prompt)
    after = EDITS[name]
    ids = model.tokenizer.chat([{"role": "user", "content": prompt}])
    program = CopyProgram(before, model.tokenizer)
    tokens = program_tokens(program, worthwhile(edit_steps(before, after), program))
    method = replace(model.method("copy-decode"), prepare=None)
    found = decoded(model, ids, method, Rehearsed(program, tokens), len(tokens) + 1)
    assert found.text == after, "the program must write the edit exactly"
    text = program.spelled(after)
    shows = program.shown()
    rows = {"copy-decode": figures(model, found, sum(map(shows, tokens)))}
    for other in ("none", "sam"):
        one = decoded(model, ids, model.method(other), Exactly(text), len(text) + 1)
        rows[other] = figures(model, one, len(text))
    return rows


def written(model: outpace.Model, name: str, prompt: str, length: int) -> dict[str, dict[str, Any]]:
    """The model's own program, and its own answer without one."""
    before = code_of(prompt)
    after = EDITS[name]
    ids = model.tokenizer.chat([{"role": "user", "content": prompt}])
    rows = {}
    for label in ("copy-decode", "none"):
        found = decoded(model, ids, model.method(label), None, length)
        shown = len(CopyProgram(before, model.tokenizer).spelled(found.text)) if found.text else 0
        rows[label] = figures(model, found, shown) | {
            "finished": found.finish_reason == "stop",
            "exact": found.text.strip() == after.strip(),
            "similarity": SequenceMatcher(None, lines_of(found.text), lines_of(after), autojunk=False).ratio(),
        }
    return rows


def spans(
    model: outpace.Model, lengths: Sequence[int] = (8, 32, 128, 512), times: int = 9
) -> list[tuple[int, float, float]]:
    """(tokens, milliseconds with all logits, with the last row's) of forwards over spans, medians in turn."""
    text = model.tokenizer.encode("".join(EDITS.values()))
    found = []
    for length in lengths:
        sequence = model.target.sequence(text[:256])
        model.target.prefill([sequence])
        took: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * times):
            left_out = bool(turn % 2)
            chain = TokenTree.chain(text[256 : 256 + length])
            chain.certain_rows = frozenset(range(length)) if left_out else frozenset()
            began = perf_counter()
            model.target.score([(sequence, chain)])
            took[left_out].append(1e3 * (perf_counter() - began))
        found.append((length, median(took[False]), median(took[True])))
    return found


def table(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Totals over prompts, a row for each method."""
    lines = ["| | tokens | program | forwards | per forward | K/V KiB | in spans | seconds |", "|" + "---|" * 8]
    for label in next(iter(rows.values())):
        ones = [row[label] for row in rows.values()]
        total = {key: sum(one[key] for one in ones) for key in ("tokens", "program", "forwards", "kv_kib", "seconds")}
        spans = sum(one["kv_kib_in_spans"] for one in ones)
        lines.append(
            f"| `{label}` | {total['tokens']} | {total['program']} | {total['forwards']} | "
            f"{total['tokens'] / total['forwards']:.2f} | {total['kv_kib']:.0f} | {spans:.0f} | "
            f"{total['seconds']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Decode, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", choices=("known", "model", "spans"))
    parser.add_argument("--max-new-tokens", type=int, default=480)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    model = outpace.load(asked.model, dtype=asked.dtype)
    prompts = load_prompts("code-editing")
    result: dict[str, Any] = {"model": asked.model, "dtype": str(model.info["dtype"])}
    if asked.only in (None, "known"):
        known(model, prompts[0].id, prompts[0].text)  # warms up
        result["known"] = {one.id: known(model, one.id, one.text) for one in prompts}
        print(f"known edits, {result['dtype']}\n\n{table(result['known'])}\n")
    if asked.only in (None, "spans"):
        result["spans"] = spans(model)
        print("span of tokens, ms with all logits, with those of the last row")
        for row in result["spans"]:
            print(f"{row[0]:5} {row[1]:8.1f} {row[2]:8.1f}")
    if asked.only in (None, "model"):
        result["model"] = {one.id: written(model, one.id, one.text, asked.max_new_tokens) for one in prompts}
        print(f"written by the model, {result['dtype']}\n\n{table(result['model'])}\n")
        for name, rows in result["model"].items():
            said = ", ".join(
                f"{label}: finished {row['finished']}, exact {row['exact']}, lines alike {row['similarity']:.2f}"
                for label, row in rows.items()
            )
            print(f"{name}: {said}")
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
