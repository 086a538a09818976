"""The command line: one file a command. Nothing here imports torch before a command runs.

Exit codes: 0; 2 for bad input, with one line on standard error; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

import outpace
from outpace.cli.advise import advise
from outpace.cli.bars import showing
from outpace.cli.bench import bench
from outpace.cli.bench_peers import bench_peers
from outpace.cli.certify import certify
from outpace.cli.chat import chat
from outpace.cli.controllers import controllers
from outpace.cli.datastore import datastore
from outpace.cli.doctor import doctor
from outpace.cli.eval_head import eval_head
from outpace.cli.generate import generate
from outpace.cli.heads import export_head, import_head, validate_head
from outpace.cli.interrupt import INTERRUPTED, deferred
from outpace.cli.methods import methods
from outpace.cli.output import err
from outpace.cli.rules import rules
from outpace.cli.serve import serve
from outpace.cli.simulate import simulate
from outpace.cli.study import study
from outpace.cli.train import train
from outpace.cli.tune import tune
from outpace.core.errors import OutpaceError, out_of_memory

BAD_INPUT = 2

app = typer.Typer(
    name="outpace",
    epilog="Start with: outpace doctor, then outpace generate 'Why is the sky blue?' --explain",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Faster text generation by speculative decoding, with an unchanged output distribution."""
    if version:
        print(f"outpace {outpace.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


for command in (generate, chat, serve, advise, simulate, study, bench, bench_peers, certify, train, tune, eval_head):
    app.command()(command)
for listing in (methods, rules, controllers, doctor):
    app.command()(listing)
for head_command in (validate_head, export_head, import_head):
    app.command()(head_command)
app.add_typer(datastore)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _be_patient()
    # A shell that starts a job in the background ignores SIGINT for it; an interrupt sent on purpose must still work.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _run(given)
        sys.stdout.flush()
    except SystemExit as leaving:  # how rich and typer leave when a pipe breaks inside them
        _abandon_stdout()
        code = leaving.code if isinstance(leaving.code, int) and leaving.code != 1 else 0
    except Exception as error:
        code = _explain(error, given)
    return code


def _run(argv: list[str]) -> int:
    """One command and its exit code. Not typer's own ``main``, which drops what a KeyboardInterrupt says."""
    command = typer.main.get_command(app)
    with showing() as bars:
        try:
            with command.make_context("outpace", argv) as context:
                command.invoke(context)
        except typer.Exit as leaving:
            return leaving.exit_code
        except KeyboardInterrupt as stop:
            with deferred():  # a second Ctrl-C does not cut this line
                err().print(f"[yellow]interrupted[/]: {escape(str(stop) or bars.unfinished)}", soft_wrap=True)
            return INTERRUPTED
    return 0


def _explain(error: Exception, argv: list[str]) -> int:
    """What to say about an error, and the exit code; what is a defect of ours is raised again."""
    usage: Any = getattr(error, "format_message", None)  # typer's usage errors, whichever typer it is
    if isinstance(error, OutpaceError):
        return _complain(str(error))
    if usage is not None:
        return _complain(_usage(usage(), getattr(error, "ctx", None), argv))
    if isinstance(error, BrokenPipeError):
        _abandon_stdout()
        return 0
    if out_of_memory(error):
        return _complain("not enough memory; use a smaller model, a smaller --dtype (int4, int8) or shorter prompts")
    if isinstance(error, OSError):  # no space, no permission, no network: the machine's doing, so no traceback
        _abandon_stdout()
        reason = error.strerror or str(error)
        return _complain(f"{error.filename}: {reason}" if error.filename else reason)
    raise error


def _usage(message: str, context: Any, argv: list[str]) -> str:
    """A usage error, and the command that lists what may be written, unless the message names it already."""
    if "Possible options:" in message or "Did you mean" in message:
        return message
    if message.startswith("No such option") and "generate" in argv[:1]:
        message = f"{message} (put -- before a prompt that begins with a dash)"
    command = getattr(context, "command_path", "outpace")
    return f"{message.rstrip('.')}; see: {command} --help"


def _be_patient() -> None:
    """Let OpenMP's threads sleep sooner while they wait for each other; takes effect when torch is imported.

    With gcc's default they spin, and decoding is many times slower where another program wants the cores (LOG.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _complain(message: str) -> int:
    """One line on standard error, whatever the message holds."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    return BAD_INPUT


def _abandon_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
