import io
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outpace.bench import bench_report, columns
from outpace.bench.bench_report import BenchReport
from outpace.bench.charts import BarChart
from outpace.bench.columns import COLUMNS, Column
from outpace.bench.method_records import Measured
from outpace.bench.page import render
from outpace.bench.runner import run
from test_bench_runner import PROMPTS, SHORT, Lossy, make, method

VOID = {"meta"}


class Page(HTMLParser):
    """Checks that tags nest, and collects the text and whatever would load something."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.runner: list[str] = []
        self.loads: list[str | None] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(source)
        self.close()
        assert self.runner == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [value for key, value in attrs if key in {"src", "href"}]
        if tag not in VOID:
            self.runner.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.runner.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.runner:
            self.text += data


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    model = make()
    bad = method(model, "<b>ad", error=RuntimeError("1 < 2 & so on [bold]"), fail_at=25)
    methods = [method(model, "oracle"), method(model, "lossy", rule=Lossy()), bad]
    return run(model, methods, PROMPTS, SHORT)


def printed(result: dict[str, Any], width: int = 100) -> str:
    text = io.StringIO()
    BenchReport(result).print(Console(file=text, width=width))
    return text.getvalue()


def test_the_page_stands_alone_and_holds_the_figures(result: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    BenchReport(result).write_html(path)
    source = path.read_text(encoding="utf-8")
    page = Page(source)
    assert page.loads == []
    assert "script" not in page.tags
    assert "http" not in source
    assert len(source) < 300_000
    assert page.text.count("<b>ad") >= 2
    for row in result["methods"]:
        if row["speedup"] is not None:
            assert f"{row['speedup']:.2f}x" in page.text
    for word in ("1 < 2 & so on [bold]", result["machine"]["cpu"], "chat", "qa", "math", "What the figures mean"):
        assert word in page.text
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_the_terminal_report_fits_100_columns(result: dict[str, Any]) -> None:
    text = printed(result)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "…" not in text
    for word in ("oracle", "lossy", "Speed-up by task", "failed after", "[bold]", "TTFT ms"):
        assert word in text


def test_cards_charts_and_rows_have_one_order(result: dict[str, Any]) -> None:
    slow_first = {**result, "methods": sorted(result["methods"], key=lambda row: row["speedup"] or 0)}
    found = BenchReport(slow_first).report()
    cards = [tile.name for tile in found.tiles]
    speeds = [row["speedup"] or 0 for name in cards for row in result["methods"] if row["method"] == name]
    assert cards[-1] == "<b>ad", "failures come last"
    assert speeds[:-1] == sorted(speeds[:-1], reverse=True)
    figures, drafting = found.tables[:2]
    assert [row[0].text for row in figures.rows] == ["none", *cards]
    assert [row[0].text for row in drafting.rows] == cards
    bars = found.charts[0]
    assert isinstance(bars, BarChart)
    assert [bar.name for bar in bars.blocks[0][1]] == cards


def test_the_page_explains_columns_that_the_terminal_lacks_below_the_table(result: dict[str, Any]) -> None:
    explained = "repeats: share of an answer's 4-grams"
    assert explained in Page(render(BenchReport(result).report())).text
    assert explained not in printed(result)


def test_a_column_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Column[Measured](
        key="rounds",
        measure=lambda one: sum(record.metrics.rounds for record in one.records),
        title="rounds in all",
        cell=lambda row: f"{row['rounds']} rounds",
        legend="counted",
        definition="Rounds of all answers.",
    )
    for user in (columns, bench_report):
        monkeypatch.setattr(user, "COLUMNS", (*COLUMNS, new))
    model = make()
    found = BenchReport(run(model, [method(model)], PROMPTS, SHORT))
    told = f"{found.rows[1]['rounds']} rounds"
    assert found.rows[1]["by_category"]["math"]["rounds"] > 0
    assert told in printed(found.result, 120)
    assert "rounds in all: counted" in printed(found.result, 120)
    page = Page(render(found.report()))
    assert told in page.text
    assert "Rounds of all answers." in page.text


def test_the_columns_of_the_page_are_defined_once() -> None:
    titles = [one.title for one in COLUMNS if one.title]
    assert len(titles) == len(set(titles))
    assert all(one.definition for one in COLUMNS if one.title not in ("", "method", "caches"))
    assert all((one.cell is None) == (one.title == "") for one in COLUMNS)


def test_no_methods_no_prompts_no_problem() -> None:
    model = make()
    for methods in ([], [method(model, error=KeyboardInterrupt(), fail_at=1)]):
        found = run(model, methods, PROMPTS, SHORT)
        Page(render(BenchReport(found).report()))
        assert "none" in printed(found)
    empty = BenchReport.empty()
    Page(render(empty.report()))
    assert "No results" in str(empty)
