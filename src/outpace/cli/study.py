"""``outpace study``: a published claim beside what this machine shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from outpace.cli import options as opt
from outpace.cli.grouping import grouped
from outpace.cli.interrupt import terminable
from outpace.cli.options import option
from outpace.cli.output import (
    STDOUT,
    Outputs,
    check_writable,
    err,
    fact_table,
    out,
    print_json,
    to_json,
    typed,
    write_whole,
)
from outpace.cli.session import Machine
from outpace.core.errors import BadInput
from outpace.core.files import parse_json
from outpace.core.names import split_outside_brackets

if TYPE_CHECKING:
    from outpace.model import Model
    from outpace.studies.registry import Study


@grouped()
def study(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Study to run. Without one, all studies are listed.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        option(
            "--setting",
            value="KEY=VALUE",
            text="Setting of the study; lists with commas. May be repeated. See: outpace study NAME --settings.",
        ),
    ] = None,
    settings: Annotated[bool, option("--settings", text="Show the study's settings and exit.")] = False,
    plot: Annotated[Path | None, option(value="FILE", text="Write the plot as an SVG file.")] = None,
    keep: Annotated[
        Path | None,
        option(value="FOLDER", text="Keep complete parts in a folder; the same command goes on where a run was ended."),
    ] = None,
    max_minutes: Annotated[
        float | None, option(value="M", text="End after the part in which this time is over; needs --keep.")
    ] = None,
    seed: Annotated[int, option(value="N", text="Seed of the random numbers.")] = 0,
    *,
    questions: opt.PromptFile,
    outputs: Outputs,
    machine: Machine,
) -> None:
    """Test a paper's claims on this machine: each is confirmed, refuted or left undecided by a measured interval."""
    from outpace.studies.registry import StudyContext, find_study, read_settings, run_study, studies
    from outpace.studies.study_journal import StudyJournal, StudyPaused

    if name is None:
        _list(studies())
        return
    one = find_study(name)
    if settings:
        outputs.check()
        _show(one, outputs.json)
        return
    chosen = read_settings(one, _given(setting, one))
    if keep is not None and not one.resumable:
        raise BadInput(
            f"study '{one.name}' takes minutes and keeps no parts; leave out --keep, which "
            f"{', '.join(each.name for each in studies() if each.resumable)} have"
        )
    if keep is not None and not keep.absolute().parent.is_dir():
        raise BadInput(f"--keep {keep}: there is no folder {keep.absolute().parent}")
    if keep is not None and keep.exists() and not keep.is_dir():
        raise BadInput(f"--keep {keep}: that is a file; name a folder")
    journal = StudyJournal(keep, max_minutes, lambda text: err().print(f"[dim]{escape(text)}", soft_wrap=True))
    outputs.check()
    if plot is not None:
        check_writable(plot)
    machine.check()
    prompts = questions.read_unconstrained("study", one.prompts)

    def load(name: str, dtype: str | None) -> Model:
        wanted = machine if dtype is None else replace(machine, dtype=dtype)
        wanted.check(name)
        return wanted.load(name)

    try:
        with terminable():
            report = run_study(one, StudyContext(machine.model, prompts, load, seed, journal), chosen, typed())
    except StudyPaused:
        raise
    except KeyboardInterrupt as stop:
        raise (stop if keep is None else journal.paused(str(stop) or "Ctrl-C")) from None
    if plot is not None:
        write_whole(plot, report.write_plot)
        err().print(f"[dim]plot: {plot}", soft_wrap=True)
    outputs.write(report)


def _given(pairs: list[str] | None, one: Study) -> dict[str, Any]:
    """``--setting`` values; those of lists with commas. Raises BadInput for what is not KEY=VALUE."""
    found: dict[str, Any] = {}
    for key, text in opt.key_values("--setting", pairs).items():
        field = one.settings.model_fields.get(key)
        listed = field is not None and "list" in str(field.annotation)
        if text.startswith("["):
            try:
                found[key] = parse_json(text)
            except ValueError as error:
                raise BadInput(f"--setting {key}: the value is not valid JSON: {error}") from None
        else:
            found[key] = split_outside_brackets(text) if listed else text
    return found


def _list(found: list[Study]) -> None:
    rows = [(f"[cyan]{one.name}[/]", f"{escape(one.title)} [dim]({escape(one.paper)})[/]") for one in found]
    out().print(fact_table(rows))
    err().print("\n[dim]To run one: outpace study NAME --json FILE")


def _show(chosen: Study, json: str | None) -> None:
    fields = chosen.settings.model_fields
    if json is not None:
        schema = chosen.settings.model_json_schema()
        if json == STDOUT:
            print_json(schema)
        else:
            write_whole(Path(json), lambda path: path.write_text(to_json(schema) + "\n", encoding="utf-8"))
        return
    rows = [
        (name, f"{escape(str(one.description))} [dim](default: {escape(str(one.default))})[/]")
        for name, one in fields.items()
    ]
    out().print(fact_table(rows))
