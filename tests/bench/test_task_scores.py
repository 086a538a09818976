"""Scores of tasks: what a final answer is, what a program is, and where programs run."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from outpace.bench.quality.program import program_of
from outpace.bench.quality.sandbox import can_confine, run_tests
from outpace.bench.quality.task_scores import check_tasks, score
from outpace.core.errors import BadInput
from outpace.prompts.final_answer import final_answer, is_right
from outpace.prompts.prompt import Prompt
from outpace.prompts.reader import prompt_of
from outpace.prompts.task import CodeTests, ExactAnswer

PROMPT = 'from typing import List\n\n\ndef double(numbers: List[int]) -> List[int]:\n    """ Twice each. """\n'
TESTS = "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n"
DOUBLE = CodeTests("double", TESTS, PROMPT)
RIGHT = "def double(numbers):\n    return [2 * one for one in numbers]\n"
LOOP = "while True: pass"


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("She has 3 + 4 = 7 apples, so she pays $1,234.50.", "1,234.50"),
        ("3 and 4.\n#### 7 apples (of 12)", "7"),
        ("of 12, \\boxed{18} is left, in 2 days", "18"),
        ("it fell to -5", "-5"),
        ("#### Step 2: Add up\n10 + 8 = 18\n\nThe answer is \\boxed{18}.", "18"),
        ("#### 2. Add up\n10 + 8\n#### 18", "18"),
        ("##### 3\nso 18", "18"),
        ("#### 18.\nSo she makes 3", "18"),
        ("#### 1,234.\nSo 3", "1,234"),
        ("#### 12. Add up\n10 + 8 = \\boxed{18}", "18"),
        ("10 + 8 = \\boxed{\\text{18}}", "18"),
        ("the change is $-5", "-5"),
        ("x=-5", "-5"),
        ("#### **$18**", "18"),
        ("\\boxed{18 \\text{ hours}} in 3 days", "18"),
        ("the area is \\boxed{18 m^2}", "18"),
        ("\\boxed{3 + 4 = 7}", "7"),
        ("\\(45{,}000\\) or 45\\,000", "45000"),
        ("from 2019-2020", "2020"),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_the_final_number(text: str, final: str | None) -> None:
    found = final_answer(text, ExactAnswer(("18",)))
    assert (found or "").lstrip("$") == (final or "")


def test_numbers_and_words_are_compared_by_meaning() -> None:
    assert is_right("$1,200.00", ExactAnswer(("1200",)))
    assert not is_right("1201", ExactAnswer(("1200",)))
    assert is_right("The Eiffel Tower.", ExactAnswer(("Louvre", "eiffel tower")))
    assert score(ExactAnswer(("Paris",)), "Let us see.\nThe answer is **Paris**.") is True
    assert score(ExactAnswer(("Paris",)), "Rome") is False
    assert score(ExactAnswer(("18",)), "no idea") is None
    assert score(ExactAnswer(("Paris",)), "The answer is Paris. It is the capital.") is True
    assert score(ExactAnswer(("Paris",)), "**Answer**: Paris, not Rome") is True
    assert score(ExactAnswer(("Paris",)), "The answer is Paris or Rome") is False
    assert score(ExactAnswer(("well known",)), "It is\nwell-known") is True
    assert score(ExactAnswer(("Rome",)), "The answer is Paris. Wait, the answer is Rome.") is True
    assert score(ExactAnswer(("Paris",)), "The answer is Paris. Wait, the answer is Rome.") is False
    assert score(ExactAnswer(("B",)), "Answer: A\n\\boxed{\\text{B}}") is True
    for accepted, said in (("2", "two"), ("two", "2"), ("2", "2 of 3")):
        assert score(ExactAnswer((accepted, "two", "2")), f"of 3 the answer is {said}") is (said != "2 of 3")


@pytest.mark.parametrize(
    ("accepted", "final", "right"),
    [
        ("-1/2", "1/2", False),
        ("1/2", "1.2", False),
        ("1/2", "0.5", True),
        ("2/6", "1/3", True),
        ("x-1", "x+1", False),
        ("(-1,2)", "(1,2)", False),
        ("C#", "C", False),
        ("B", "(B).", True),
        ("(1,2)", "(1, 2)", True),
        ("[0,1]", "(0,1)", False),
        ("x=5", "x = 5", True),
        ("x", "$x$", True),
        ("50%", "50", True),
        ("1990-1995", "1990\u20131995", True),
        ("%", "```", False),
        ("12", "1,2", False),
        ("12", "1/0", False),
        ("1e-05", "0.00001", True),
        ("1e999999999", "1e999999998", False),
    ],
)
def test_what_is_not_the_same_is_wrong(accepted: str, final: str, right: bool) -> None:
    assert is_right(final, ExactAnswer((accepted,))) is right


def test_fractions_are_final_where_one_is_accepted() -> None:
    assert score(ExactAnswer(("1/2",)), "of 3, so the answer is 1/2.") is True
    assert score(ExactAnswer(("0.5", "1/2")), "It is \\frac{1}{2}") is True


@pytest.mark.parametrize(
    "answer",
    [
        f"Here it is:\n```python\n{RIGHT}```\nIt doubles.\n```python\nprint(double([1]))\n```",
        f"```python\n{RIGHT}\nprint(double(",  # cut off in the fence
        f"Sure.\n{RIGHT}\nThis doubles every number.",
        "    return [2 * one for one in numbers]\n",
        "return [2 * one for one in numbers]",
        "```python\nresult: List[int] = []\nfor one in numbers:\n    result.append(2 * one)\nreturn result\n```",
        "result = []\n    for one in numbers:\n        result.append(2 * one)\n    return result\n",  # lost its indent
        "   return [2 * one for one in numbers]\n",
        f"```python\n{PROMPT}```\nSo:\n```python\n{RIGHT}```",
        f"```python\nTWO=2\na, b = 1, 2\n{RIGHT.replace('2', 'TWO')}```",
        "1. So:\n   ```python\n   def double(numbers):\n       return [2 * one for one in numbers]\n   ```\n",
        f"```python\n{RIGHT}\nassert double([1]) == 3\nn = int(input())\nwhile True:\n    n = 1\n```",
        f"```python\nfrom __future__ import annotations\n{RIGHT}```",
        "```python\nfrom dataclasses import dataclass\n\n@dataclass\nclass Two:\n    by: int = 2\n\n"
        "def double(numbers):\n    return [Two().by * one for one in numbers]\n```",
        "```python\ndef double(numbers):\n    return [times(one) for one in numbers]\n\nBY = 2\n\n"
        "def times(one):\n    return BY * one\n\nprint(double([1]))\n```",
    ],
)
def test_a_program_is_found_in_an_answer(answer: str) -> None:
    assert score(DOUBLE, answer) is True


@pytest.mark.parametrize(
    "answer", ["", "I cannot do that.", "```python\ndef triple(x):\n    return x\n```", "\x00", PROMPT]
)
def test_an_answer_without_the_function_is_no_program(answer: str) -> None:
    assert program_of(DOUBLE, answer) is None
    assert score(DOUBLE, answer) is None


def test_a_wrong_program_is_wrong() -> None:
    assert score(DOUBLE, "```python\ndef double(numbers):\n    return numbers\n```") is False


def test_the_prompts_imports_and_helpers_are_there() -> None:
    task = CodeTests(
        "f",
        "def check(f):\n    assert f(4) == 2.0\n",
        "import math\ndef root(x): return math.sqrt(x)\ndef f(x):\n    'half'\n",
    )
    assert score(task, "```\ndef f(x):\n    return root(x)\n```") is True


@pytest.mark.parametrize(
    ("more", "body"),
    [
        ("result = double([1])\nfirst = result[0]\na, b = result, first\nmsg = f'{result}'\nprint(msg)", ""),
        ("from collections import defaultdict\nmemo = defaultdict(int)", "memo[1] += 1"),
        ("import re\nPAT = re.compile('a')", "assert PAT.match('a')"),
        ("try:\n    import missing\nexcept ImportError:\n    missing = None", "assert missing is None"),
        ("if 1 > 0:\n    BY = 2\nelse:\n    BY = 3", "assert BY == 2"),
        ("case = [1]\nfor one in case:\n    last = double([one])\nshown = last", ""),
        ("print(f'{double([1])}')\nwide = f\"{'\u00a0'}\"", ""),
    ],
)
def test_what_follows_the_function_is_kept_where_it_only_defines(more: str, body: str) -> None:
    function = f"def double(numbers):\n    {body or 'pass'}\n    return [2 * one for one in numbers]\n"
    assert score(DOUBLE, f"```python\n{function}\n{more}\n```") is True


def test_a_prompt_s_docstring_may_hold_a_fence() -> None:
    prompt = PROMPT.replace(" Twice each. ", "\n    ```\n    double([1])\n    ```\n    ")
    assert score(CodeTests("double", TESTS, prompt), "    return [2 * one for one in numbers]") is True
    several = "```python\nfrom __future__ import (\n    annotations,\n)\n" + RIGHT + "```"
    assert score(DOUBLE, several) is True


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="annotations are not evaluated any more")
def test_names_that_nobody_imported_are_missed() -> None:
    task = CodeTests("f", "def check(f): f(1)", "def f(x):\n")
    assert score(task, "def f(x) -> Optional[int]:\n    return x") is False


@pytest.mark.parametrize(
    "prompt",
    [
        f"Complete the function.\n\n```python\n{PROMPT}```",
        f"Complete the function, please: it doubles.\n\n{PROMPT}",
        PROMPT.replace("def", "@staticmethod\ndef"),
    ],
)
@pytest.mark.parametrize("answer", [f"```python\n{RIGHT}```", "    return [2 * one for one in numbers]"])
def test_words_around_the_prompts_code_are_left_out(prompt: str, answer: str) -> None:
    typed = answer.replace("double(numbers)", "double(numbers: List[int])")
    assert score(CodeTests("double", TESTS, prompt), typed) is True


needs_filter = pytest.mark.skipif(not can_confine(), reason="this system does not confine processes")


def passes(body: str, seconds: float = 10.0) -> str:
    program = "".join(f"    {line}\n" for line in body.splitlines())
    return run_tests(f"def f():\n{program}", "def check(f): f()", "f", seconds=seconds)


@needs_filter
def test_what_computes_passes() -> None:
    assert (
        passes("import re, math, itertools, collections, hashlib, random, datetime, heapq, functools, string")
        == "passed"
    )
    assert passes("print('x' * 100_000)\nassert open(__import__('os').__file__).read(9)") == "passed"
    assert passes("import os\nassert os.listdir() == []") == "passed"


@needs_filter
@pytest.mark.parametrize(
    "body", [LOOP, "import time; time.sleep(60)", "import sys; sys.stdin.read(); import time; time.sleep(60)"]
)
def test_what_hangs_is_ended(body: str) -> None:
    began = time.monotonic()
    assert passes(body, seconds=1.0) == "timed out"
    assert time.monotonic() - began < 20


@needs_filter
@pytest.mark.parametrize(
    "body",
    [
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing; p = multiprocessing.Process(target=print); p.start()",
        "import threading; t = threading.Thread(target=print); t.start()",
        "import os; os.execv('/bin/true', ['true'])",
        "import socket; socket.socket()",
        "import os; os.kill(os.getppid(), 0)",
        "x = bytearray(4 << 30)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "import ctypes; assert ctypes.CDLL(None).prctl(38, 0, 0, 0, 0) == 0",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "raise SystemExit(97)",
    ],
)
def test_what_does_more_than_compute_fails(body: str) -> None:
    assert passes(body, seconds=5.0) == "failed"


@needs_filter
def test_nothing_outside_is_changed(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("kept")
    mode = victim.stat().st_mode
    folder.mkdir()
    where = repr(str(victim))
    for line in (
        f"open({where}, 'w').write('x')",
        f"open({where}, 'a').write('x')",
        f"open({where}, 'r+').write('x')",
        f"open({str(tmp_path / 'new')!r}, 'x')",
        "open('here', 'w').write('x')",
        f"import os; os.remove({where})",
        f"import os; os.rename({where}, {where} + '2')",
        f"import os; os.truncate({where}, 0)",
        f"import os; os.chmod({where}, 0)",
        f"import os; os.utime({where}, (0, 0))",
        f"import os; os.symlink({where}, {str(tmp_path / 'link')!r})",
        f"import os; os.rmdir({str(folder)!r})",
        f"import os; os.mkdir({str(tmp_path / 'more')!r})",
        f"import os; os.mkfifo({str(tmp_path / 'pipe')!r})",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
    ):
        assert passes(line) == "failed", line
    assert victim.read_text() == "kept"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "victim"]
    assert victim.stat().st_mode == mode


@needs_filter
def test_a_fork_bomb_leaves_nothing() -> None:
    body = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert passes(body, seconds=1.0) == "timed out"


def test_without_a_filter_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.bench.quality import confined_program

    fake = Path(__file__).parent / "no_filter.py"
    monkeypatch.setattr(confined_program, "__file__", str(fake))
    with pytest.raises(BadInput, match="cannot confine"):
        run_tests("", "", "f")
    assert confined_program.CANNOT_CONFINE == 97


def test_rows_name_their_tasks() -> None:
    assert prompt_of({"question": "?", "answer": "So 4 + 3\n#### 7"}, 1).task == ExactAnswer(("7",))
    assert prompt_of({"question": "?", "answer": 7}, 1).task == ExactAnswer(("7",))
    assert prompt_of({"question": "?", "answer": ["a", "b"]}, 1).task == ExactAnswer(("a", "b"))
    others: list[object] = [None, {"text": "x"}, "a long text. " * 20, "two\nlines", True, []]
    for other in others:
        assert prompt_of({"question": "?", "answer": other}, 1).task is None
    row = {"task_id": "HumanEval/0", "prompt": PROMPT, "entry_point": "double", "test": TESTS}
    found = prompt_of(row, 1)
    assert (found.id, found.task) == ("HumanEval/0", DOUBLE)
    assert prompt_of({"prompt": "x", "test": "of another kind"}, 1).task is None


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x", "entry_point": "f"},
        {"prompt": "x", "entry_point": "f", "test": ""},
        {"prompt": "x", "entry_point": 3, "test": TESTS},
        {"prompt": "x", "test": TESTS},
    ],
)
def test_a_broken_test_row_is_refused_where_it_is_read(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a code task needs 'entry_point'"):
        prompt_of(row, 1)
    assert prompt_of(row, 1, strict=False).task is None


@pytest.mark.parametrize(
    ("tests", "name", "said"),
    [
        ("def check(candidate:\n", "f", "'test' cannot be run: '\\(' was never closed, line 1|cannot be run"),
        ("assert f(1) == 2", "f", "does not define check"),
        ("def check(candidate): pass", "f g", "not the name of a function"),
    ],
)
def test_tests_that_cannot_run_are_refused_before_the_bench(tests: str, name: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_tasks([Prompt("HumanEval/0", "code", ("x",), task=CodeTests(name, tests, "x"))])
