"""What is asked for beside the prompt: how an answer begins, how long it may be, where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from outpace.cli.options.declaration import option
from outpace.core.errors import BadInput
from outpace.core.text import check_text

System = Annotated[str | None, option(value="TEXT", text="System message.")]
Stop = Annotated[list[str] | None, option(value="TEXT", text="Stop before this text; may be repeated.")]
MaxNewTokens = Annotated[
    int, option("--max-new-tokens", "-n", value="N", text="Maximum number of tokens in an answer.")
]
IgnoreEos = Annotated[
    bool, option("--ignore-eos", text="Ignore end-of-sequence tokens: every answer has --max-new-tokens tokens.")
]


def check_length(max_new_tokens: int) -> None:
    """Raise BadInput for a length that leaves nothing to generate."""
    if max_new_tokens < 1:
        raise BadInput(f"--max-new-tokens must be at least 1, not {max_new_tokens}")


def check_texts(system: str | None, stop: Sequence[str] | None) -> None:
    """Raise BadInput for a system message or a stop string that is not valid text."""
    check_text(system or "", "--system")
    for one in stop or ():
        check_text(one, "--stop")
