"""benchmarks/structured_peers.py: a run that can be killed and goes on, and workers that are told a grammar."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import outpace
import structured_peers
from outpace.bench.peers.entries import Entry, Question
from outpace.bench.peers.processes import WORKERS, Job, WorkerProcess, worker_command
from outpace.bench.peers.stopping import TimeLimit
from outpace.bench.peers.weights import Weights, find
from outpace.bench.peers.worker import Worker, WorkerError, environment
from outpace.constraints import Grammar, compiled
from outpace.prompts.questions import load_prompts
from peers_support import fake

LIBRARY = """
import os

def load(settings):
    return Engine(settings)

class Engine:
    version, precision, failed, takes_grammars = "1", "toy", {{}}, True

    def __init__(self, settings):
        self.settings, self.count = settings, 0

    def answer(self, config, prompt, length, emit, grammar):
        self.count += 1
        with open({log!r}, "a") as log:
            log.write(f"{{config}} {{prompt[0]}} {{grammar['kind']}} {{bool(grammar['gbnf'])}} {{length}}\\n")
        if os.path.exists({fault!r}) and self.count == 3:
            os._exit(3)
        emit([1])
        emit([2, 3])
"""


def settings(file: Path) -> argparse.Namespace:
    """What the command line has asked for."""
    return argparse.Namespace(
        json=file,
        model="m",
        threads=1,
        kinds="extraction,sql",
        limit=4,
        max_new_tokens=5,
        timeout=30.0,
        max_minutes=None,
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that dies in its third answer while the file ``fault`` exists."""
    path = tmp_path / "library.py"
    path.write_text(LIBRARY.format(log=str(tmp_path / "log"), fault=str(tmp_path / "fault")))

    def one(asked: Any, job: Any, stop_ids: list[int]) -> list[structured_peers.Library]:
        told = job.settings({"none": {}, "auto": {}}, "bfloat16")
        command = [sys.executable, str(WORKERS / "serve.py"), str(path)]
        process = WorkerProcess([Entry("outpace", "grammar", ours=False)], command, told)
        return [structured_peers.Library("outpace", process, "bfloat16", ("none", "auto"))]

    monkeypatch.setattr(structured_peers, "libraries", one)
    monkeypatch.setattr(structured_peers, "find", lambda *_: Weights("m", "/m", None, "", True))
    monkeypatch.setattr(structured_peers, "_stop_ids", lambda _: [0])
    monkeypatch.setattr(
        structured_peers,
        "encode",
        lambda weights, prompts, length: ([Question(one.id, "x", (at,)) for at, one in enumerate(prompts)], None),
    )
    return tmp_path


def run(file: Path) -> dict[str, Any]:
    """One run; returns what stands in the file then."""
    known = json.loads(file.read_text()) if file.exists() else {"libraries": {}, "answers": {}}
    structured_peers.measure(settings(file), known)
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def test_a_run_goes_on_where_it_ended_and_asks_failures_again(place: Path) -> None:
    file, log = place / "out.json", place / "log"
    (place / "fault").touch()
    first = run(file)["answers"]
    done = {(row, name) for row, each in first.items() for name, one in each.items() if "tokens" in one}
    failed = [one["error"] for each in first.values() for one in each.values() if "error" in one]
    assert len(done) == 1 and len(failed) == 1 and "exit code 3" in failed[0]
    (place / "fault").unlink()
    log.unlink()
    whole = run(file)["answers"]
    assert {row: len(each) for row, each in whole.items()} == {"outpace none bfloat16": 4, "outpace auto bfloat16": 4}
    assert all(one["tokens"] == [1, 2, 3] for each in whole.values() for one in each.values())
    asked = log.read_text().splitlines()
    assert len(asked) == 8 - len(done) + 2, "what is missing, and each row once more to warm up"
    assert {line.split()[2:] == ["lark", "True", "5"] for line in asked if "lark" in line} == {True}
    assert {line.split()[2:] == ["schema", "False", "5"] for line in asked if "schema" in line} == {True}
    log.unlink()
    assert run(file)["answers"] == whole
    assert not log.exists(), "nothing was left to ask"


def test_every_library_has_a_worker_and_vllm_its_grammars() -> None:
    asked = argparse.Namespace(
        dtypes="bfloat16,int4", methods="none,auto", peers="llama.cpp,vllm", vllm_python="other-python"
    )
    job = Job(Weights("m", "/m", "/m.gguf", "Q4_1", True), None, "bfloat16", 1, 256)
    found = structured_peers.libraries(asked, job, [2])
    assert {one.rows for one in found if one.name == "llama.cpp"} == {("GBNF", structured_peers.ON_DEMAND)}
    assert [(one.name, one.precision) for one in found] == [
        ("outpace", "bfloat16"),
        ("outpace", "int4"),
        *(("llama.cpp", format_) for format_ in structured_peers.LLAMA_FORMATS),
        ("vllm", "bfloat16"),
    ]
    assert all(Path(one.process.command[2]).is_file() for one in found)
    vllm = found[-1].process
    assert vllm.foreign and vllm.command[0] == "other-python"
    assert vllm.settings["engine"]["structured_outputs_config"]["backend"] == "xgrammar"
    assert vllm.settings["stop_ids"] == [2] and vllm.settings["dtype"] == "bfloat16"


