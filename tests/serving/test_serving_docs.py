"""The examples of docs/serving-clients.md run against a server on a real socket."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_support import live
from outpace.model import Model
from outpace.serving.offered import Defaults
from outpace.serving.service import Service
from test_serving_tools import model

pytestmark = pytest.mark.model

PAGE = (Path(__file__).parents[2] / "docs" / "serving-clients.md").read_text(encoding="utf-8")
ADDRESS, TOOL_MODEL = "http://127.0.0.1:8000", "qwen2.5-coder-1.5b.gguf"
CALL = '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```'


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def server(smollm2: Model) -> Iterator[str]:
    """Serves the embedded model, and under the other name one that always calls the tool."""
    caller = model("hermes", CALL)
    caller.name = TOOL_MODEL
    with live(Service([smollm2, caller], defaults=Defaults(method="pld"))) as found:
        yield found


@pytest.mark.parametrize("code", blocks("bash"), ids=range(len(blocks("bash"))))
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_of_curl_run(server: str, code: str) -> None:
    assert code.count(ADDRESS) == 1
    done = subprocess.run(["sh", "-c", code.replace(ADDRESS, server)], capture_output=True, text=True, check=True)
    assert '"error"' not in done.stdout
    assert ("data: [DONE]" if '"stream": true' in code else '"chat.completion"') in done.stdout


@pytest.mark.parametrize("code", blocks("python"), ids=range(len(blocks("python"))))
def test_the_examples_in_python_run(server: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "langchain" in code and importlib.util.find_spec("langchain_openai") is None:
        pytest.skip("langchain-openai is not installed")
    if "with_structured_output" in code:
        pytest.skip("the model of this test writes one answer only")
    assert code.count(ADDRESS) == 1
    exec(compile(code.replace(ADDRESS, server), "serving-clients.md", "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    assert len(shown) > 10
    assert ("Paris" in shown) == (TOOL_MODEL in code)


def test_the_page_shows_every_way_to_ask() -> None:
    code = "".join(blocks("python"))
    for name in ("OpenAI(", "AsyncOpenAI(", "stream=True", "tools=[", "ChatOpenAI("):
        assert name in code
    assert len(blocks("bash")) == 2
