"""Answers under grammars beside other libraries: JSON extraction, arguments of functions, SQL, lists and edits.

python benchmarks/structured_peers.py --json runs/structured.json [--kinds extraction,sql] [--limit 10]

``make structured-peers`` installs the other libraries, asks all sixty prompts, and writes docs/constrained.md.

Every library answers a prompt in turn, in an order that rotates, each in a process of its own with its own masks:
outpace (``none``, which does not speculate, and ``auto``) in bfloat16 and int4, llama.cpp through llama-cpp-python with
GBNF in bfloat16 and in 4-bit formats, vLLM's CPU build with xgrammar in bfloat16. All get the same token ids, greedy,
and end where the grammar does. llama.cpp has two rows: ``GBNF`` is llama-cpp-python's sampler, which asks the grammar
about all tokens; ``GBNF-on-demand`` is the way of llama.cpp's own programs, which ask about the likeliest one first.

The JSON file is written whole after every answer. Started again with the same file the run goes on where it was, also
after a kill, and asks again what ended with an error; ``--max-minutes`` ends it in between. With ``--table`` it only
prints. ``--page`` rewrites the lines between the two marks of a page, once every row has answered or refused all sixty
prompts. A library that was not started, and answers that were refused, stand below the tables with the reason; a prompt
that one row refuses is left out of the other rows of its precision.

Rates are tokens after the first by seconds after the first, in total over prompts. Ratios are of these,
outpace's ``auto`` in the same precision to each row, with a 95 % interval (paired bootstrap over prompts). A finished
answer is *valid* where outpace's constraint accepts it, whatever its white space, and the package jsonschema does where
it is installed. ``as none``: how many answers of another method of outpace have the tokens of the one without
speculation.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outpace.bench.peers.comparison import encode
from outpace.bench.peers.entries import Entry
from outpace.bench.peers.gguf_formats import OWN
from outpace.bench.peers.launcher import Launcher
from outpace.bench.peers.processes import Job, WorkerProcess, context_for, worker_command
from outpace.bench.peers.stopping import TimeLimit
from outpace.bench.peers.weights import find
from outpace.bench.peers.worker import Worker, WorkerError
from outpace.bench.statistics import Rate, speedup, speedup_interval, total_rate
from outpace.core import machine
from outpace.core.errors import BadInput, OutpaceError
from outpace.core.files import write_atomically
from outpace.core.machine import usable_cpus
from outpace.core.version import __version__
from outpace.prompts.questions import load_prompts, stratified
from schema_suite import Judge

LLAMA_FORMATS = ("BF16", OWN, "Q4_0")
SAME = {"BF16": "bfloat16", "int4": "4 bits", OWN: "4 bits", "Q4_0": "4 bits"}
"""Formats that are compared with those of another name; every other with its own kind alone."""
KINDS = ("extraction", "function", "sql", "list", "edit")
BEGIN, END = "<!-- table: structured peers -->", "<!-- end of the table -->"
"""Between these lines of a page the tables stand."""
ON_DEMAND = "GBNF-on-demand"
VLLM_ENGINE = {
    "skip_tokenizer_init": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


@dataclass(slots=True)
class Library:
    """One process and its rows."""

    name: str
    process: WorkerProcess
    precision: str
    rows: tuple[str, ...]
    error: str = ""
    worker: Worker | None = None
    warm: set[str] = field(default_factory=set)
    """Rows that have answered in this run."""


def gbnf(lark: str) -> str:
    """The grammars of the embedded prompts in GBNF: rules of literals, alternatives, and character classes."""
    out = []
    for line in lark.splitlines():
        name, _, body = line.partition(":")
        body = re.sub(r"/((?:[^/\\]|\\.)*)/", lambda found: _classes(found[1]), body)
        body = re.sub(r"~(\d+)\.\.(\d+)", r"{\1,\2}", body)
        parts = re.split(r'("(?:[^"\\]|\\.)*"|\[[^\]]*\])', f"{name.replace('start', 'root')} ::={body}")
        # Outside of literals and classes, names in capitals are rules like the others.
        out.append("".join(part if index % 2 else part.lower() for index, part in enumerate(parts)))
    return "\n".join(out) + "\n"


def _classes(pattern: str) -> str:
    """A regular expression of literal characters and classes, as a sequence of GBNF."""
    pieces = re.findall(r"\[[^\]]*\](?:\{\d+,\d+\}|[+*?])?|[^\[\]]", pattern)
    return " ".join(piece if piece.startswith("[") else json.dumps(piece) for piece in pieces)


def libraries(asked: argparse.Namespace, job: Job, stop_ids: list[int]) -> list[Library]:
    """The processes that are wanted and can be started here."""

    def process(name: str, python: str, worker: str, dtype: str, **more: Any) -> WorkerProcess:
        settings = job.settings({row: {} for row in more.pop("rows", ("grammar",))}, dtype)
        settings |= {"stop_ids": stop_ids, "engine": more.pop("engine", {})}
        return WorkerProcess([Entry(name, "grammar", ours=False)], worker_command(python, worker), settings, **more)

    found = []
    for dtype in asked.dtypes.split(","):
        rows = tuple(asked.methods.split(","))
        found.append(Library("outpace", process("outpace", sys.executable, "ours.py", dtype, rows=rows), dtype, rows))
    if job.weights.gguf and "llama.cpp" in asked.peers:
        for format_ in LLAMA_FORMATS:
            requantize = None if format_ == OWN else format_
            one = process("llama.cpp", sys.executable, "llama_cpp.py", "bfloat16", requantize=requantize)
            found.append(Library("llama.cpp", one, format_, ("GBNF", ON_DEMAND)))
    if "vllm" in asked.peers:
        one = process("vllm", asked.vllm_python, "vllm.py", "bfloat16", foreign=True, engine=VLLM_ENGINE)
        found.append(Library("vllm", one, "bfloat16", ("xgrammar",)))
    return found


def measure(asked: argparse.Namespace, result: dict[str, Any]) -> None:
    """Ask what is not answered yet, and write the file after every answer."""
    weights = find(asked.model, "bfloat16")
    prompts = [one for one in load_prompts("structured") if one.id.split("-")[1] in asked.kinds.split(",")]
    prompts = stratified(prompts, asked.limit) if asked.limit else prompts
    questions, _ = encode(weights, prompts, asked.max_new_tokens)
    longest = max(len(one.tokens) for one in questions)
    job = Job(weights, None, "bfloat16", asked.threads, context_for(longest, asked.max_new_tokens))
    stop_ids = _stop_ids(asked.model)
    found = libraries(asked, job, stop_ids)
    limit = TimeLimit(asked.max_minutes)
    launcher = Launcher(asked.threads, asked.timeout, weights.local, limit, print)
    try:
        for one in found:
            version = _start(one, launcher)
            result["libraries"][f"{one.name} {one.precision}"] = {"error": one.error, "version": version}
        asking = list(enumerate(zip(prompts, questions, strict=True)))
        # What failed in an earlier run comes last: a prompt that ends its library's process must not stop the others.
        asking.sort(key=lambda each: _failed(result, each[1][0].id))
        for number, (prompt, question) in asking:
            assert prompt.grammar is not None
            grammar = prompt.grammar
            masks = {"kind": grammar.kind, "source": grammar.source}
            masks["gbnf"] = gbnf(grammar.source) if grammar.kind == "lark" else ""
            told = {"prompt": list(question.tokens), "grammar": masks, "length": asked.max_new_tokens}
            turns = [(one, row) for one in found for row in one.rows]
            shift = number % len(turns)
            for one, row in (*turns[shift:], *turns[:shift]):
                if one.worker is None:  # it stands below the tables with its reason
                    continue
                answers = result["answers"].setdefault(f"{one.name} {row} {one.precision}", {})
                if "tokens" not in answers.get(prompt.id, {}):
                    answers[prompt.id] = _answer(one, row, told)
                    save(asked.json, result)
            limit.check()
    finally:
        launcher.close(now=True)


def _failed(result: Mapping[str, Any], prompt: str) -> bool:
    """Whether any library has failed to answer a prompt."""
    return any("error" in answers.get(prompt, {}) for answers in result["answers"].values())


def _start(one: Library, launcher: Launcher) -> str:
    """Start the library's process; its version, "" where it does not start."""
    try:
        one.worker, loaded = launcher.start(one.process)
    except WorkerError as error:
        one.error = str(error)
        print(f"{one.name} {one.precision}: {error}", file=sys.stderr)
        return ""
    return str(loaded["version"])


