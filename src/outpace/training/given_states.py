"""Conversations and hidden states that another engine wrote, in the layouts of speculators, read where they lie.

A large target is run by an engine that shards it, such as vLLM, and leaves a file for each conversation. Two layouts
are read: ``*.pt`` with ``input_ids`` (T,), ``loss_mask`` (T,) and ``hidden_states``, a list of (T, hidden); and
``*.safetensors`` with ``token_ids`` (T,) and ``hidden_states`` (T, layers, hidden), whose masks are ``loss_mask`` in
the same file, or in the data set (Arrow) that the folder belongs to: row N is that of ``hs_N.safetensors``. The last
layer is the target's last one's output, before its final norm; the others are states that enter the auxiliary layers.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from outpace.core.errors import BadInput, MissingExtra
from outpace.models.quiet import one_line
from outpace.targets.base import Target
from outpace.training.answers import states_of
from outpace.training.data import Collected
from outpace.training.shards import Conversation

TOGETHER = 64
"""Conversations that are shuffled together."""
ALIKE = 0.9
"""Cosine of given and computed states from which they are the same target's: engines round differently."""
_CLEARLY = 1e-3
"""By how much the states of another layer are nearer, where the wrong layer was written."""
_CHECKED = 128
"""Tokens that are computed again for the comparison, at most."""
_COMPARED = 16
"""Conversations that are compared with the model, at most: folders that were filled by several runs may hold several
kinds of states."""
_BESIDE = frozenset({"token_freq", "d2t", "t2d"})
"""Files that speculators writes beside the states, by name."""
_DAMAGED = (
    OSError,
    SafetensorError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
)


