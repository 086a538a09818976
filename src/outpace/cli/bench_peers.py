"""``outpace bench-peers``: outpace beside other libraries, on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.markup import escape

from outpace.cli import options as opt
from outpace.cli.bars import advancing
from outpace.cli.grouping import grouped
from outpace.cli.interrupt import terminable
from outpace.cli.options import option
from outpace.cli.output import Outputs, err, typed
from outpace.cli.session import Drafting, Machine
from outpace.core.errors import BadInput
from outpace.core.machine import usable_cpus

if TYPE_CHECKING:
    from outpace.bench.peers.comparison import Comparison
    from outpace.bench.peers.entries import Entry
    from outpace.bench.peers.peers_report import PeersReport
    from outpace.bench.settings import Progress


@grouped()
def bench_peers(
    model: opt.ModelName = "smollm2",
    methods: Annotated[
        str, option(value="A,B", text="Methods of outpace to run; none (autoregressive) always runs.")
    ] = "none,sam,auto",
    peers: Annotated[
        str | None, option(value="X,Y", text="Libraries to compare with. [dim]\\[default: all that are installed][/]")
    ] = None,
    dtypes: Annotated[
        str | None,
        option(value="D,E", text="Precisions of outpace. [dim]\\[default: bfloat16, and int4 for GGUF, else int8][/]"),
    ] = None,
    gguf_formats: Annotated[
        str | None,
        option(
            value="F,G",
            text="GGUF formats of llama.cpp: own (the file's), Q4_0, Q4_K_M. [dim]\\[default: own, and those of the "
            "others that llama.cpp computes fastest in][/]",
        ),
    ] = None,
    *,
    prompts: opt.PromptFile,
    max_new_tokens: opt.MaxNewTokens = 64,
    draft_model: opt.DraftModel = None,
    head: opt.Head = None,
    outputs: Outputs,
    vllm_python: Annotated[
        str | None,
        option(value="PATH", text="Python interpreter that has vLLM. [dim]\\[default: .peers/vllm/bin/python][/]"),
    ] = None,
    timeout: Annotated[
        float, option(value="S", text="Seconds that a library may take to load, and per answer.")
    ] = 900.0,
    max_minutes: Annotated[
        float | None,
        option(value="M", text="Time limit for the whole comparison; what was measured until then is reported."),
    ] = None,
    threads: opt.Threads = None,
) -> None:
    """Compare outpace with other libraries: same prompts and threads, greedy, one process per library.

    Rows are printed as they finish. The JSON file is written before the first answer, and again after every row and
    every prompt; Ctrl-C, SIGTERM and --max-minutes end the run with the results so far.
    """
    opt.check_length(max_new_tokens)
    if not timeout > 0:
        raise BadInput(f"--timeout must be above 0 seconds, not {timeout:g}")
    if max_minutes is not None and not max_minutes > 0:
        raise BadInput(f"--max-minutes must be above 0, not {max_minutes:g}")
    if draft_model and len(draft_model) > 1:
        raise BadInput(f"--draft-model can be given only once here, not {len(draft_model)} times")
    drafting = Drafting(draft_model=draft_model, head=head)
    Machine(model=model, threads=threads).check()
    drafting.check()
    outputs.check()
    shown = _Shown(outputs)
    with terminable():
        try:
            from outpace.bench.peers.comparison import ComparisonSettings, prepare
            from outpace.bench.peers.libraries import choose
            from outpace.core.sampling import SamplingParams
            from outpace.methods.named_weights import name_and_rest

            chosen = tuple(choose(None if peers is None else opt.names(peers)))
            questions = prompts.read_unconstrained("bench-peers")
            names = drafting.settings(["none", *opt.names(methods)], SamplingParams())
            settings = ComparisonSettings(
                model=model,
                peers=chosen,
                methods=tuple(names),
                dtypes=None if dtypes is None else tuple(opt.names(dtypes)),
                gguf_formats=None if gguf_formats is None else tuple(opt.names(gguf_formats)),
                draft_model=name_and_rest(draft_model[0])[1] if draft_model else None,
                heads=tuple(map(_absolute, head or ())),
                vllm_python=vllm_python,
                max_new_tokens=max_new_tokens,
                threads=threads or usable_cpus(),
                timeout=timeout,
                max_minutes=max_minutes,
                command=typed(),
            )
            report = _run(prepare(settings, questions), shown)
            by = report.result["stopped_by"] or ""
        except KeyboardInterrupt as stop:
            from outpace.bench.peers.peers_report import PeersReport

            report, by = shown.latest or PeersReport.empty(), str(stop)
    outputs.write(report, "" if by == "Ctrl-C" else by)


def _run(comparison: Comparison, shown: _Shown) -> PeersReport:
    for note in comparison.notes:
        err().print(f"[yellow]note[/] {note}")
    for one in comparison.plan.skipped:
        err().print(f"[yellow]skipped[/] {one['name']}: {one['why']}; to install: {one['install']}", soft_wrap=True)
    with advancing("comparison") as advance:
        shown.advance = advance
        return comparison.run(shown)


class _Shown:
    """Shows the progress, and keeps the JSON file up to date. ``latest``: the results so far."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self.advance: Callable[[Progress], None] | None = None
        self.latest: PeersReport | None = None

    def progress(self, now: Progress) -> None:
        if self.advance is not None:
            self.advance(now)

    def results(self, report: PeersReport) -> None:
        self.latest = report
        self.outputs.keep(report)

    def note(self, text: str) -> None:
        err().print(f"[yellow]note[/] {escape(text)}", soft_wrap=True)

    def row(self, entry: Entry) -> None:
        from outpace.bench.peers.peers_report import finished

        colour = "red" if entry.error else "green"
        err().print(f"[{colour}]row[/] {escape(finished(entry))}", soft_wrap=True)


def _absolute(head: str) -> str:
    """A head as the option gives it, for a process in another folder."""
    from outpace.methods.named_weights import name_and_rest

    name, folder = name_and_rest(head)
    return f"{name}={Path(folder).absolute()}" if name else str(Path(folder).absolute())