def test_the_table_counts_valid_answers_and_those_that_equal_plain_decoding() -> None:
    def answers(*tokens: list[int]) -> dict[str, dict[str, Any]]:
        ids = ("structured-sql-1", "structured-sql-2")
        return {id_: {"tokens": one, "seconds": 1.0, "valid": True} for id_, one in zip(ids, tokens, strict=True)}

    result = {
        "answers": {
            "outpace none bfloat16": answers([1, 2, 3], [1, 2]),
            "outpace auto bfloat16": answers([1, 2, 3], [1, 9]),
            "vllm xgrammar bfloat16": answers([1, 2, 3, 4, 5], [1, 9]),
        }
    }
    cells = {
        line.split(" | ")[0]: [one.strip() for one in line.strip("|").split(" | ")[5:]]
        for line in structured_peers.table(result, 5, ["sql"]).splitlines()[2:]
    }
    assert cells == {
        "| outpace `none`": ["2 of 2", "0", ""],
        "| outpace `auto`": ["2 of 2", "0", "1 of 2"],
        "| vllm `xgrammar`": ["1 of 1", "1", ""],
    }


def result(*rows: str, wrong: str = "") -> dict[str, Any]:
    """A file in which these rows have answered all sixty prompts, but for ``wrong``, which has refused all SQL."""
    ids = [one.id for one in load_prompts("structured")]
    answer = {"tokens": [1, 2, 3], "ttft_ms": 5.0, "valid": True}
    answers: dict[str, Any] = {
        name: {id_: {**answer, "seconds": 1.0 if name.startswith("outpace auto") else 3.0} for id_ in ids}
        for name in rows
    }
    if wrong:
        answers[wrong] |= {id_: {"error": "no such rule"} for id_ in ids if "-sql-" in id_}
    return {
        "settings": {"model": "m", "max_new_tokens": 5, "threads": 2},
        "machine": {"cpu": "a CPU"},
        "libraries": {
            "outpace bfloat16": {"error": "", "version": "1"},
            "vllm bfloat16": {"error": "", "version": "2"},
        },
        "answers": answers,
    }


AUTO, XGRAMMAR = "outpace auto bfloat16", "vllm xgrammar bfloat16"


def test_rows_stand_beside_those_of_their_precision_alone() -> None:
    names = [f"outpace auto {dtype}" for dtype in ("bfloat16", "float32", "int4")]
    found = structured_peers.summary(
        result(*names, "llama.cpp GBNF own", "llama.cpp GBNF BF16", "vllm xgrammar float32")
    )
    assert [(line.split(", ")[1].split(":")[0], line.split("(")[-1]) for line in found] == [
        ("bfloat16", "llama.cpp `GBNF` BF16)."),
        ("4 bits", "llama.cpp `GBNF` own)."),
        ("float32", "vllm `xgrammar` float32)."),
    ]


def test_refusals_stand_below_the_tables_with_their_reason() -> None:
    found = result(AUTO, XGRAMMAR, wrong=XGRAMMAR)
    found["libraries"]["llama.cpp BF16"] = {"error": "ModuleNotFoundError: llama_cpp", "version": ""}
    started, answered = structured_peers.refusals(found)
    assert started == "* llama.cpp BF16 was not started: ModuleNotFoundError: llama_cpp"
    count = sum("-sql-" in one.id for one in load_prompts("structured"))
    assert f"vllm `xgrammar` bfloat16 did not answer {count} of 60 prompts (sql-" in answered
    assert answered.endswith("): no such rule")
    [all_of, none_of] = (structured_peers.table(found, 5, one).splitlines()[2] for one in (["sql", "list"], ["sql"]))
    assert f"| {sum('-list-' in one.id for one in load_prompts('structured'))} |" in all_of and "| 0 |" in none_of


def main(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | str, page: Path, *more: str) -> int:
    file = page.with_suffix(".json")
    file.write_text(found if isinstance(found, str) else json.dumps(found))
    monkeypatch.setattr(outpace, "load", lambda _: None)
    monkeypatch.setattr(structured_peers, "valid", lambda *_: None)
    given = ["--json", str(file), "--table", "--page", str(page), "--model", "m", "--threads", "2", *more]
    monkeypatch.setattr("sys.argv", ["structured_peers.py", *given, "--max-new-tokens", "5"])
    return structured_peers.main()


