"""From options to what decodes: checked first, loaded after, so that a typing error costs no waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from outpace.cli.options import check_threads, settings_by_method
from outpace.core.errors import BadInput

if TYPE_CHECKING:
    from outpace.core.sampling import SamplingParams
    from outpace.engine.method import Method
    from outpace.model import Model


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """Methods by name with their settings, checked as far as is possible without a model."""

    settings: dict[str, dict[str, Any]]
    rule: str | None = None

    @property
    def names(self) -> list[str]:
        """The chosen methods, in order."""
        return list(self.settings)

    def build(
        self,
        model: Model,
        draft_models: Sequence[Model] = (),
        datastore: Path | None = None,
        heads: Sequence[Path] = (),
    ) -> list[Method]:
        """The methods for this model. Raises BadInput for parts that do not fit."""
        return [
            model.method(
                name,
                settings,
                # Plain decoding drafts nothing to judge: it stays the baseline under any rule.
                rule=None if name == "none" else self.rule,
                draft_model=draft_models,
                datastore=datastore,
                head=heads,
            )
            for name, settings in self.settings.items()
        ]


def choose_methods(
    names: Iterable[str], pairs: Sequence[str] | None, rule: str | None, params: SamplingParams
) -> MethodChoice:
    """Find methods, settings and rule. Raises BadInput for what does not exist or is not for these parameters."""
    from pydantic import ValidationError

    from outpace.acceptance.registry import rules
    from outpace.methods.registry import find

    infos = {info.name: info for info in map(find, names)}
    if not infos:
        raise BadInput("name at least one method; see: outpace methods")
    by_alias = {alias: info.name for info in infos.values() for alias in info.aliases}
    settings = settings_by_method(
        [_unaliased(pair, by_alias) for pair in pairs or ()],
        {name: list(info.settings.model_fields) for name, info in infos.items()},
    )
    for name, info in infos.items():
        try:
            info.settings.model_validate(settings[name])
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "settings"
            raise BadInput(f"method '{name}', setting '{key}': {first['msg']}") from None
    if rule is not None:
        if rule not in rules():
            raise BadInput(f"unknown acceptance rule '{rule}'; known: {', '.join(rules())}")
        rules()[rule]().check_params(params)
    return MethodChoice(settings, rule)


def _unaliased(pair: str, by_alias: dict[str, str]) -> str:
    head, dot, rest = pair.partition(".")
    return f"{by_alias[head]}.{rest}" if dot and head in by_alias else pair


def read_texts(paths: Sequence[Path] | None) -> tuple[str, ...]:
    """The reference files' texts. Raises BadInput for a file that cannot be read as UTF-8 text."""
    texts = []
    for path in paths or ():
        try:
            check_size(path)
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise BadInput(f"reference {path} is not UTF-8 text (byte {error.start})") from None
        except OSError as error:
            raise BadInput(f"cannot read reference {path}: {error.strerror}") from None
    return tuple(texts)


def check_size(path: Path) -> None:
    """Raise BadInput for a file that memory cannot hold as text and tokens; drafters' indices are larger still."""
    from outpace.core.machine import free_memory

    size, free = path.stat().st_size, free_memory()
    if size * _BYTES_PER_BYTE > free:
        raise BadInput(
            f"reference {path} has {size / 1e6:,.0f} MB, more than memory holds ({free / 1e6:,.0f} MB are free); give "
            "a shorter one, or build a datastore of it (outpace datastore build) and use method rest"
        )


_BYTES_PER_BYTE = 16
"""Memory for a byte of text: the text itself, and a token for every four bytes, with what the tokenizer notes of it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The options that say what to load and where to run it."""

    model: str
    draft_models: Sequence[str] | None = None
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    datastore: Path | None = None
    heads: Sequence[Path] | None = None
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def check(self) -> None:
        """Raise BadInput for what this machine cannot do."""
        check_threads(self.threads)
        from outpace.models.source import resolve

        for name in (self.model, *(self.draft_models or ())):
            resolve(name)
        if self.datastore is not None:
            from outpace.datastore.store import open_datastore

            open_datastore(self.datastore)
        if self.heads:
            from outpace.heads.head_folder import open_head

            for folder in self.heads:
                open_head(folder)

    def load(self) -> tuple[Model, tuple[Model, ...]]:
        """The model, and the draft models that were named. The thread count is set first: packing depends on it."""
        import torch

        import outpace.loading

        if self.threads is not None:
            torch.set_num_threads(self.threads)

        def one(name: str) -> Model:
            with self._waiting(f"loading {name} (the first time takes longer)"):
                model = outpace.loading.load(name, dtype=self.dtype, device=self.device)
            if note := model.info.get("note"):
                self.console.print(f"[dim]{escape(name)}: {escape(note)}[/]", soft_wrap=True)
            return model

        return one(self.model), tuple(one(name) for name in self.draft_models or ())

    def _waiting(self, what: str) -> AbstractContextManager[object]:
        return self.console.status(f"[dim]{what} ...") if self.console.is_terminal else nullcontext()
