"""What is refused before a training begins: amounts, shares and folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outpace.core.errors import BadInput
from outpace.heads.head_config import WEIGHTS
from outpace.training.run_state import STATE
from outpace.training.state_server import is_address


def check_amounts(
    tokens: int | None,
    rank: int,
    vocabulary: int | None,
    max_minutes: float | None,
    epochs: float | None,
    cache_bytes: float | None,
    rate: float | None = None,
) -> None:
    """Raise BadInput for an amount out of range."""
    for option, value, least in (("--tokens", tokens, 1), ("--rank", rank, 0), ("--vocabulary", vocabulary, 0)):
        if value is not None and value < least:
            raise BadInput(f"{option} must be at least {least}, not {value}")
    for option, amount in (("--max-minutes", max_minutes), ("--epochs", epochs)):
        if amount is not None and not amount > 0.0:
            raise BadInput(f"{option} must be above 0, not {amount:g}")
    if rate is not None and not 0.0 < rate <= 1.0:
        raise BadInput(f"--rate must be above 0 and at most 1, not {rate:g}")
    if cache_bytes is not None and not 0.0 <= cache_bytes < float("inf"):
        raise BadInput(f"--cache-bytes must be a number of bytes, not {cache_bytes:g}")


def check_shares(self_written: float | None, passages: float, prompts: bool, texts: bool = False) -> None:
    """Raise BadInput for shares of prompts that cannot be had; ``prompts``, ``texts``: whether some were given."""
    if self_written is not None and not 0.0 <= self_written <= 1.0:
        raise BadInput(f"--self-written must be between 0 and 1, not {self_written:g}")
    if not 0.0 <= passages < 1.0:
        raise BadInput(f"--passages must be at least 0 and below 1, not {passages:g}: passages come from other answers")
    if texts and not passages:
        raise BadInput("--texts are for prompts about passages, and --passages 0 wants none; leave one of them out")
    if self_written == 0.0 and not prompts:
        raise BadInput("--self-written 0 leaves no prompts; give --prompts FILE")


def check_folder(folder: Path, resume: bool) -> None:
    """Raise BadInput for a folder that cannot be written, or that holds what nobody asked to go on with."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write to {folder}: {error.strerror or error}") from None
    if (folder / STATE).exists():
        if not resume:
            raise BadInput(f"{folder} holds a run already; continue it with --resume, or choose another folder")
    elif (folder / WEIGHTS).exists():
        raise BadInput(f"{folder} holds a head already; give another folder, and --from {folder} to begin from it")


def check_sources(
    states: str | Path | None,
    data: str | Path | None,
    state_bits: int,
    collecting: Sequence[str],
    caching: Sequence[str],
) -> None:
    """Raise BadInput for conversations of two sources, and for a size of numbers that hidden states do not have.

    ``collecting``: options that were given and that say which conversations are collected; ``caching``: how their
    states are kept.
    """
    idle = [] if states is None else caching if is_address(states) else [*collecting, *caching]
    if idle:
        what = "a server that gives them again" if is_address(states) else "a folder that is read as it is"
        raise BadInput(f"{', '.join(idle)} cannot be used with --states {states}, {what}; leave it out")
    if states is not None and data is not None and not is_address(states):
        raise BadInput("--states and --data are two sources of conversations; give one of them")
    if state_bits not in (8, 16):
        raise BadInput(f"--state-bits must be 8 or 16, not {state_bits}")


def check_lengths(turns: int, prompt_tokens: int, answer_tokens: int) -> None:
    """Raise BadInput for conversations that cannot be had."""
    for option, value in (("--turns", turns), ("--prompt-tokens", prompt_tokens), ("--answer-tokens", answer_tokens)):
        if value < 1:
            raise BadInput(f"{option} must be at least 1, not {value}")


def check_drafter(draft_model: object) -> None:
    """Raise BadInput for a draft model in the training of a head."""
    from outpace.training.gates.registry import gate_trainings

    if draft_model is not None:
        raise BadInput(f"--draft-model is for gates ({', '.join(gate_trainings())}); a head drafts by itself")