def test_the_page_is_rewritten_when_every_row_has_answered_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(before := f"before\n\n{structured_peers.BEGIN}\n\nold\n\n{structured_peers.END}\nafter\n")
    part = result(AUTO, XGRAMMAR)
    for name in list(part["answers"][XGRAMMAR])[:7]:
        del part["answers"][XGRAMMAR][name]
    assert main(monkeypatch, part, page) == 0
    assert page.read_text() == before and "7 answers are missing" in capsys.readouterr().err
    for _ in range(2):
        assert main(monkeypatch, result(AUTO, XGRAMMAR, wrong=XGRAMMAR), page) == 0
    text = page.read_text()
    assert text.startswith("before\n\n<!--") and text.endswith("-->\nafter\n") and "old" not in text
    assert text.count("| outpace `auto` | bfloat16 |") == 6, "all prompts, and each kind"
    assert "outpace 1, vllm 2; m, greedy, 5 tokens at most, 2 threads, a CPU." in text
    assert "on JSON extraction, bfloat16: 3.00" in text and "(vllm `xgrammar` bfloat16)." in text
    assert "did not answer" in text


@pytest.mark.parametrize(
    ("found", "more", "said"),
    [
        ("no json", [], "is no file of this command"),
        ({"settings": {"model": "other"}}, [], "measured with other settings"),
        (result(AUTO), ["--kinds", "sql,sqk"], "there is no sqk"),
        (result(AUTO), [], "has no marks"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(
    found: Any, more: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text("no marks")
    assert main(monkeypatch, found, page, *more) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and err.count("\n") == 1
    assert page.read_text() == "no marks"


def test_the_documentation_has_the_marks() -> None:
    page = (Path(structured_peers.__file__).parents[1] / "docs" / "constrained.md").read_text()
    assert "| outpace `auto` |" in structured_peers.rewritten(page, result(AUTO))


def ask(worker: Worker, grammar: Grammar | None, prompt: list[int], length: int, config: str) -> dict[str, Any]:
    told = {} if grammar is None else {"grammar": {"kind": grammar.kind, "source": grammar.source, "gbnf": ""}}
    return worker.ask({"do": "answer", "config": config, "prompt": prompt, "length": length, **told})


def test_a_worker_that_knows_no_grammars_says_so(tmp_path: Path) -> None:
    process = fake(tmp_path, "plain")
    worker = Worker(process.command, environment(1, foreign=False, offline=True), 30, TimeLimit())
    worker.ask({"do": "load", "settings": process.settings})
    with pytest.raises(WorkerError, match="takes no grammars"):
        ask(worker, Grammar.choice(["a"]), [1], 3, "plain")
    assert len(ask(worker, None, [1], 3, "plain")["tokens"]) == 3
    worker.close()


@pytest.mark.model
def test_outpaces_own_worker_holds_answers_to_a_grammar_and_ends_them() -> None:
    model = outpace.load("smollm2", dtype="bfloat16")
    prompt = load_prompts("structured", 1)[0]
    assert prompt.grammar is not None
    ids = list(model.tokenizer.chat(prompt.messages))
    told: dict[str, Any] = {
        "model": "smollm2", "dtype": "bfloat16", "threads": 1, "draft": None, "heads": [],
        "configs": {"none": {}, "auto": {}},
    }  # fmt: skip
    command = worker_command(sys.executable, "ours.py")
    worker = Worker(command, environment(1, foreign=False, offline=True), 120, TimeLimit())
    worker.ask({"do": "load", "settings": told})
    found = {config: ask(worker, prompt.grammar, ids, 160, config)["tokens"] for config in ("none", "auto")}
    assert found["none"] == found["auto"] and len(found["none"]) < 160
    assert compiled(prompt.grammar, model.tokenizer).accepts(model.tokenizer.decode(found["none"]))
    assert len(ask(worker, None, ids, 7, "none")["tokens"]) == 7
    worker.close()


@pytest.mark.model
@pytest.mark.slow
def test_llama_cpp_finds_the_same_answers_when_its_grammar_is_asked_on_demand() -> None:
    pytest.importorskip("llama_cpp")
    model, weights = outpace.load("smollm2"), find("smollm2", "bfloat16")
    told = Job(weights, None, "bfloat16", 2, 512).settings({"grammar": {}}, "bfloat16")
    worker = Worker(
        worker_command(sys.executable, "llama_cpp.py"), environment(2, foreign=False, offline=True), 200, TimeLimit()
    )
    worker.ask({"do": "load", "settings": told})
    for prompt in [one for one in load_prompts("structured") if one.id.endswith("-1")]:
        assert prompt.grammar is not None
        source, ids = prompt.grammar.source, list(model.tokenizer.chat(prompt.messages))
        masks = {"kind": prompt.grammar.kind, "source": source, "gbnf": ""}
        masks["gbnf"] = structured_peers.gbnf(source) if prompt.grammar.kind == "lark" else ""
        both = [
            worker.ask(
                {"do": "answer", "config": "grammar", "prompt": ids, "length": 24,
                 "grammar": masks | {"on_demand": on_demand}}
            )["tokens"]
            for on_demand in (False, True)
        ]  # fmt: skip
        assert both[0] == both[1], prompt.id
    worker.close()
