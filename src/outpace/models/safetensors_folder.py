"""SafetensorsFolder: the tensors of a model's folder by name, mapped into memory and read when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import BadInput
from outpace.core.files import read_json
from outpace.models.plain_config import Unclear

if TYPE_CHECKING:
    from torch import Tensor

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"


class SafetensorsFolder:
    """The files that transformers would read. Raises Unclear where it may read others, or a file is damaged."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        if (folder / _ADAPTER).exists():
            raise Unclear("an adapter lies beside the weights")
        self._places: dict[str, Any] = {}
        try:
            for name, keys in _files(folder).items():
                file = safe_open(folder / name, "pt")
                held = set(file.keys())  # type: ignore[no-untyped-call]
                if keys is not None and not keys <= held:
                    raise Unclear("the index names tensors that are not there")
                self._places |= dict.fromkeys(held if keys is None else keys, file)
        except (SafetensorError, OSError) as error:
            raise Unclear(f"damaged: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with their names."""
        return ((name, self._places[name].get_tensor(name)) for name in sorted(self._places))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as it is stored. Raises Unclear for one that is missing or of another shape."""
        file = self._places.get(name)
        if file is None:
            raise Unclear(f"{name} is missing")
        if tuple(file.get_slice(name).get_shape()) != shape:
            raise Unclear(f"{name} is of another shape")
        found: Tensor = file.get_tensor(name)
        if not found.is_floating_point():
            raise Unclear(f"{name} holds no floating-point numbers")
        return found


def _files(folder: Path) -> Mapping[str, set[str] | None]:
    """The names of the files, and which tensors to take from each (None: all)."""
    if (folder / _WHOLE).is_file():
        return {_WHOLE: None}
    try:
        listed = read_json(folder / _INDEX).get("weight_map")
    except BadInput as error:
        raise Unclear(str(error)) from error
    if not isinstance(listed, Mapping) or not all(isinstance(name, str) for name in listed.values()):
        raise Unclear("the index cannot be read")
    files: dict[str, set[str] | None] = {}
    for tensor, name in listed.items():
        if Path(name).name != name:
            raise Unclear("the index names files elsewhere")
        of_file = files.setdefault(name, set())
        assert of_file is not None
        of_file.add(tensor)
    return files
