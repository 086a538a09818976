"""Which prompts a command decodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from outpace.cli.options.declaration import option
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts, without_grammars


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompts that a command decodes."""

    prompts: Annotated[
        Path | None,
        option(
            value="FILE",
            text="Prompts: Spec-Bench questions, JSONL, JSON or plain text; or a name: structured (60 prompts with "
            "grammars, for bench and eval-head), software (18 about code), code-editing, ... "
            "[dim]\\[default: embedded set][/]",
        ),
    ] = None
    limit: Annotated[int | None, option(value="N", text="Use only N prompts, taken from all categories in turn.")] = (
        None
    )

    def read(self, default: str | None = None) -> list[Prompt]:
        """The prompts, where none are named those of the set ``default``. Raises BadInput for a file that holds none,
        and a limit below 1."""
        return load_prompts(self.prompts or default, self.limit)

    def read_unconstrained(self, command: str, default: str | None = None) -> list[Prompt]:
        """As ``read``, for a command that cannot hold answers to a grammar: BadInput for prompts that have one."""
        return list(without_grammars(self.read(default), f"outpace {command}"))
