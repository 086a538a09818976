"""A folder of conversations: prompts are collected, answered by the target, and kept with its hidden states.

The folder holds the shards (:mod:`outpace.training.shards`) and ``prompts.jsonl``, a line for every prompt that was
judged: to be answered, or why not. A shard is one block of prompts and depends on nothing else, so a run that was
stopped at any moment and begun again writes what it would have written. Kinds of heads share a folder: it keeps hidden
states of the layers that any of them reads until they fill the byte budget; beyond it text alone, whose states the
target computes again.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from outpace.core.errors import BadInput
from outpace.core.files import read_json
from outpace.core.validation import validated
from outpace.heads.fingerprint import alike, probe
from outpace.heads.kinds import kinds
from outpace.model import Model
from outpace.prompts.overlap import Overlap
from outpace.prompts.prompt import Prompt
from outpace.targets.base import Target
from outpace.training.answers import Answering, PromptTokens, answered
from outpace.training.candidates import Candidates
from outpace.training.data_config import DataConfig
from outpace.training.dialogues import Dialogues, joined
from outpace.training.memory import give_back, ran_out
from outpace.training.prompt_log import LOG, Log
from outpace.training.shards import MANIFEST, Conversation, Shards, state_bytes

BLOCK = 192
"""Prompts that are answered between two shards, at most."""
_SHARD_BYTES = 256 * 2**20
"""Bytes of hidden states in a shard, about."""
_LEAST_BLOCK = 8
CACHE = 20 * 10**9
"""Bytes of hidden states that are kept at most where nobody says how many."""


@dataclass(slots=True)
class Collected:
    """Progress of a collection: ``tokens`` of ``prompts`` answers; ``removed``: prompts left out, by reason;
    ``sources``: prompts answered, by source; ``doing``: what is going on, for a progress bar."""

    tokens: int = 0
    prompts: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    doing: str = ""

    def public(self) -> dict[str, Any]:
        """As a head's provenance has it."""
        return {
            "answer_tokens": self.tokens,
            "prompts": self.prompts,
            "sources": dict(self.sources),
            "removed": dict(self.removed),
        }


Watch = Callable[[Collected], None]


def layers_of_all_kinds(target: Target) -> tuple[int, ...]:
    """The layers that any kind of head reads with its default settings, and the last one's output; ascending."""
    found = {target.num_layers}
    for kind in kinds().values():
        found |= set(kind.aux_layers_of(target.num_layers, kind.Options()))
    return tuple(sorted(found))


def open_folder(folder: Path, target: Target, name: str, layers: Sequence[int]) -> Shards:
    """The conversations in ``folder``, or a new folder for hidden states of ``layers``. ``name``: the target's.

    A folder that exists keeps its own layers: others are computed when they are read. Raises BadInput for a folder that
    cannot be written, and for conversations of another target: the weights' fingerprint decides, not the name.
    """
    manifest = folder / MANIFEST
    if not manifest.exists():
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder} is a file; conversations need a folder")
        try:
            return Shards(folder, {"target": name, "fingerprint": probe(target), "layers": list(layers)})
        except OSError as error:
            raise BadInput(f"cannot write to {folder}: {error.strerror or error}") from None
    shards = Shards(folder, {})
    found = about(shards)
    if found.fingerprint is None or found.layers is None:
        raise BadInput(f"{manifest} does not say which target the conversations are of; give another folder")
    if not alike(found.fingerprint, probe(target)):
        raise BadInput(
            f"{folder} holds conversations of another target ({found.target}), not of '{name}'; give another folder"
        )
    beyond = [layer for layer in found.layers if layer > target.num_layers]
    if beyond:
        raise BadInput(
            f"{manifest} names layer {beyond[0]}, and the target has {target.num_layers}; give another folder"
        )
    return shards


class Manifest(BaseModel):
    """What all conversations of a folder have in common. ``layers``: those whose hidden states are kept."""

    target: str = "unnamed"
    fingerprint: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    layers: list[Annotated[int, Field(ge=0)]] | None = None


def about(shards: Shards) -> Manifest:
    """The folder's manifest. Raises BadInput for one that is damaged."""
    path = shards.folder / MANIFEST

    def refusal(key: str, reason: str) -> BadInput:
        return BadInput(f"{path} is damaged, {key}: {reason}; give another folder")

    return validated(Manifest, read_json(path), refusal)


