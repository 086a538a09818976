"""``copy-decode`` on the embedded code-editing prompts: known edits, and edits that the model writes itself.

python benchmarks/copy_decode.py [--model smollm2] [--dtype bfloat16] [--only known|model|spans] [--json FILE]

*Known*: each prompt has the edit that it asks for (:data:`EDITS`); a program that a diff finds is decoded, and every
choice that a model would have to make is made for it. The same edited text is decoded one token a forward (``none``)
and with lookup (``sam``), with every token decided as well. *Model*: the model writes the program itself under the
automaton; beside it its own answer without one. ``copy-decode alone`` drafts nothing but what the program decides.

``tokens`` are those of the text that is shown: the edited text, or a whole answer. ``directives`` are tokens that a
program has beside them, ``copied`` those of copied lines. ``per forward`` counts tokens of the text. K/V is what was
committed, in KiB: of the answer, of its copied lines, and of the prompt, which with copy-decode has the text's lines a
second time. Seconds are those after the first token. Where every token is decided, forwards of sixteen tokens and more
compute no logits at all; a model needs those of the last row to go on, so its forwards take one row of the LM head
more. ``exact``: the code is that of the known edit. ``alike``: the share of lines in common with it.

*Spans*: milliseconds of one forward over a span, with the logits of all rows and with those of the last one alone.

With ``--json`` every answer is kept as it comes, and a run that is started again goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
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
from outpace.core.files import write_atomically
from outpace.core.sampling import SamplingParams
from outpace.core.tree import TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.prompts.questions import load_prompts

Figures = dict[str, Any]

EDITS: dict[str, str] = json.loads((Path(__file__).parent / "copy_decode_edits.json").read_text(encoding="utf-8"))
"""The edited code, by the prompt's id."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "copy-decode": ("copy-decode", {}),
    "copy-decode with auto": ("copy-decode", {"parts": ["auto"]}),
    "copy-decode alone": ("copy-decode", {"parts": []}),
    "none": ("none", {}),
    "sam": ("sam", {}),
    "auto": ("auto", {}),
}
"""Methods and their settings. ``auto`` knows what a grammar forces, and so every token of a known edit."""
KNOWN = ("copy-decode", "copy-decode alone", "none", "sam")
WRITTEN = ("copy-decode", "copy-decode alone", "none", "sam")
_FENCED = re.compile(r"```[^\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def code_of(prompt: str) -> str:
    """The code that a prompt shows."""
    return prompt.split("```python\n")[1].partition("```")[0]


def code_in(answer: str) -> str:
    """The code of an answer: its first fenced block, or all of it."""
    found = _FENCED.search(answer)
    return found[1] if found else answer


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
    """A greedy answer."""
    decoder = Decoder(model.target, model.tokenizer)
    params = SamplingParams(constraint=constraint)
    generation = decoder.submit(Request(tuple(prompt), method, params, length, model.eos_ids))
    decoder.run()
    generation.raise_error()
    return generation


def figures(model: outpace.Model, one: Generation, program: CopyProgram | None) -> Figures:
    """What an answer took. ``program``: whose program it is, if it is one."""
    role: Callable[[int], str] = (lambda _: "new") if program is None else program.roles()
    roles = Counter(map(role, one.tokens))
    kib = model.target.kv_bytes_per_token / 1024
    text = roles["copied"] + roles["new"]
    return {
        "tokens": text,
        "directives": roles["directive"],
        "copied": roles["copied"],
        "forwards": one.metrics.rounds,
        "per_forward": text / one.metrics.rounds,
        "kv_kib": kib * len(one.tokens),
        "kv_kib_copied": kib * roles["copied"],
        "kv_kib_prompt": kib * one.metrics.prompt_tokens,
        "seconds": one.metrics.seconds - (one.metrics.first_token_seconds or 0.0),
    }


def known(model: outpace.Model, way: str, name: str, prompt: str) -> Figures:
    """The known edit of a prompt: as a program, or token by token, or with lookup."""
    after = EDITS[name]
    ids = model.tokenizer.chat([{"role": "user", "content": prompt}])
    program = CopyProgram(code_of(prompt), model.tokenizer)
    method = replace(model.method(*WAYS[way]), prepare=None)
    if method.name != "copy-decode":
        text = program.spelled(after)
        return figures(model, decoded(model, ids, method, Exactly(text), len(text) + 1), None)
    tokens = program_tokens(program, worthwhile(edit_steps(code_of(prompt), after), program))
    found = decoded(model, ids, method, Rehearsed(program, tokens), len(tokens) + 1)
    assert found.text == after, "the program must write the edit exactly"
    return figures(model, found, program)


def written(model: outpace.Model, way: str, name: str, prompt: str, length: int) -> Figures:
    """The model's own program, or its own answer without one."""
    method = model.method(*WAYS[way])
    ids = model.tokenizer.chat([{"role": "user", "content": prompt}])
    found = decoded(model, ids, method, None, length)
    is_program = method.name == "copy-decode"
    code = found.text if is_program else code_in(found.text)
    after = EDITS[name]
    return figures(model, found, CopyProgram(code_of(prompt), model.tokenizer) if is_program else None) | {
        "finished": found.finish_reason == "stop",
        "exact": code.strip() == after.strip(),
        "alike": SequenceMatcher(None, lines_of(code), lines_of(after), autojunk=False).ratio(),
        "answer": model.tokenizer.decode(found.tokens),
    }


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


HEADS = (
    ("tokens", "tokens"),
    ("directives", "directives"),
    ("copied", "copied"),
    ("forwards", "forwards"),
    ("K/V KiB", "kv_kib"),
    ("of copied lines", "kv_kib_copied"),
    ("of the prompt", "kv_kib_prompt"),
)


def table(rows: dict[str, dict[str, Figures]], judged: bool) -> str:
    """Totals over prompts, a row for each way."""
    more = ("finished", "exact", "alike") if judged else ()
    heads = ["", *(head for head, _ in HEADS), "tokens per forward", "seconds", *more]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for way in next(iter(rows.values())):
        ones = [row[way] for row in rows.values() if way in row]
        cells = [f"{sum(one[key] for one in ones):.0f}" for _, key in HEADS]
        cells.append(f"{sum(one['tokens'] for one in ones) / sum(one['forwards'] for one in ones):.2f}")
        cells.append(f"{sum(one['seconds'] for one in ones):.1f}")
        if judged:
            cells += [f"{sum(one[key] for one in ones)} of {len(ones)}" for key in ("finished", "exact")]
            cells.append(f"{sum(one['alike'] for one in ones) / len(ones):.2f}")
        lines.append(f"| `{way}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Decode, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", choices=("known", "model", "spans"))
    parser.add_argument("--ways", help=f"comma-separated, of: {', '.join(WAYS)}")
    parser.add_argument("--limit", type=int, help="how many of the prompts")
    parser.add_argument("--max-new-tokens", type=int, default=480)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    ways = asked.ways.split(",") if asked.ways else None
    if stray := [way for way in ways or () if way not in WAYS]:
        parser.error(f"unknown way '{stray[0]}'; there are: {', '.join(WAYS)}")
    model = outpace.load(asked.model, dtype=asked.dtype)
    settings = {"model": asked.model, "dtype": str(model.info["dtype"]), "max_new_tokens": asked.max_new_tokens}
    result: dict[str, Any] = {"settings": settings, "known": {}, "model": {}}
    if asked.json and asked.json.exists():
        result = json.loads(asked.json.read_text(encoding="utf-8"))
        if result["settings"] != settings:
            parser.error(f"{asked.json} was measured with other settings: {result['settings']}")
    prompts = load_prompts("code-editing", asked.limit)

    def run(part: str, chosen: Sequence[str], make: Callable[[str, Any], Figures]) -> None:
        warm = False
        for prompt in prompts:
            for way in chosen:
                row = result[part].setdefault(prompt.id, {})
                if way in row:
                    continue
                if not warm:
                    make(way, prompt)
                    warm = True
                row[way] = make(way, prompt)
                if asked.json:
                    asked.json.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(asked.json, json.dumps(result, indent=1).encode())
        print(f"{part}, {settings['model']}, {settings['dtype']}\n\n{table(result[part], part == 'model')}\n")

    if asked.only in (None, "known"):
        run("known", ways or KNOWN, lambda way, prompt: known(model, way, prompt.id, prompt.text))
    if asked.only in (None, "spans"):
        print("span of tokens, ms with all logits, with those of the last row")
        for length, whole, last in spans(model):
            print(f"{length:5} {whole:8.1f} {last:8.1f}")
    if asked.only in (None, "model"):
        run(
            "model",
            ways or WRITTEN,
            lambda way, prompt: written(model, way, prompt.id, prompt.text, asked.max_new_tokens),
        )
        for name, rows in result["model"].items():
            said = ", ".join(
                f"{way}: finished {row['finished']}, exact {row['exact']}, lines alike {row['alike']:.2f}"
                for way, row in rows.items()
            )
            print(f"{name}: {said}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
