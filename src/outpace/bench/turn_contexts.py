"""The tokens that each turn of a prompt begins with: its conversation so far, in the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from outpace.bench.records import Answer, Record
from outpace.core.errors import BadInput
from outpace.model import Model
from outpace.prompts.prompt import Prompt


def contexts(
    model: Model, prompts: Sequence[Prompt], records: Mapping[str, Record], turn: int
) -> dict[Prompt, tuple[int, ...]]:
    """What each prompt's turn begins with, after the answers of ``records``; without prompts that are over or have
    outgrown the context."""
    found = {}
    for prompt in prompts:
        if turn < len(prompt.turns):
            tokens = context(model, prompt, records[prompt.id].answers)
            if len(tokens) < model.target.context_length:
                found[prompt] = tokens
    return found


def context(model: Model, prompt: Prompt, answers: Sequence[Answer]) -> tuple[int, ...]:
    """What a prompt's next turn begins with, after these answers."""
    messages = [{"role": role, "content": content} for role, content in prompt.history]
    spoken = [model.tokenizer.decode(answer.tokens) for answer in answers]
    for question, answer in zip_longest(prompt.turns[: len(answers) + 1], spoken):
        messages.append({"role": "user", "content": question})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return tuple(model.tokenizer.chat(messages))


def check_room(model: Model, prompt: Prompt) -> None:
    """Raise BadInput for a prompt whose first turn leaves no room in the context for an answer."""
    size, room = len(context(model, prompt, [])), model.target.context_length
    if not 0 < size < room:
        raise BadInput(
            f"prompt '{prompt.id}' has {size} tokens; the model's context holds {room}, "
            "answer included; shorten the prompt or leave it out"
        )


def characters(batch: Sequence[Prompt]) -> int:
    """Of the longest first prompt of a batch: in the order of their lengths in tokens, without encoding them all."""
    return max(sum(len(one["content"]) for one in prompt.messages) for prompt in batch)
