"""``outpace datastore``: build the corpus that ``rest`` and ``sam`` copy from, and look at one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import outpace.cli.options as opt
from outpace.cli.output import check_writable, err, out, print_json
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.datastore.layout import Header

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
    target: Annotated[Path, typer.Option("--out", "-o", metavar="PATH", help="Where to write the datastore.")],
    model: opt.ModelName = "smollm2",
    depth: Annotated[int, typer.Option("--depth", metavar="N", help="Longest context that can be matched.")] = 32,
    json: opt.Json = False,
) -> None:
    """Tokenise files for a model, index them and write one file. What is interrupted leaves nothing."""
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
    with _watching() as advance:
        texts = (piece for part in ([] if first is None else [first], pieces) for piece in part)
        header = build_datastore(
            target, tokenise(texts, tokenizer), tokenizer.fingerprint, model, depth=depth, advance=advance
        )
    _say(header, target, json, seconds=time.perf_counter() - began)


@datastore.command()
def info(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A datastore.")],
    json: opt.Json = False,
) -> None:
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
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("datastore", f"[bold cyan]{escape(str(path))}[/]")
    table.add_row("tokenised for", escape(header.model) or "an unnamed model")
    table.add_row("documents", f"{facts['documents']:,}")
    table.add_row("tokens", f"{facts['tokens']:,}")
    table.add_row("longest match", f"{header.depth} tokens")
    table.add_row("size", f"{header.size / 1e6:,.1f} MB")
    if "seconds" in more:
        table.add_row("built in", f"{more['seconds']:.1f} s")
    out().print(table)


@contextlib.contextmanager
def _watching() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error while a datastore is built, and what moves it."""
    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def advance(what: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=what)

        yield advance
