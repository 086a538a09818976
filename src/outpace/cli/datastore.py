"""``outpace datastore``: build the corpus that ``rest`` and ``sam`` copy from, and look at one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from outpace.cli import options as opt
from outpace.cli.interrupt import Interrupted
from outpace.cli.options import option
from outpace.cli.output import check_writable, fact_table, out, print_json
from outpace.core.errors import BadInput
from outpace.core.progress import Stage, stage

if TYPE_CHECKING:
    from outpace.datastore.layout import Header

_STAGES = {"reading": ("reading text", "B"), "sorting": ("sorting", "entries"), "writing": ("writing", "B")}
"""Names of the stages of a build, and in what they are counted."""

datastore = typer.Typer(name="datastore", add_completion=False)


@datastore.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Build a datastore: text that the methods rest and sam copy from."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@datastore.command()
def build(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES...", help="UTF-8 text, a document a file, or .jsonl, documents by line."),
    ],
    target: Annotated[Path, option("--out", "-o", value="PATH", text="Where to write the datastore.")],
    model: opt.ModelName = "smollm2",
    depth: Annotated[int, option(value="N", text="Longest context that can be matched.")] = 32,
    json: opt.Json = False,
) -> None:
    """Tokenise files for a model, index them and write one file. Ctrl-C leaves nothing behind."""
    check_writable(target)
    if any(file.exists() and file.resolve() == target.resolve() for file in files):
        raise BadInput(f"--out names '{target}', which is one of the files to read; choose another place")
    import outpace.loading
    from outpace.datastore.build import build_datastore
    from outpace.datastore.corpus import read_corpus, tokenise

    pieces = read_corpus(files)
    first = next(pieces, None)  # what cannot be read is said before a tokenizer is loaded for it
    tokenizer = outpace.loading.load_tokenizer(model)
    began = time.perf_counter()
    stages = _Stages()
    with stages.open, _leaving_nothing(target):
        texts = (piece for part in ([] if first is None else [first], pieces) for piece in part)
        header = build_datastore(
            target, tokenise(texts, tokenizer), tokenizer.fingerprint, model, depth=depth, advance=stages.advance
        )
    _say(header, target, json, seconds=time.perf_counter() - began)


@contextmanager
def _leaving_nothing(target: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"nothing was written to {target}") from None


class _Stages:
    """Shows the stages of a build, one after the other."""

    def __init__(self) -> None:
        self.open = ExitStack()
        self._at: Stage | None = None

    def advance(self, what: str, done: int, total: int) -> None:
        name, unit = _STAGES[what]
        if self._at is None or self._at.name != name:
            self.open.close()
            self._at = self.open.enter_context(stage(name, total, unit))
        self._at.move(done, total)


@datastore.command()
def info(path: Annotated[Path, typer.Argument(metavar="PATH", help="A datastore.")], json: opt.Json = False) -> None:
    """Check that a datastore is whole, and say what it holds."""
    from outpace.datastore.store import open_datastore

    _say(open_datastore(path).header, path, json)


def _say(header: Header, path: Path, json: bool, **more: float) -> None:
    facts: dict[str, Any] = {
        "path": str(path),
        "model": header.model,
        "documents": header.documents,
        "tokens": header.tokens - header.documents - 1,
        "depth": header.depth,
        "bytes": header.size,
        "fingerprint": header.fingerprint.hex(),
        **more,
    }
    if json:
        print_json(facts)
        return
    rows = [
        ("datastore", f"[bold cyan]{escape(str(path))}[/]"),
        ("tokenised for", escape(header.model) or "an unnamed model"),
        ("documents", f"{facts['documents']:,}"),
        ("tokens", f"{facts['tokens']:,}"),
        ("longest match", f"{header.depth} tokens"),
        ("size", f"{header.size / 1e6:,.1f} MB"),
        *(("built in", f"{seconds:.1f} s") for seconds in more.values()),
    ]
    out().print(fact_table(rows))
