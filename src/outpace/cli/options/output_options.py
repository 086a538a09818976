"""What a command writes: JSON, the trace of its rounds, a run that can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from outpace.cli.options.declaration import option
from outpace.core.errors import BadInput

Json = Annotated[bool, option("--json", text="Print JSON instead of text.")]
TraceFile = Annotated[
    Path | None,
    option(
        value="FILE",
        text="Write what every round drafted, committed and took as JSON lines, without text, for outpace simulate.",
    ),
]
TraceTexts = Annotated[bool, option("--trace-texts", text="Include prompts and answers in the file of --trace.")]


def resume_option(panel: str | None = None) -> Any:
    """The option --resume, which means the same for every command that has it."""
    return option("--resume", panel=panel, text="Continue the interrupted run in --out.")


Resume = Annotated[bool, resume_option()]


def check_trace(trace: Path | None, texts: bool) -> None:
    """Raise BadInput for texts of a trace that is not written."""
    if texts and trace is None:
        raise BadInput("--trace-texts adds to the lines of --trace; give that too")