def save(path: Path, result: dict[str, Any]) -> None:
    """All of the file, or what was there before: a run that is killed can go on."""
    write_atomically(path, json.dumps(result, indent=1).encode())


def _answer(one: Library, row: str, told: dict[str, Any]) -> dict[str, Any]:
    """One answer; before a row's first of this run the same once more, so that it has warmed up."""
    assert one.worker is not None
    masks = told["grammar"] | {"on_demand": row == ON_DEMAND}
    request = {"do": "answer", "config": row if one.name == "outpace" else "grammar", **told, "grammar": masks}
    try:
        if row not in one.warm:
            one.worker.ask(request)
            one.warm.add(row)
        reply = one.worker.ask(request)
    except WorkerError as error:
        if error.fatal:
            one.worker, one.error = None, str(error)
        return {"error": str(error)}
    return {name: reply[name] for name in ("tokens", "first", "seconds", "ttft_ms")}


def _stop_ids(model: str) -> list[int]:
    import outpace

    return sorted(outpace.load(model).eos_ids)


def valid(result: dict[str, Any], model: Any) -> None:
    """Note of every answer whether it is valid. JSON is laid out as the constraint has it first."""
    from outpace.constraints import compiled

    judged = find_spec("jsonschema") is not None
    grammars = {one.id: one.grammar for one in load_prompts("structured")}
    for answers in result["answers"].values():
        for name, one in answers.items():
            grammar = grammars[name]
            if "tokens" not in one or grammar is None:
                continue
            text, right = model.tokenizer.decode(one["tokens"]), True
            if grammar.kind == "schema":
                try:
                    value = json.loads(text)
                except ValueError:
                    text = ""
                else:
                    text = json.dumps(value, ensure_ascii=False)
                    right = not judged or Judge(json.loads(grammar.source)).valid(value) is not False
            one["valid"] = right and compiled(grammar, model.tokenizer).accepts(text)