class Collector:
    """Fills a folder with conversations of ``model``. ``excluded``: texts with which no prompt may overlap."""

    def __init__(self, model: Model, shards: Shards, config: DataConfig, excluded: Overlap) -> None:
        self.model, self.shards, self.config = model, shards, config
        self.layers = tuple(about(shards).layers or ())
        room = min(model.target.context_length, config.room or model.target.context_length)
        self._most = max(1, min(config.most, room // 2))
        longest = max(1, min(config.longest, room - self._most - 2))
        self.log = Log(shards.folder / LOG)
        self._answered = set(shards.keys())
        self._excluded, self._longest = excluded, longest
        self._candidates = Candidates(model, config, excluded, self.log, longest)
        self._recall()
        self.state = Collected(shards.answer_tokens(), len(self._answered))

    def _recall(self) -> None:
        """Tell the candidates what an earlier run has answered."""
        unlogged = self._answered - {prompt.key for prompt in self.log.prompts}
        for path in self.shards.paths:
            if self.config.passages:
                self._candidates.add_passages(self.shards.read(path))
            if unlogged:
                self._candidates.add_answered(self.shards.read(path, wanted=unlogged.__contains__))

    def run(self, watch: Watch = lambda _: None, tokens: int | None = None) -> Collected:
        """Collect until there are ``tokens`` of answers, no prompts are left or the time for data is over.

        None: as many as are configured. What was written before is always kept. ``watch`` is called after every
        answer. Raises BadInput where memory or the disk is full and where there is nothing to answer.
        """
        tokens = self.config.tokens if tokens is None else tokens
        try:
            while self.state.tokens < tokens and not self.config.plan.data_over():
                block = self._block(tokens - self.state.tokens, watch)
                if not block:
                    break
                self._answer(block, watch)
        except (MemoryError, RuntimeError) as error:
            if ran_out(error):
                raise BadInput(
                    "memory ran out while prompts were answered; earlier answers are kept: free some memory, and "
                    "continue with --resume"
                ) from error
            raise
        self._count()
        if not self.state.tokens:
            if self.config.plan.data_over():
                raise BadInput(
                    "no prompt was answered in the time for data; give more --max-minutes, or --prompts FILE"
                )
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.log.removed.items()))
            raise BadInput("no prompt was left to answer: " + (reasons or "the sources have none"))
        return self.state

    def _count(self) -> None:
        self.state.removed = self.log.removed
        self.state.sources = Counter(
            prompt.id.rpartition(":")[0] for prompt in self.log.prompts if prompt.key in self._answered
        )
        self.state.prompts = len(self._answered)

    def _block(self, left: int, watch: Watch) -> list[Prompt]:
        """The next prompts to be answered, for ``left`` more tokens: those in the log that wait, and new ones."""
        mean = self.state.tokens / len(self._answered) if self._answered else self._most / 2
        size = min(self._largest(), max(_LEAST_BLOCK, math.ceil(left / max(1.0, mean))))
        waiting = [prompt for prompt in self.log.prompts if prompt.key not in self._answered]
        while len(waiting) < size and not self.config.plan.data_over():
            self.state.doing = "collecting prompts"
            watch(self.state)
            before = len(self.log.prompts)
            if not self._candidates.more(size - len(waiting)):
                break
            waiting += self.log.prompts[before:]
        return waiting[:size]

    def _largest(self) -> int:
        """How many prompts a block may have, so that its hidden states take about ``_SHARD_BYTES``."""
        layers = len(self._kept_layers())
        if not layers:
            return BLOCK
        a_token = state_bytes(layers, self.model.target.hidden_size, self.config.state_bits)
        a_prompt = a_token * self.config.turns * (self._most // 2 + 224)
        return max(_LEAST_BLOCK, min(BLOCK, _SHARD_BYTES // a_prompt))

    def _kept_layers(self) -> tuple[int, ...]:
        """The layers whose hidden states the next shard keeps."""
        return self.layers if self.shards.bytes < self._cache() else ()

    def _answer(self, block: Sequence[Prompt], watch: Watch) -> None:
        """Answer a block and write its shard, in the order of its prompts: as far as there is time."""
        capture = self._kept_layers()
        chat, sampling = self.model.tokenizer.chat, self.config.sampling
        prompts = [PromptTokens(one.key, tuple(chat(one.messages)), *sampling.of(one.key)) for one in block]
        base = self.state.tokens
        kept = capture or not self.layers
        self.state.doing = "answering" if kept else "answering (states are not kept: --cache-bytes)"
        found = {one.key: [one] for one in self._answers(prompts, capture, watch)}
        self.state.prompts += len(found)
        if self.config.turns > 1:
            self._continue(block, found, capture, watch)
        if not found:
            if self.config.plan.data_over():
                return
            raise BadInput("the model answered none of the prompts")
        conversations = [one for prompt in block for one in found.get(prompt.key, ())]
        self.shards.append(conversations, state_bits=self.config.state_bits)
        if self.config.passages:
            self._candidates.add_passages(conversations)
        give_back()
        self._answered |= set(found) if self.config.plan.data_over() else {prompt.key for prompt in block}
        self.state.tokens = base + sum(one.answer_tokens for one in conversations)

    def _answers(self, prompts: Sequence[PromptTokens], capture: Sequence[int], watch: Watch) -> Iterator[Conversation]:
        """The target's answers, as they end, with hidden states of the layers in ``capture``."""
        stops, together = self.model.eos_ids, self.config.together
        over = self.config.plan.data_over
        ask: Answering = self.config.answering or partial(answered, self.model.target)
        for one in ask(prompts, capture, most=self._most, stop_ids=stops, together=together, over=over):
            self.state.tokens += len(one.answer)
            watch(self.state)
            yield one

    def _continue(
        self, block: Sequence[Prompt], found: dict[str, list[Conversation]], capture: Sequence[int], watch: Watch
    ) -> None:
        """Add further turns to the conversations in ``found``, by their keys."""
        dialogues = Dialogues(self.model, self.config, self._excluded, self._longest, block)
        for turn in range(1, self.config.turns):
            if self.config.plan.data_over():
                return
            for one in self._answers(dialogues.next_turn(turn, found), capture, watch):
                found[one.key] = joined(found[one.key], one)

    def _cache(self) -> int:
        if self.config.cache_bytes is not None:
            return self.config.cache_bytes
        return min(CACHE, self.shards.bytes + shutil.disk_usage(self.shards.folder).free // 2)