class GivenStates:
    """The conversations in a folder, with states of ``layers``, the last of them the target's last one's output.

    Stands in for :class:`~outpace.training.shards.Shards` where conversations are read. Raises BadInput for a folder
    without such files, and when it is read for files that are damaged or of other layers.
    """

    def __init__(self, folder: Path, layers: Sequence[int], vocab_size: int) -> None:
        self.folder, self.layers, self._vocab_size = folder, tuple(layers), vocab_size
        found = (*folder.rglob("*.pt"), *folder.rglob("*.safetensors"))
        files = sorted((one for one in found if one.stem not in _BESIDE), key=_number)
        if not files:
            raise BadInput(f"{folder} holds no hidden states: no .pt and no .safetensors files")
        self._groups = {files[at]: files[at : at + TOGETHER] for at in range(0, len(files), TOGETHER)}
        self._masks: Any = None
        self._width: int | None = None
        """Of the states that were read first."""

    @property
    def paths(self) -> list[Path]:
        """The first files of groups that are read together."""
        return list(self._groups)

    def read(
        self, path: Path, layers: Sequence[int] = (), wanted: Callable[[str], bool] = lambda _: True
    ) -> Iterator[Conversation]:
        """The conversations of one group whose key is ``wanted``, with states of ``layers``."""
        for file in self._groups[path]:
            key = file.relative_to(self.folder).with_suffix("").as_posix()
            if wanted(key):
                one = self._conversation(file, key, layers)
                if one is not None:
                    yield one

    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(one.answer_tokens for path in self.paths for one in self.read(path))

    def _conversation(self, file: Path, key: str, layers: Sequence[int]) -> Conversation | None:
        """None for a text in which nothing is asked."""
        try:
            tokens, mask, states = self._loaded(file, wanted=bool(layers))
        except _DAMAGED as error:
            raise BadInput(f"{file} is damaged or of another layout ({one_line(error)}); delete it") from error
        if len(states) != len(self.layers):
            raise BadInput(
                f"{file} has the states of {len(states)} layers, and the head reads {len(self.layers)} "
                f"({', '.join(map(str, self.layers))}, the last one the output); write these"
            )
        if any(one.shape[:1] != tokens.shape or one.dim() != 2 for one in (*states, mask[:, None])):
            raise BadInput(f"{file} is damaged: it has not one state and one mask for each token; delete it")
        widths = {one.shape[-1] for one in states}
        self._width = self._width or min(widths)
        if widths != {self._width}:
            said = ", ".join(map(str, sorted(widths)))
            raise BadInput(
                f"{file} has states {said} wide, and others here are {self._width} wide: it is of another model; "
                "delete it"
            )
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise BadInput(f"{file} has tokens that this model does not have: it is of another tokenizer")
        spans = _spans(mask.bool().tolist())
        if not spans:
            return None
        *earlier, (start, stop) = spans
        ids = tokens.tolist()
        kept = {layer: one[:stop] for layer, one in zip(self.layers, states, strict=True) if layer in layers}
        return Conversation(key, ids[:start], ids[start:stop], kept, earlier)

    def _loaded(self, file: Path, *, wanted: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Tokens (T,), mask (T,), and states (T, hidden) of each layer, or where they are not ``wanted`` their shapes:
        counting reads no states, of which there may be terabytes."""
        if file.suffix == ".pt":
            found = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
            return found["input_ids"].flatten(), found["loss_mask"].flatten(), list(found["hidden_states"])
        with safe_open(file, "pt") as found:
            names = set(found.keys())
            tokens = found.get_tensor("token_ids" if "token_ids" in names else "input_ids")
            mask = found.get_tensor("loss_mask") if "loss_mask" in names else self._mask(file)
            if wanted:
                states = found.get_tensor("hidden_states")
            else:
                states = torch.empty(found.get_slice("hidden_states").get_shape(), device="meta")
        return tokens.flatten(), mask.flatten(), list(states.unbind(1))

    def _mask(self, file: Path) -> Tensor:
        """The mask in the data set beside the states."""
        if self._masks is None:
            home = next(
                (one for one in (self.folder, self.folder.parent) if (one / "dataset_info.json").exists()), None
            )
            if home is None:
                raise BadInput(f"{file} has no loss_mask, and {self.folder} is no part of a data set that has them")
            try:
                from datasets import load_from_disk
            except ImportError:
                raise MissingExtra(f"{file} has no loss_mask; reading it from {home}", "train") from None
            try:
                self._masks = load_from_disk(str(home))
            except _DAMAGED as error:
                raise BadInput(f"{home} is no data set that can be read ({one_line(error)})") from error
        row = _number(file)[0]
        try:
            return torch.as_tensor(self._masks[row]["loss_mask"])
        except _DAMAGED as error:
            raise BadInput(f"{file} has no loss_mask, and row {row} of the data set beside it has none") from error

    def collected(self) -> Collected:
        """How much there is."""
        found = Collected()
        for path in self.paths:
            for one in self.read(path):
                found.tokens += one.answer_tokens
                found.prompts += 1
        found.sources[self.folder.name] = found.prompts
        return found

    def check(self, target: Target) -> None:
        """Raise BadInput where the states are not what ``target`` has: of other layers, or of another model."""
        some = self.paths[:: -(-len(self.paths) // _COMPARED)]
        if self._compared(some, target) or self._compared(self.paths, target, most=1):
            return
        raise BadInput(f"{self.folder} has no conversation with an answer")

    def _compared(self, paths: Sequence[Path], target: Target, most: int = _COMPARED) -> int:
        """Compare the first conversation of each group with the model, ``most`` of them; how many were."""
        # What one token says of layers is nothing.
        telling = ((one for one in self.read(path, self.layers) if len(one.tokens) > 1) for path in paths)
        firsts = (one for group in telling for one in islice(group, 1))
        count = 0
        for one in islice(firsts, most):
            check_alike(self.folder / one.key, one.states, one.tokens, self.layers, target)
            count += 1
        return count


def check_alike(
    where: object, states: Mapping[int, Tensor], tokens: Sequence[int], layers: Sequence[int], target: Target
) -> None:
    """Raise BadInput where ``states`` (T, hidden) by layer are not those of ``target`` at ``tokens``.

    ``where``: what the states come from.
    """
    text = list(tokens[: min(_CHECKED, target.context_length)])
    own = states_of(target, [Conversation("", text, [])], range(target.num_layers + 1))[0]
    for layer in layers:
        given = states[layer][: len(text) - 1].float()
        if given.shape[-1] != target.hidden_size:
            raise BadInput(f"{where} has states {given.shape[-1]} wide, and this model's are {target.hidden_size} wide")
        alike = {
            one: float(functional.cosine_similarity(given, rows[:-1].float(), -1).median()) for one, rows in own.items()
        }
        if not alike[layer] >= ALIKE:
            raise BadInput(
                f"{where} holds other states than this model's layer {layer} has (median cosine {alike[layer]:.2f}): "
                "of other layers, or of another model or tokenizer"
            )
        nearest = max(alike, key=lambda one: alike[one])
        if alike[nearest] > alike[layer] + _CLEARLY:  # neighbours are alike, too
            raise BadInput(
                f"{where} holds the states of layer {nearest} where the head reads layer {layer} (median cosines "
                f"{alike[nearest]:.4f} and {alike[layer]:.4f}); write those of {', '.join(map(str, layers))}"
            )


def opened(folder: Path, aux_hidden_state_layers: Sequence[int], target: Target) -> GivenStates:
    """The conversations in ``folder`` for a head of ``target`` that reads these layers, checked.

    Raises BadInput for what is of another target or of other layers.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder of hidden states")
    layers = sorted({*aux_hidden_state_layers, target.num_layers})
    found = GivenStates(folder, layers, target.vocab_size)
    found.check(target)
    return found


def _number(file: Path) -> tuple[int, str]:
    """The number that ends a file's name, for an order and for the rows of a data set."""
    found = re.search(r"(\d+)$", file.stem)
    return (int(found.group()) if found else 0), str(file)


def _spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Where a mask is true, as (begin, end)."""
    found, begun = [], None
    for at, asked in enumerate((*mask, False)):
        if asked and begun is None:
            begun = at
        elif not asked and begun is not None:
            found.append((begun, at))
            begun = None
    return found
