"""``outpace export-head``, ``import-head``, ``validate-head``: heads to and from other engines, and their checks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import outpace.cli.options as opt
from outpace.cli.output import out, print_json
from outpace.cli.session import Machine
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.certify.validate_head import Report
    from outpace.heads.head_folder import HeadFolder
    from outpace.heads.layouts.base import About
    from outpace.model import Model

HUB = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""What other engines call the embedded models."""

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A head: what outpace train wrote, or another layout.")]
NewFolder = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where to write it: a new folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def export_head(
    folder: Folder,
    output: NewFolder,
    layout: Annotated[
        str, typer.Option("--layout", metavar="NAME", help="speculators (vLLM), eagle, medusa, or hf (transformers).")
    ],
    model: opt.ModelName = "smollm2",
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", metavar="NAME", help="What the engine calls the model; default: its hub id."),
    ] = None,
    json: Json = False,
    threads: opt.Threads = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Write a head as other engines load it, with all that it borrows from its model."""
    machine, opened = _checked(folder, model, threads, dtype, device)
    from outpace.heads.layouts.files import check_new
    from outpace.heads.layouts.registry import find_layout, write

    find_layout(layout, opened.kind)
    check_new(output)
    loaded, _ = machine.load()
    head = opened.load(loaded.target)
    write(head, loaded.target, output, layout, _about(folder, loaded, verifier or HUB.get(model, model)))
    _written(output, {"kind": head.kind, "layout": layout, "model": verifier or HUB.get(model, model)}, json)


def import_head(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A head in another engine's layout.")],
    output: NewFolder,
    model: opt.ModelName = "smollm2",
    json: Json = False,
    threads: opt.Threads = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Read a head of another engine's layout and keep it as outpace has it: small, and bound to its model."""
    machine, opened = _checked(folder, model, threads, dtype, device)
    from outpace.heads.checkpoint import read_provenance, save
    from outpace.heads.layouts.files import check_new, new_folder

    if opened.own:
        raise BadInput(f"the head at '{folder}' is of outpace's own layout already; use it with --head")
    check_new(output)
    loaded, _ = machine.load()
    head = opened.load(loaded.target)
    with new_folder(output) as place:
        about = {"imported": opened.layout.name, "from": folder.name}
        save(head, place, (read_provenance(folder) or {}) | about)
    _written(output, {"kind": head.kind, "layout": "outpace", "model": model}, json)


def validate_head(
    folder: Folder,
    model: opt.ModelName = "smollm2",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="How long an answer is decoded with it.")
    ] = 32,
    json: Json = False,
    threads: opt.Threads = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
) -> None:
    """Check a head of any layout: keys, shapes, vocabulary, layers, fingerprint, and an answer decoded with it."""
    opt.check_length(max_new_tokens)
    if not folder.is_dir():
        raise BadInput(f"there is no head at '{folder}': no such folder")
    machine = Machine(model, None, dtype, device, threads)
    machine.check()
    from outpace.certify.validate_head import validate

    loaded, _ = machine.load()
    report = validate(folder, loaded, tokens=max_new_tokens)
    if json:
        print_json(report.public())
    else:
        _show(report)
    wrong = [one for one in report.checks if one.ok is False]
    if wrong:
        raise BadInput(f"{wrong[0].name}: {wrong[0].message}")


def _checked(
    folder: Path, model: str, threads: int | None, dtype: str | None, device: str | None
) -> tuple[Machine, HeadFolder]:
    """The machine and the opened head: what can be wrong with them is said before a model is loaded."""
    machine = Machine(model, None, dtype, device, threads)
    machine.check()
    from outpace.heads.head_folder import open_head

    return machine, open_head(folder)


def _about(folder: Path, model: Model, name: str) -> About:
    from outpace.heads.checkpoint import read_provenance
    from outpace.heads.layouts.base import About

    inner: Any = getattr(model.tokenizer, "inner", None)  # a tokenizer of transformers, where it is one
    architecture = model.info.get("architecture", "LlamaForCausalLM")
    return About(
        name, architecture, _idle(model), read_provenance(folder) or {}, getattr(inner, "save_pretrained", None)
    )


def _idle(model: Model) -> int | None:
    """A token that no text uses: beyond the tokenizer's, or a special one that neither chats nor answers hold."""
    used = set(model.tokenizer.chat([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]))
    used |= set(model.tokenizer.chat([{"role": "user", "content": "b"}])) | set(model.eos_ids)
    for token in reversed(range(model.target.vocab_size)):
        if token not in used and (token >= len(model.tokenizer) or model.tokenizer.token_bytes(token) is None):
            return token
    return None


def _written(folder: Path, facts: dict[str, Any], json: bool) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if json:
        print_json({"path": str(folder), **facts, "files": files})
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("head", f"[bold cyan]{escape(str(folder))}[/]")
    for name, value in facts.items():
        table.add_row(name, escape(str(value)))
    for name, size in files.items():
        table.add_row("file", f"{escape(name)}  {size / 1e6:,.2f} MB")
    out().print(table)


def _show(report: Report) -> None:
    console = out()
    title = f"{report.kind or 'head'} in layout {report.layout or 'unknown'}"
    console.print(f"[bold cyan]{escape(report.folder)}[/]  {escape(title)}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    mark = {True: "[green]ok[/]", False: "[bold red]wrong[/]", None: "[dim]-[/]"}
    for one in report.checks:
        table.add_row(mark[one.ok], one.name, escape(one.message))
    console.print(table)