def table(result: dict[str, Any], length: int, kinds: list[str]) -> str:
    """Rows by precision and rate; of the prompts that all rows of a precision have answered."""
    lines = [
        "| library | precision | prompts | tokens/s | `auto` beside it | valid of finished | cut | as `none` |",
        "|" + "---|" * 8,
    ]
    for mine in _by_precision(result).values():
        ids = _shared(mine, kinds)
        reference = next((rates(one, ids) for name, one in mine.items() if name.startswith("outpace auto")), None)
        for name, one in sorted(mine.items(), key=lambda pair: -(total_rate(rates(pair[1], ids)) or 0.0)):
            finished = [one[id_] for id_ in ids if len(one[id_]["tokens"]) < length]
            good = sum(bool(each.get("valid")) for each in finished)
            library, row, format_ = name.rsplit(" ", 2)
            ratio = _ratio(rates(one, ids), reference)
            rate = total_rate(rates(one, ids)) or 0.0
            lines.append(
                f"| {library} `{row}` | {format_} | {len(ids)} | {rate:.0f} | {ratio} | {good} of {len(finished)} | "
                f"{len(ids) - len(finished)} | {_as_none(name, mine, ids)} |"
            )
    return "\n".join(lines)


Answers = dict[str, dict[str, Any]]


def _by_precision(result: dict[str, Any]) -> dict[str, dict[str, Answers]]:
    """The rows that have answered anything, by precision."""
    rows = {name: one for name, one in result["answers"].items() if any("tokens" in each for each in one.values())}
    groups: dict[str, dict[str, Answers]] = {"bfloat16": {}, "4 bits": {}}
    for name, one in rows.items():
        format_ = name.split()[-1]
        groups.setdefault(SAME.get(format_, format_), {})[name] = one
    return {precision: mine for precision, mine in groups.items() if mine}


def _shared(rows: dict[str, Answers], kinds: list[str]) -> list[str]:
    """The prompts of some kinds that all of the rows have answered."""
    answered = [{id_ for id_, one in each.items() if "tokens" in one} for each in rows.values()]
    return sorted(id_ for id_ in set.intersection(*answered) if id_.split("-")[1] in kinds)


def refusals(result: dict[str, Any]) -> list[str]:
    """A line for each library that was not started, and for each reason for which answers were refused."""
    told = [f"* {name} was not started: {one['error']}" for name, one in result["libraries"].items() if one["error"]]
    for name, answers in result["answers"].items():
        library, row, precision = name.rsplit(" ", 2)
        whys: dict[str, list[str]] = {}
        for id_, one in answers.items():
            if "error" in one:
                whys.setdefault(one["error"], []).append(id_.removeprefix("structured-"))
        told += [
            f"* {library} `{row}` {precision} did not answer {len(ids)} of {len(answers)} prompts "
            f"({', '.join(ids[:4])}{', ...' if len(ids) > 4 else ''}): {why}"
            for why, ids in whys.items()
        ]
    return told


def missing(result: dict[str, Any]) -> int:
    """Answers that have neither come nor been refused, of all sixty prompts and the rows that were asked."""
    whole = len(load_prompts("structured"))
    return sum(whole - len(answers) for answers in result["answers"].values()) or (0 if result["answers"] else whole)


def summary(result: dict[str, Any]) -> list[str]:
    """outpace's ``auto`` beside the fastest other library, on JSON extraction."""
    told = []
    for precision, mine in _by_precision(result).items():
        ids = _shared(mine, ["extraction"])
        auto = next((one for name, one in mine.items() if name.startswith("outpace auto")), None)
        others = {name: one for name, one in mine.items() if not name.startswith("outpace ")}
        if auto is None or not others or not ids:
            continue
        best = max(others, key=lambda name: total_rate(rates(others[name], ids)) or 0.0)
        library, row, format_ = best.rsplit(" ", 2)
        told.append(
            f"`auto` beside the fastest other library on JSON extraction, {precision}: "
            f"{_ratio(rates(others[best], ids), rates(auto, ids))} ({library} `{row}` {format_})."
        )
    return told


