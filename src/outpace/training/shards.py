"""Conversations of a target on disk, with the hidden states that drafters read, in files of some hundred each.

A folder has ``manifest.json`` (which target, which layers) and shards ``part-00000.safetensors``. A shard appears
whole or not at all, so a kill loses one at most, and a second run goes on where the first one stopped. Tensors of a
shard of c conversations with n tokens together:

``tokens`` (n,) int32, prompts and answers end to end; ``starts`` (c + 1,) int64, where in ``tokens`` each conversation
begins; ``answers`` (c,) int64, where each last answer begins; ``earlier`` (m, 3) int64, where there are any: the
target's answers to earlier turns, within the prompts of the last ones, as conversation, begin and end in its tokens;
``state.L`` (n, hidden) bfloat16, the residual stream entering layer L at each token, absent from shards beyond the byte
budget; or in 8 bits (float8_e4m3fn), with ``scale.L`` (n,) float32, by which its rows are multiplied. The metadata's
``keys`` are the prompts' keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.files import atomic_file, parse_json, read_json, write_atomically

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(slots=True)
class Conversation:
    """A prompt and the target's answer, in tokens.

    ``states[layer]``: (tokens, hidden) of prompt and answer, in any float type; may be empty. ``earlier``: where in the
    prompt the target's answers to earlier turns are, as (begin, end).
    """

    key: str
    prompt: list[int]
    answer: list[int]
    states: dict[int, Tensor] = field(default_factory=dict)
    earlier: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]

    @property
    def answers(self) -> list[tuple[int, int]]:
        """Where in the tokens all of the target's answers are, as (begin, end)."""
        return [*self.earlier, (len(self.prompt), len(self.prompt) + len(self.answer))]

    @property
    def answer_tokens(self) -> int:
        """How many tokens the target wrote."""
        return sum(stop - start for start, stop in self.answers)


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
        found = read_json(manifest)
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
        with _opened(path) as (_, index):
            return index.keys

    def answer_tokens(self) -> int:
        """Tokens of all answers. Raises BadInput for a damaged shard."""
        total = 0
        for path in self.paths:
            with _opened(path) as (_, index):
                total += sum(index.starts[1:]) - sum(index.answers)
                total += sum(stop - start for some in index.earlier.values() for start, stop in some)
        return total

    def append(self, conversations: Sequence[Conversation], *, state_bits: int = 16) -> Path:
        """Write one more shard, whole or not at all, and return its path. Raises BadInput where the disk is full.

        ``state_bits``: of a number of the hidden states, 16 or 8; of the highest layer's 16, as they give the target's
        distribution.
        """
        starts = torch.tensor([0, *(len(one.tokens) for one in conversations)]).cumsum(0)
        tensors = {
            "tokens": torch.tensor([token for one in conversations for token in one.tokens], dtype=torch.int32),
            "starts": starts,
            "answers": starts[:-1] + torch.tensor([len(one.prompt) for one in conversations]),
        }
        earlier = [[number, *span] for number, one in enumerate(conversations) for span in one.earlier]
        if earlier:
            tensors["earlier"] = torch.tensor(earlier)
        if all(one.states for one in conversations):
            for layer in conversations[0].states:
                rows = torch.cat([one.states[layer].bfloat16() for one in conversations])
                narrow = state_bits == 8 and layer != max(conversations[0].states)
                tensors |= narrowed(layer, rows) if narrow else {f"state.{layer}": rows}
        last = self.paths[-1:]
        number = 1 + int(last[0].stem.removeprefix("part-")) if last else 0  # one in the middle may have been deleted
        path = self.folder / f"part-{number:05d}.safetensors"
        try:
            with atomic_file(path) as unfinished:
                save_file(tensors, unfinished, metadata={"keys": json.dumps([one.key for one in conversations])})
        except (OSError, SafetensorError) as error:
            raise BadInput(
                f"{path} cannot be written ({error}); earlier shards are kept: free some space, and "
                "continue with --resume"
            ) from error
        return path

    def read(
        self, path: Path, layers: Sequence[int] = (), wanted: Callable[[str], bool] = lambda _: True
    ) -> Iterator[Conversation]:
        """The conversations of one shard whose key is ``wanted``, with states of ``layers`` where the shard has them.

        States are read one conversation at a time, and not for those that are not wanted. Raises BadInput for a damaged
        shard.
        """
        with _opened(path) as (file, index):
            names = set(file.keys())
            tokens = file.get_tensor("tokens").tolist()
            states = {layer: file.get_slice(f"state.{layer}") for layer in layers if f"state.{layer}" in names}
            scales = {layer: file.get_tensor(f"scale.{layer}") for layer in states if f"scale.{layer}" in names}
            for number, key in enumerate(index.keys):
                if wanted(key):
                    first, middle, last = index.starts[number], index.answers[number], index.starts[number + 1]
                    rows = {layer: found[first:last] for layer, found in states.items()}
                    for layer, scale in scales.items():
                        rows[layer] = (rows[layer].float() * scale[first:last, None]).bfloat16()
                    earlier = index.earlier.get(number, [])
                    yield Conversation(key, tokens[first:middle], tokens[middle:last], rows, earlier)


