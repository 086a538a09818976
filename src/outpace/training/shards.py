"""Conversations of a target on disk, with the hidden states that drafters read, in files of some hundred each.

A folder has ``manifest.json`` (which target, which layers) and shards ``part-00000.safetensors``. A shard appears
whole or not at all, so a kill loses one at most, and a second run goes on where the first one stopped. Tensors of a
shard of c conversations with n tokens together:

``tokens`` (n,) int32, prompts and answers end to end; ``starts`` (c + 1,) int64, where in ``tokens`` each conversation
begins; ``answers`` (c,) int64, where each answer begins; ``state.L`` (n, hidden) bfloat16, the residual stream entering
layer L at each token, absent from shards beyond the byte budget. The metadata's ``keys`` are the prompts' keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.files import atomic_file, write_atomically

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(slots=True)
class Conversation:
    """A prompt and the target's answer, in tokens.

    ``states[layer]``: (tokens, hidden) of prompt and answer, in any float type; may be empty.
    """

    key: str
    prompt: list[int]
    answer: list[int]
    states: dict[int, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]


class Shards:
    """The conversations in a folder. Raises BadInput for a folder that belongs to something else."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """``about``: what all conversations of a folder have in common (target, layers), as in its manifest."""
        self.folder = folder
        self.about = {"format": FORMAT, **about}
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / MANIFEST
        if manifest.exists():
            self._check(manifest)
        elif any(folder.glob("part-*.safetensors")):
            raise BadInput(f"{folder} holds conversations but no {MANIFEST}; give another folder")
        else:
            write_atomically(manifest, json.dumps(self.about, indent=1).encode())

    def _check(self, manifest: Path) -> None:
        try:
            found = json.loads(manifest.read_text())
        except ValueError as error:
            raise BadInput(f"{manifest} cannot be read ({error}); give another folder") from error
        for key, value in self.about.items():
            if found.get(key) != value:
                raise BadInput(
                    f"{self.folder} holds conversations with {key} = {found.get(key)}, and this run has {value}; "
                    "give another folder, or the same settings"
                )

    @property
    def paths(self) -> list[Path]:
        """The files of all shards, in order."""
        return sorted(self.folder.glob("part-*.safetensors"))

    @property
    def bytes(self) -> int:
        """Size of all shards on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def keys(self) -> list[str]:
        """The keys of all prompts, in order. Raises BadInput for a damaged shard."""
        return [key for path in self.paths for key in self._metadata(path)]

    def _metadata(self, path: Path) -> list[str]:
        try:
            with safe_open(path, "pt") as file:
                keys: list[str] = json.loads(file.metadata()["keys"])
                return keys
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise BadInput(f"{path} is damaged ({error}); delete it, and run again to make it anew") from error

    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        total = 0
        for path in self.paths:
            with safe_open(path, "pt") as file:
                starts, answers = file.get_tensor("starts"), file.get_tensor("answers")
                total += int((starts[1:] - answers).sum())
        return total

    def append(self, conversations: Sequence[Conversation]) -> Path:
        """Write one more shard, whole or not at all, and return its path. Raises BadInput where the disk is full."""
        starts = torch.tensor([0, *(len(one.tokens) for one in conversations)]).cumsum(0)
        tensors = {
            "tokens": torch.tensor([token for one in conversations for token in one.tokens], dtype=torch.int32),
            "starts": starts,
            "answers": starts[:-1] + torch.tensor([len(one.prompt) for one in conversations]),
        }
        if all(one.states for one in conversations):
            for layer in conversations[0].states:
                tensors[f"state.{layer}"] = torch.cat([one.states[layer].bfloat16() for one in conversations])
        last = self.paths[-1:]
        number = 1 + int(last[0].stem.removeprefix("part-")) if last else 0  # one in the middle may have been deleted
        path = self.folder / f"part-{number:05d}.safetensors"
        try:
            with atomic_file(path) as unfinished:
                save_file(tensors, unfinished, metadata={"keys": json.dumps([one.key for one in conversations])})
        except (OSError, SafetensorError) as error:
            raise BadInput(
                f"{path} cannot be written ({error}); what was written before is kept: make room, and run again "
                "with the same folder to go on"
            ) from error
        return path

    def read(
        self, path: Path, layers: Sequence[int] = (), wanted: Callable[[str], bool] = lambda _: True
    ) -> Iterator[Conversation]:
        """The conversations of one shard whose key is ``wanted``, with states of ``layers`` where the shard has them.

        States are read one conversation at a time, and not for those that are not wanted.
        """
        keys = self._metadata(path)
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            tokens = file.get_tensor("tokens").tolist()
            starts, answers = file.get_tensor("starts").tolist(), file.get_tensor("answers").tolist()
            states = {layer: file.get_slice(f"state.{layer}") for layer in layers if f"state.{layer}" in names}
            for index, key in enumerate(keys):
                if wanted(key):
                    first, middle, last = starts[index], answers[index], starts[index + 1]
                    rows = {layer: found[first:last] for layer, found in states.items()}
                    yield Conversation(key, tokens[first:middle], tokens[middle:last], rows)
