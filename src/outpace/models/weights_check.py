"""Whether all weights of a model come from its file: transformers fills what is missing with random numbers.

What a model may lack is what it declares itself: weights that are tied to others, and buffers that are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput, shortened
from outpace.core.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""What configurations call the number of layers."""
_PICKLED_TENSOR = 200
"""Bytes that a tensor takes in a pickle of torch's at least, whatever it holds."""
_PACKED = 8
"""Weights that one stored number may hold: of 4 bits, in 32."""
_ROOM = 2**24
"""Weights by which the described model may exceed the stored one and still be loaded, to name what is missing."""

Refusal = Callable[[str], BadInput]
"""Makes the error about a model from what is wrong with its weights."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How much a model's files hold, at most: ``tensors``, and weights in them."""

    tensors: int
    weights: int


def stored_in(folder: Path) -> Stored:
    """What the weights in a folder can be, told without reading them. Raises SafetensorError and OSError."""
    from safetensors import safe_open

    tensors = weights = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        tensors += len(shapes)
        weights += sum(map(prod, shapes))
    if not tensors:
        size = sum(path.stat().st_size for path in folder.glob("*.bin"))
        tensors, weights = size // _PICKLED_TENSOR, size
    return Stored(tensors, weights)


def check_layers(path: Path, stored: Stored) -> None:
    """Raise BadInput where a ``config.json`` says a number of layers that files of this size cannot have.

    Called before transformers builds anything of it, which would build layer after layer. A file that is no JSON object
    is left to transformers.
    """
    try:
        config = read_json(path)
    except BadInput:
        return
    for key, value in _fields(config):
        if key in _LAYERS and isinstance(value, int) and not 1 <= value <= max(1, stored.tensors):
            raise BadInput(f"{path} says {key} = {value}, and the weights beside it are {stored.tensors:,} tensors")


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key), inner
            yield from _fields(inner)


def check_size(config: Any, stored: Stored, refusal: Refusal) -> None:
    """Raise what ``refusal`` makes where a transformers configuration describes far more weights than there are.

    What is missing would be allocated, and then named by :func:`check_loaded`; here it is only counted.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        described = count(AutoModelForCausalLM.from_config(config))
    if described > _PACKED * stored.weights + _ROOM:
        raise refusal(f"it is described as a model of {described:,} weights, and holds {stored.weights:,}")


def count(model: Any) -> int:
    """The weights of a model, each once: those that are tied to others are not counted again."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return sum(tensor.numel() for name, tensor in model.state_dict().items() if name not in tied)


def check_loaded(model: Any, report: Mapping[str, Any], refusal: Refusal) -> None:
    """Raise what ``refusal`` makes, with the name, for a weight that is missing, misshapen or not finite.

    ``report``: what ``from_pretrained`` returns with ``output_loading_info`` and ``ignore_mismatched_sizes``.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # missing only where what they are tied to is
    if absent := sorted(report["missing_keys"], key=lambda name: (name in tied, name)):
        raise refusal(f"lack {_first(absent)}")
    if misshapen := sorted(report["mismatched_keys"]):
        name, found, wanted = misshapen[0]
        raise refusal(f"have {name} in shape {tuple(found)}, and the model is described with {tuple(wanted)}")
    if wrong := report["error_msgs"]:
        raise refusal(f"do not load: {shortened(str(wrong[0]))}")
    if endless := [name for name, tensor in model.state_dict().items() if not finite(tensor)]:
        raise refusal(f"have values that are not finite in {_first(endless)}")


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither infinities nor NaN."""
    import torch

    if not tensor.is_floating_point():
        return True
    # The sum is finite only where all values are, and takes a twentieth of the time of asking each.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
