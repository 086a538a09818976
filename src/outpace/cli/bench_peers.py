"""``outpace bench-peers``: outpace beside other libraries, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outpace.cli import options as opt
from outpace.cli.bars import advancing
from outpace.cli.grouping import grouped
from outpace.cli.options import option
from outpace.cli.output import Outputs, err, typed
from outpace.cli.session import Drafting, Machine
from outpace.core.errors import BadInput
from outpace.core.machine import usable_cpus


@grouped()
def bench_peers(
    model: opt.ModelName = "smollm2",
    methods: Annotated[
        str, option(value="A,B", text="outpace's methods; autoregressive decoding (none) always runs.")
    ] = "none,sam,auto",
    peers: Annotated[
        str | None, option(value="X,Y", text="Libraries to compare with. [dim]\\[default: installed][/]")
    ] = None,
    dtypes: Annotated[
        str | None,
        option(value="D,E", text="outpace's precisions. [dim]\\[default: bfloat16, and int4 for GGUF, else int8][/]"),
    ] = None,
    *,
    prompts: opt.PromptFile,
    max_new_tokens: opt.MaxNewTokens = 64,
    draft_model: opt.DraftModel = None,
    head: opt.Head = None,
    outputs: Outputs,
    vllm_python: Annotated[
        str | None,
        option(value="PATH", text="An interpreter that has vLLM. [dim]\\[default: .peers/vllm/bin/python][/]"),
    ] = None,
    timeout: Annotated[float, option(value="S", text="Seconds a library may take to load, or for one answer.")] = 900.0,
    threads: opt.Threads = None,
) -> None:
    """Compare with other libraries: same prompts and threads, greedy, each in a process of its own, in turn."""
    opt.check_length(max_new_tokens)
    if timeout <= 0:
        raise BadInput(f"--timeout must be above 0 seconds, not {timeout:g}")
    if draft_model and len(draft_model) > 1:
        raise BadInput(f"one draft model is compared with at a time, not {len(draft_model)}: leave out all but one")
    drafting = Drafting(draft_model=draft_model, head=head)
    Machine(model, threads).check()
    drafting.check()
    outputs.check()
    try:
        from outpace.bench.peers.comparison import ComparisonSettings, prepare
        from outpace.bench.peers.libraries import choose
        from outpace.core.sampling import SamplingParams
        from outpace.methods.named_weights import name_and_rest

        chosen = tuple(choose(None if peers is None else opt.names(peers)))
        questions = prompts.read()
        names = drafting.settings(["none", *opt.names(methods)], SamplingParams())
        settings = ComparisonSettings(
            model=model,
            peers=chosen,
            methods=tuple(names),
            dtypes=None if dtypes is None else tuple(opt.names(dtypes)),
            draft_model=name_and_rest(draft_model[0])[1] if draft_model else None,
            heads=tuple(map(_absolute, head or ())),
            vllm_python=vllm_python,
            max_new_tokens=max_new_tokens,
            threads=threads or usable_cpus(),
            timeout=timeout,
            command=typed(),
        )
        comparison = prepare(settings, questions)
        for note in comparison.notes:
            err().print(f"[yellow]note[/] {note}")
        for one in comparison.plan.skipped:
            err().print(f"[yellow]skipped[/] {one['name']}: {one['why']}; to install: {one['install']}", soft_wrap=True)
        with advancing("comparison") as advance:
            report = comparison.run(advance)
    except KeyboardInterrupt:
        from outpace.bench.peers.peers_report import PeersReport

        report = PeersReport.empty()
    outputs.write(report)


def _absolute(head: str) -> str:
    """A head as the option gives it, for a process in another folder."""
    from outpace.methods.named_weights import name_and_rest

    name, folder = name_and_rest(head)
    return f"{name}={Path(folder).absolute()}" if name else str(Path(folder).absolute())
