"""From options to what decodes: checked first, loaded after, so that a typing error costs no waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape

from outpace.cli import options as opt
from outpace.cli.options import DRAFTING, MACHINE, option
from outpace.cli.output import err, waiting
from outpace.core.errors import BadInput
from outpace.core.machine import free_memory
from outpace.models.source import resolve

if TYPE_CHECKING:
    from outpace.core.sampling import SamplingParams
    from outpace.engine.method import Method
    from outpace.model import Model

_BYTES_PER_BYTE = 16  # memory for a byte of text: the text, and a token for every four, with the tokenizer's notes


@dataclass(frozen=True, slots=True)
class Machine:
    """Which model, and where and how exactly it computes."""

    model: opt.ModelName = "smollm2"
    threads: opt.Threads = None
    dtype: Annotated[
        str | None,
        option(
            value="NAME",
            panel=MACHINE,
            text="float32, bfloat16, float16, int8, int4 (a GGUF file's own blocks) or auto (as stored); default: int4 "
            "for such a file on a CPU, otherwise the device's quickest.",
        ),
    ] = None
    device: Annotated[
        str | None, option(value="NAME", panel=MACHINE, text="cpu, cuda, ...; default: a GPU, if there is one.")
    ] = None

    fixed_costs: opt.FixedCosts = False

    def check(self) -> None:
        """Raise BadInput for threads that this machine lacks, and a model that does not exist."""
        opt.check_threads(self.threads)
        resolve(self.model)

    def load(self, name: str | None = None) -> Model:
        """The model, or another one for the same machine. The thread count is set first: packing depends on it."""
        import torch

        import outpace.loading

        name = self.model if name is None else name
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with waiting(f"loading {name} (the first time takes longer)"):
            model = outpace.loading.load(name, dtype=self.dtype, device=self.device, fixed_costs=self.fixed_costs)
        if note := model.info.get("note"):
            err().print(f"[dim]{escape(name)}: {escape(note)}[/]", soft_wrap=True)
        return model


@dataclass(frozen=True, slots=True)
class Drafting:
    """How methods draft: their settings and rule, and what they need beside the model."""

    param: opt.Param = None
    rule: Annotated[
        str | None, option(value="NAME", panel=DRAFTING, text="Acceptance rule, instead of the method's.")
    ] = None
    draft_model: opt.DraftModel = None
    head: opt.Head = None
    datastore: Annotated[
        Path | None,
        option(
            value="PATH",
            panel=DRAFTING,
            text="Corpus to copy from, for methods that do; built by: outpace datastore build.",
        ),
    ] = None

    def check(self) -> None:
        """Raise BadInput for draft models, a datastore or heads that do not exist."""
        for name in self.draft_model or ():
            resolve(name)
        if self.datastore is not None:
            from outpace.datastore.store import open_datastore

            open_datastore(self.datastore)
        if self.head:
            from outpace.heads.head_folder import open_head

            for folder in self.head:
                open_head(folder)

    def settings(self, names: Iterable[str], params: SamplingParams) -> dict[str, dict[str, Any]]:
        """The chosen methods with their settings, checked as far as is possible without a model.

        Raises BadInput for methods, settings and rules that do not exist, and for a rule that is not for ``params``.
        """
        from outpace.acceptance.registry import find_rule
        from outpace.methods.registry import configured, find

        infos = {info.name: info for info in map(find, names)}
        if not infos:
            raise BadInput("name at least one method; see: outpace methods")
        by_alias = {alias: info.name for info in infos.values() for alias in info.aliases}
        pairs = [_unaliased(pair, by_alias) for pair in self.param or ()]
        settings = opt.settings_by_method(pairs, {name: info.setting_names() for name, info in infos.items()})
        for name, info in infos.items():
            configured(info, settings[name])
        if self.rule is not None:
            find_rule(self.rule).check_params(params)
        return settings

    def load(self, machine: Machine) -> dict[str, Any]:
        """What methods need beside the model, loaded, by the names of the parameters of :meth:`Model.method`."""
        draft_models = tuple(machine.load(name) for name in self.draft_model or ())
        return {"draft_model": draft_models, "datastore": self.datastore, "head": self.head}

    def build(self, machine: Machine, settings: dict[str, dict[str, Any]]) -> tuple[Model, list[Method]]:
        """The model, and the methods for it. Raises BadInput for parts that do not fit."""
        model = machine.load()
        needs = self.load(machine)
        return model, [
            # Autoregressive decoding drafts nothing to judge: it stays the baseline under any rule.
            model.method(name, each, rule=None if name == "none" else self.rule, **needs)
            for name, each in settings.items()
        ]


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
    size, free = path.stat().st_size, free_memory()
    if size * _BYTES_PER_BYTE > free:
        raise BadInput(
            f"reference {path} has {size / 1e6:,.0f} MB, more than memory holds ({free / 1e6:,.0f} MB are free); give "
            "a shorter one, or build a datastore of it (outpace datastore build) and use method rest"
        )