def state_bytes(layers: int, hidden_size: int, state_bits: int) -> int:
    """Bytes of a token's hidden states, as :meth:`Shards.append` writes them; the factors of 8 bits left out."""
    return (2 * layers if state_bits == 16 else layers + 1) * hidden_size


def narrowed(layer: int, rows: Tensor) -> dict[str, Tensor]:
    """Tensors of a shard that hold rows (n, hidden) in 8 bits a number (e4m3), with a factor for each row."""
    scale = rows.float().abs().amax(-1).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return {f"state.{layer}": (rows.float() / scale[:, None]).to(torch.float8_e4m3fn), f"scale.{layer}": scale}


@dataclass(frozen=True, slots=True)
class _Index:
    """Where in a shard's tokens its c conversations lie: c keys, c + 1 starts, c answers.

    ``earlier``: (begin, end) of answers to earlier turns, in the conversation's own tokens, by its number.
    """

    keys: list[str]
    starts: list[int]
    answers: list[int]
    earlier: dict[int, list[tuple[int, int]]]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, _Index]]:
    """A shard, open, with its index. Raises BadInput for one whose parts do not fit together."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, "pt"))
            index = _index(file)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BadInput(
                f"{path} is damaged ({error}); delete it, and continue with --resume to write it again"
            ) from error
        yield file, index


def _index(file: Any) -> _Index:
    """The index of an open shard. Raises ValueError for one that does not fit its tensors."""
    keys = parse_json(file.metadata()["keys"])
    tokens, starts, answers = (file.get_tensor(name) for name in ("tokens", "starts", "answers"))
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("its keys are no list of texts")
    if any(one.dim() != 1 or one.is_floating_point() or one.is_complex() for one in (tokens, starts, answers)):
        raise ValueError("its tokens and their places are no lists of whole numbers")
    places = torch.stack([starts[:-1], answers], dim=1).flatten() if len(starts) == len(answers) + 1 else starts[:0]
    order = torch.cat([places, starts[-1:]])
    if len(answers) != len(keys) or len(order) != 2 * len(keys) + 1 or bool((order[1:] < order[:-1]).any()):
        raise ValueError("its conversations do not follow one another")
    if (int(order[0]), int(order[-1])) != (0, len(tokens)) or bool((tokens < 0).any()):
        raise ValueError("its conversations are not its tokens")
    for name in file.keys():  # noqa: SIM118
        if name.startswith(("state.", "scale.")) and file.get_slice(name).get_shape()[:1] != [len(tokens)]:
            raise ValueError(f"its tensor {name} has not one row for each token")
    return _Index(keys, starts.tolist(), answers.tolist(), _earlier(file, (answers - starts[:-1]).tolist()))


def _earlier(file: Any, prompts: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Answers to earlier turns by conversation, whose prompts have so many tokens. Raises ValueError for wrong ones."""
    found: dict[int, list[tuple[int, int]]] = {}
    if "earlier" not in file.keys():  # noqa: SIM118
        return found
    spans = file.get_tensor("earlier")
    if spans.dim() != 2 or spans.shape[1] != 3 or spans.is_floating_point():
        raise ValueError("its earlier answers are no places")
    for number, start, stop in spans.tolist():
        if not 0 <= number < len(prompts):
            raise ValueError("its earlier answers are of no conversation")
        before = found.setdefault(number, [])
        if not (before[-1][1] if before else 0) <= start < stop <= prompts[number]:
            raise ValueError("its earlier answers are not in their prompts")
        before.append((start, stop))
    return found
