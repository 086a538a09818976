"""``outpace serve --engine vllm``: from options to vLLM's command, which is printed or run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from outpace.cli.options import option
from outpace.cli.output import err, out, print_json
from outpace.cli.serve_checks import check_port
from outpace.core.errors import BadInput
from outpace.core.names import unknown

if TYPE_CHECKING:
    from outpace.cli.session import Drafting, Hardware
    from outpace.integrations.vllm.command import Launch
    from outpace.model import Model

ENGINE = "Other engines"
ENGINES = ("outpace", "vllm")


@dataclass(frozen=True, slots=True)
class Engine:
    """Which engine serves, and what only another one than outpace's own needs."""

    engine: Annotated[
        str, option(value="NAME", panel=ENGINE, text="Engine that serves: outpace, or vllm (docs/engines.md).")
    ] = "outpace"
    vllm_python: Annotated[
        str | None,
        option(
            value="PATH",
            panel=ENGINE,
            text="Python interpreter that has vLLM. [dim]\\[default: that of make vllm, or the running one][/]",
        ),
    ] = None
    print_only: Annotated[
        bool, option("--print", panel=ENGINE, text="Print the command of --engine and start nothing.")
    ] = False
    json: Annotated[bool, option("--json", panel=ENGINE, text="With --print: print JSON instead of text.")] = False
    num_draft_tokens: Annotated[
        int | None,
        option(value="N", panel=ENGINE, text="Draft tokens per round. [dim]\\[default: as measured with the head][/]"),
    ] = None
    proposer: Annotated[
        str,
        option(
            value="NAME",
            panel=ENGINE,
            text="Whose implementation drafts for lookup methods: vllm, outpace (the plug-in), or auto (vLLM's where "
            "it has the method).",
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None, option(value="N", panel=ENGINE, text="Maximum length of a request in tokens, prompt included.")
    ] = None
    engine_arg: Annotated[
        list[str] | None,
        option(
            value="ARG",
            panel=ENGINE,
            text="Argument for the engine as it is, such as --engine-arg=--seed=1; may be repeated.",
        ),
    ] = None

    @property
    def other(self) -> bool:
        """Whether another engine than outpace's own serves. Raises BadInput for an engine that does not exist."""
        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        return self.engine != "outpace"

    def check_unused(self) -> None:
        """Raise BadInput for options that need another engine than outpace's own, where that serves."""
        if self.other:
            return
        needing = {
            "--vllm-python": self.vllm_python,
            "--print": self.print_only,
            "--json": self.json,
            "--num-draft-tokens": self.num_draft_tokens,
            "--max-model-len": self.max_model_len,
            "--engine-arg": self.engine_arg,
            "--proposer": self.proposer != "auto",
        }
        stray = next((name for name, value in needing.items() if value), None)
        if stray is not None:
            raise BadInput(f"{stray} is for another engine; add --engine vllm")


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, where, and in what bounds: options that all engines have. None leaves a bound to the engine."""

    models: Sequence[str]
    host: str
    port: int
    max_batch: int | None
    kv_bytes: int | None


def serve_vllm(
    engine: Engine,
    served: Served,
    method: str,
    drafting: Drafting,
    hardware: Hardware,
    *,
    unsupported: Mapping[str, Any],
) -> None:
    """Print vLLM's command, or run it until it ends. ``unsupported``: options of outpace's own server, by name."""
    _check(engine, served, hardware, unsupported)
    if engine.json and not engine.print_only:
        raise BadInput("--json belongs to --print")
    start = launch_for(engine, served, method, drafting, hardware)
    if engine.print_only:
        _show(start, json=engine.json)
        return
    _tell(start)
    from outpace.integrations.vllm.server import serve

    code = serve(start)
    if code:
        raise typer.Exit(code)


def check_launch(
    engine: Engine,
    served: Served,
    method: str,
    drafting: Drafting,
    hardware: Hardware,
    *,
    unsupported: Mapping[str, Any],
) -> None:
    """Raise BadInput for what :func:`serve_vllm` would refuse in a replica, and tell what it would tell; of outpace's
    own engine nothing."""
    if not engine.other:
        return
    if engine.print_only or engine.json:
        raise BadInput("--print shows the command of one server; leave out --ray")
    _check(engine, served, hardware, unsupported)
    _tell(launch_for(engine, served, method, drafting, hardware))


def _check(engine: Engine, served: Served, hardware: Hardware, unsupported: Mapping[str, Any]) -> None:
    stray = next((name for name, value in unsupported.items() if value), None)
    if stray is not None:
        raise BadInput(f"{stray} is for outpace's own server; vLLM's arguments go with --engine-arg")
    if len(served.models) > 1:
        raise BadInput(f"vLLM serves one model; --model is given {len(served.models)} times")
    check_port(served.port)
    hardware.check(served.models[0])


def _tell(start: Launch) -> None:
    for note in start.notes:
        err().print(f"[dim]{escape(note)}[/]", soft_wrap=True)


def launch_for(engine: Engine, served: Served, method: str, drafting: Drafting, hardware: Hardware) -> Launch:
    """The command of a server. Raises BadInput for what vLLM cannot serve or draft with."""
    from outpace.bench.peers.weights import FLOATS, find, float_of
    from outpace.core.sampling import SamplingParams
    from outpace.integrations.vllm.command import ServerOptions, launch
    from outpace.integrations.vllm.interpreter import find_interpreter
    from outpace.integrations.vllm.server import free_port
    from outpace.integrations.vllm.speculative_config import Wanted, speculation

    for flag, several in (("--head", drafting.head), ("--draft-model", drafting.draft_model)):
        if several and len(several) > 1:
            raise BadInput(f"{flag}: vLLM drafts with one; it is given {len(several)} times")
    if drafting.rule is not None:
        raise BadInput("--rule is for outpace's own server; vLLM has its own rejection sampler")
    if hardware.dtype is not None and hardware.dtype not in (*FLOATS, "auto"):
        raise BadInput(f"--dtype {hardware.dtype}: vLLM serves in {', '.join(FLOATS)} or auto here")
    [(_, settings)] = drafting.settings([method], SamplingParams()).items()
    interpreter = find_interpreter(engine.vllm_python, must_have_vllm=not engine.print_only)
    name, port = served.models[0], served.port
    if not engine.print_only:
        port = free_port(served.host, port)
    dtype, notes = float_of([hardware.dtype] if hardware.dtype in FLOATS else [])
    found = find(name, dtype)
    if hardware.dtype == "auto" or (not found.gguf and hardware.dtype is None):
        dtype = "auto"

    @cache
    def model() -> Model:
        import outpace.loading

        return outpace.loading.load(found.folder, dtype=None if dtype == "auto" else dtype)

    wanted = Wanted(
        method,
        settings,
        drafting.head[0] if drafting.head else None,
        drafting.draft_model[0] if drafting.draft_model else None,
        engine.num_draft_tokens,
        engine.proposer,
        None if drafting.datastore is None else str(drafting.datastore.resolve()),
        lambda draft: find(draft, "bfloat16" if dtype == "auto" else dtype).folder,
        name,
    )
    options = ServerOptions(
        found.folder,
        name,
        dtype,
        served.host,
        port,
        max_model_len=engine.max_model_len,
        max_num_seqs=served.max_batch,
        kv_bytes=served.kv_bytes,
        threads=hardware.threads,
        offline=found.local,
        further=tuple(engine.engine_arg or ()),
    )
    start = launch(speculation(wanted, model, found.folder, interpreter), options, interpreter)
    start.notes[:0] = notes
    return start


def _show(start: Launch, *, json: bool) -> None:
    if json:
        print_json(start.public())
        return
    _tell(start)
    if start.speculation.length_source:
        err().print(f"[dim]draft length: {escape(start.speculation.length_source)}[/]", soft_wrap=True)
    variables = (f"{name}={shlex.quote(value)}" for name, value in start.variables.items())
    out().print(escape(" ".join([*variables, shlex.join(start.command)])), soft_wrap=True)
