"""Downloads from the model hub as stages of :mod:`outpace.core.progress`, in place of the hub client's own bars."""

from __future__ import annotations

import io
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from outpace.core.progress import stage


class HubBar(tqdm):  # type: ignore[misc]
    """What the hub client takes as ``tqdm_class``: prints nothing, and reports the bytes of each file."""

    def __init__(self, *iterable: Any, **options: Any) -> None:
        self._stage = ExitStack()
        self._at = None
        super().__init__(*iterable, **{**options, "file": io.StringIO(), "disable": False})
        if self.unit == "B":
            name = f"downloading {self.desc or 'a file'}".rstrip(": ")
            self._at = self._stage.enter_context(stage(name, self.total, "B"))

    def display(self, *_: Any, **__: Any) -> bool:
        """Nothing of its own is shown."""
        return True

    def update(self, n: float | None = 1) -> bool | None:
        changed: bool | None = super().update(n)
        if self._at is not None:
            self._at.move(self.n, self.total)
        return changed

    def close(self) -> None:
        super().close()
        self._stage.close()
