"""The options of grammars on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_support import Run, refused
from outpace.cli.options import Constrained
from outpace.constraints.grammar import Grammar
from outpace.core.errors import BadInput


def test_a_grammar_of_every_form(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text('{"type": "integer"}')
    schema = Grammar.schema({"type": "integer"})
    assert Constrained(schema=str(file)).read() == Constrained(schema='{"type": "integer"}').read() == schema
    assert Constrained(regex="a+").read() == Grammar.regex("a+")
    assert Constrained(choice=["a", "b"]).read() == Grammar.choice(["a", "b"])
    file.write_text('start: "a"')
    assert Constrained(grammar=file).read() == Grammar.lark('start: "a"')
    assert Constrained().read() is None
    assert Constrained(grammar_bytes=5, grammar_seconds=2.0).limits.max_bytes == 5


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--regex and --choice contradict each other"):
        Constrained(regex="a", choice=["b"]).read()
    with pytest.raises(BadInput, match="cannot read --schema"):
        Constrained(schema=str(tmp_path / "none.json")).read()
    with pytest.raises(BadInput, match=r"a schema must be a JSON object, or true for any JSON, not list"):
        Constrained(schema="[1]").read()
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(BadInput, match="not UTF-8"):
        Constrained(grammar=tmp_path / "x").read()
    with pytest.raises(BadInput, match="must be 1 to"):
        _ = Constrained(grammar_bytes=0).limits


def test_weightings_of_the_command_line() -> None:
    assert Constrained(choice=["a"]).weighting.kind == "masked"
    assert Constrained(constraint_weighting="fvo(max_nodes=7)").weighting.max_nodes == 7
    with pytest.raises(BadInput, match="no constraint_weighting 'fv'; did you mean 'fvo'"):
        _ = Constrained(constraint_weighting="fv").weighting


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_weighting_needs_a_grammar(command: str, cli: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc")
    given = ["abc"] if command == "generate" else ["--prompts", str(prompts), "--methods", "none"]
    ran = cli(command, *given, "--model", "toy", "--constraint-weighting", "fvo")
    refused(ran, "weights what a grammar allows, and there is none")


def test_generate_says_which_distribution_was_sampled(cli: Run) -> None:
    options = ("--model", "toy", "-t", "1", "--seed", "1", "--choice", "ab", "--choice", "ba")
    told = json.loads(cli("generate", "abc", *options, "--constraint-weighting", "fvo", "--json").out)["metrics"]
    assert told["constraint_weighting"] == "fvo-exact"
    assert 0.0 < told["future_validity"]["validity"] < 1.0
    line = cli("generate", "abc", *options, "--constraint-weighting", "fvo").err
    assert "of the model's probability was valid (total variation at most" in line
    masked = json.loads(cli("generate", "abc", *options, "--json").out)["metrics"]
    assert masked["constraint_weighting"] == "masked" and masked["future_validity"] is None


def test_bench_counts_the_distributions(cli: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "abc", "grammar": {"choices": ["ab", "ba"]}}\n{"prompt": "cba"}\n')
    options = ("--model", "toy", "-t", "1", "-n", "6", "--methods", "none,pld", "--constraint-weighting", "fvo")
    ran = cli("bench", *options, "--prompts", str(prompts), "--json", str(out))
    assert ran.code == 0, ran.err
    found = json.loads(out.read_text())
    assert found["settings"]["constraint_weighting"] == "fvo"
    assert [row["constraint_weighting"] for row in found["methods"]] == [{"fvo-exact": 1}, {"fvo-exact": 1}]


def test_a_prompt_file_may_name_grammars(tmp_path: Path) -> None:
    from outpace.prompts.reader import read_prompts

    rows = [
        {"prompt": "a", "schema": {"type": "integer"}},
        {"prompt": "b", "grammar": {"choices": ["x", "y"]}},
        {"prompt": "c", "grammar": 'start: "a"'},
        {"prompt": "d"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    found = [prompt.grammar for prompt in read_prompts(file).values()]
    choices, lark = Grammar.choice(["x", "y"]), Grammar.lark('start: "a"')
    assert found == [Grammar.schema({"type": "integer"}), choices, lark, None]
    for wrong in ({"schema": {}, "grammar": "x"}, {"grammar": {"xml": "x"}}, {"schema": "no json"}, {"grammar": 3}):
        file.write_text(json.dumps({"prompt": "a", **wrong}))
        with pytest.raises(BadInput, match=r"line 1: '?(schema|grammar)"):
            read_prompts(file)


SELF = '{"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}'
LARGE = json.dumps({"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(200)}})
EXPLODING = "(((a{1,300}){1,300}){1,300}){1,300}"
NEVER_COMPILES = [
    (["--schema", '{"type": "integer", "minimum": 5, "maximum": 4}'], "the schema cannot be used"),
    (["--schema", SELF], "the schema is unsatisfiable: every instance would have to contain another"),
    (["--schema", LARGE, "--grammar-bytes", "1000"], "bytes, and the limit is 1,000"),
    (["--schema", LARGE, "--grammar-seconds", "0.000001"], "too complex to compile within 1e-06 s"),
    (["--regex", "[a-f]{1,200}", "--grammar-seconds", "0.000001"], "too complex to compile within 1e-06 s"),
    (["--regex", "a(b"], "the regular expression cannot be used"),
    (["--regex", "Z"], "no token of this model can begin one"),
]
"""What a grammar can be refused for before anything is decoded, and words of the line that says so."""
ENDS_ANSWERS = [
    (["--regex", EXPLODING, "--ignore-eos"], "the grammar is too complex to go on"),
    (["--regex", "aZ"], "none of the vocabulary's tokens goes on as the grammar demands"),
    (["--choice", "ba", "--choice", "bb", "--stop", "a", "--stop", "bb"], "cut the answer before it was complete"),
]
"""What turns out in the middle of an answer."""
FORCED_STOP = (["--choice", "abc", "--stop", "b"], "the stop string 'b' is in the text that the grammar demands")


@pytest.mark.parametrize(("given", "said"), [*NEVER_COMPILES, FORCED_STOP])
def test_bad_grammars_are_refused_before_anything_is_printed(cli: Run, given: list[str], said: str) -> None:
    refused(cli("generate", "abc", "--model", "toy", *given), said)


@pytest.mark.parametrize(("given", "said"), NEVER_COMPILES)
def test_a_chat_under_a_bad_grammar_does_not_begin(cli: Run, given: list[str], said: str) -> None:
    refused(cli("chat", "--model", "toy", *given, stdin=""), said)


@pytest.mark.parametrize(("given", "said"), NEVER_COMPILES)
def test_a_bench_with_a_bad_grammar_leaves_nothing_behind(
    cli: Run, tmp_path: Path, given: list[str], said: str
) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("abc")
    asked = ("--model", "toy", "--prompts", str(prompts), "--methods", "none", "-n", "4", "--json", str(out))
    refused(cli("bench", *asked, *given), said)
    assert not out.exists()


@pytest.mark.parametrize(("given", "said"), ENDS_ANSWERS)
def test_grammars_that_fail_in_the_middle_of_an_answer_end_it_in_one_line(
    cli: Run, given: list[str], said: str
) -> None:
    asked = ("generate", "abc", "--model", "toy", "-n", "300", *given)
    refused(cli(*asked, "--json"), said)  # no half of an object
    streamed = cli(*asked)
    assert streamed.code == 2
    assert set(streamed.out) <= set("ab\n"), "the answer so far, which was streamed"
    assert streamed.err.splitlines()[-1].startswith("error: ") and said in streamed.err.splitlines()[-1]
    assert "Traceback" not in streamed.err


def test_a_bench_says_which_prompts_failed_and_keeps_the_rest(cli: Run, tmp_path: Path) -> None:
    prompts, out, page = tmp_path / "prompts.jsonl", tmp_path / "out.json", tmp_path / "out.html"
    rows = [
        {"id": "free", "prompt": "abc"},
        {"id": "dead-end", "prompt": ["cba", "and then"], "grammar": {"regex": "aZ"}},
        {"id": "choice", "prompt": ["abc cba", "abc"], "grammar": {"choices": ["ab", "ba"]}},
    ]
    prompts.write_text("\n".join(json.dumps(row).replace('"prompt": [', '"turns": [') for row in rows))
    asked = ("bench", "--model", "toy", "--prompts", str(prompts), "--methods", "none,pld,grammar", "-n", "6")
    for batch in ("1", "3"):
        ran = cli(*asked, "-b", batch, "--quality", "--json", str(out), "--html", str(page))
        assert ran.code == 1, ran
        assert [line for line in ran.err.splitlines() if line.startswith("error: ")] == [ran.err.splitlines()[-1]]
        for words in (
            "3 of 3 rows have failures",
            "none, pld, grammar failed on 1 of 3 prompts ('dead-end')",
            "as the grammar",
        ):
            assert words in ran.err.splitlines()[-1]
        assert "Traceback" not in ran.err
        found = json.loads(out.read_text())
        for row in found["methods"]:
            assert (row["error"], row["prompts"]) == (None, 2)
            assert [one["prompt"] for one in row["failed"]] == ["dead-end"]
            assert row["identical"]["same"] == 2
            assert row["quality"]["nll"] is not None
        assert {one["id"] for one in found["per_prompt"]} == {"free", "choice"}
        assert "dead-end" in ran.out and "dead-end" in page.read_text()


def test_a_bench_of_which_every_prompt_fails_reports_that(cli: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("abc\ncba")
    asked = ("--model", "toy", "--prompts", str(prompts), "--methods", "none,pld", "-n", "6", "--json", str(out))
    ran = cli("bench", *asked, "--regex", "aZ")
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith(
        "error: 2 of 2 rows have failures: none, pld failed after 0 prompts: every"
    )
    assert "Traceback" not in ran.err
    assert [row["prompts"] for row in json.loads(out.read_text())["methods"]] == [0, 0]


ENDLESS = 'start: "a" start'


def test_an_answer_that_its_limit_cuts_short_of_its_grammar_says_so(cli: Run, tmp_path: Path) -> None:
    grammar, prompts = tmp_path / "endless.lark", tmp_path / "prompts.txt"
    grammar.write_text(ENDLESS)
    prompts.write_text("abc")
    note = "reached its length limit before it was complete under its grammar"
    asked = ("generate", "abc", "--model", "toy", "-n", "8")
    for more in ((), ("--json",), ("--n", "2", "-t", "1")):
        ran = cli(*asked, "--grammar", str(grammar), *more)
        assert ran.code == 0
        assert note in ran.err and "never end" in ran.err
    told = json.loads(cli(*asked, "--grammar", str(grammar), "--json").out)
    assert (told["finish_reason"], told["metrics"]["grammar_complete"]) == ("length", False)
    assert note in cli("chat", "--model", "toy", "-n", "8", "--grammar", str(grammar), stdin="abc\n").err
    whole = cli(*asked, "--choice", "ab", "--json")
    assert note not in whole.err and json.loads(whole.out)["metrics"]["grammar_complete"] is True
    may_end = cli(*asked, "--regex", "[a-f]*", "--ignore-eos", "--json")  # cut, and whole
    assert note not in may_end.err
    assert json.loads(may_end.out)["finish_reason"] == "length"
    free = cli(*asked, "--json")
    assert note not in free.err and json.loads(free.out)["metrics"]["grammar_complete"] is None
    bench = ("bench", "--model", "toy", "--prompts", str(prompts), "--methods", "none,pld", "-n", "8")
    benched = cli(*bench, "--grammar", str(grammar))
    assert benched.code == 0
    assert "before they were complete under their grammar" in " ".join(benched.out.split())