def rewritten(page: str, result: dict[str, Any]) -> str:
    """The page with what stands between its marks replaced. Raises BadInput for one without the marks."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise BadInput(f"the page has no marks {BEGIN} and {END}")
    settings = result["settings"]
    length = settings["max_new_tokens"]
    versions = dict.fromkeys(f"{name.split()[0]} {one['version']}" for name, one in result["libraries"].items())
    lines = [
        f"{', '.join(versions)}; {settings['model']}, greedy, {length} tokens at most, {settings['threads']} threads, "
        f"{result['machine']['cpu']}.",
        "",
    ]
    for title, group in (
        ("All sixty prompts", list(KINDS)),
        *(("SQL" if one == "sql" else one.capitalize(), [one]) for one in KINDS),
    ):
        lines += [f"{title}:", "", table(result, length, group), ""]
    for block in (summary(result), refusals(result)):
        lines += [*block, ""] if block else []
    return "\n".join((before + BEGIN, "", *lines, END + after))


def rates(answers: dict[str, dict[str, Any]], ids: list[str]) -> list[Rate]:
    """(tokens, seconds) after the first token of each answer."""
    return [(len(answers[id_]["tokens"]) - answers[id_].get("first", 1), answers[id_]["seconds"]) for id_ in ids]


def _as_none(name: str, rows: dict[str, dict[str, dict[str, Any]]], ids: list[str]) -> str:
    """How many answers of a row of outpace have the tokens of the one that does not speculate; "" for other rows."""
    library, row, precision = name.rsplit(" ", 2)
    plain = rows.get(f"{library} none {precision}")
    if library != "outpace" or row == "none" or plain is None:
        return ""
    return f"{sum(rows[name][id_]['tokens'] == plain[id_]['tokens'] for id_ in ids)} of {len(ids)}"


def _ratio(mine: list[Rate], auto: list[Rate] | None) -> str:
    if auto is None or auto == mine:
        return ""
    ratio, interval = speedup(auto, mine), speedup_interval(auto, mine)
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if interval is None else f"{ratio:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    parser.add_argument("--page", type=Path, help="write the tables between its marks, when all is answered")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--methods", default="none,auto")
    parser.add_argument("--dtypes", default="bfloat16,int4")
    parser.add_argument("--peers", default="llama.cpp,vllm")
    parser.add_argument("--vllm-python", default=".peers/vllm/bin/python")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--max-minutes", type=float)
    asked = parser.parse_args()
    try:
        known: dict[str, Any] = json.loads(asked.json.read_text("utf-8")) if asked.json.exists() else {}
    except ValueError:
        print(f"error: {asked.json} is no file of this command", file=sys.stderr)
        return 2
    unknown = set(asked.kinds.split(",")) - set(KINDS)
    if unknown:
        print(f"error: --kinds: there is no {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    settings = {"model": asked.model, "max_new_tokens": asked.max_new_tokens, "threads": asked.threads}
    if known and known.get("settings") != settings:
        print(f"error: {asked.json} was measured with other settings: {known.get('settings')}", file=sys.stderr)
        return 2
    result = known or {
        "version": __version__,
        "machine": machine.describe(),
        "settings": settings,
        "libraries": {},
        "answers": {},
    }
    if not asked.table:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        try:
            measure(asked, result)
        except OutpaceError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as stop:  # or the time limit: what was measured stands in the file
            print(f"stopped: {stop}", file=sys.stderr)
    import outpace

    valid(result, outpace.load(asked.model))
    save(asked.json, result)
    kinds = asked.kinds.split(",")
    for group in (kinds, *([kind] for kind in kinds if len(kinds) > 1)):
        print(f"\n{', '.join(group)}\n\n{table(result, asked.max_new_tokens, group)}")
    print("", *summary(result), *refusals(result), sep="\n")
    return 0 if asked.page is None else _write(asked.page, result)


def _write(page: Path, result: dict[str, Any]) -> int:
    """Rewrite the page, if nothing is missing; the exit code."""
    if left := missing(result):
        print(f"{page} is as it was: {left} answers are missing; the same command goes on", file=sys.stderr)
        return 0
    try:
        write_atomically(page, rewritten(page.read_text("utf-8"), result).encode())
    except (OSError, OutpaceError) as error:
        print(f"error: cannot write the tables to {page}: {error}", file=sys.stderr)
        return 2
    print(f"written to {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
