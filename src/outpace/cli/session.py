"""From options to what decodes: checked first, loaded after, so that a typing error costs no waiting."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape

from outpace.cli import options as opt
from outpace.cli.options import DRAFTING, MACHINE, option
from outpace.cli.output import err
from outpace.core.errors import BadInput
from outpace.core.machine import free_memory
from outpace.core.progress import stage
from outpace.models.source import Source, resolve

if TYPE_CHECKING:
    from outpace.acceptance.base import AcceptanceRule
    from outpace.controllers.registry import ControllerChoice
    from outpace.core.sampling import SamplingParams
    from outpace.engine.method import Method
    from outpace.model import Model

_BYTES_PER_BYTE = 16  # memory for a byte of text: the text, and a token for every four, with the tokenizer's notes


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """For large imports: what they make stays. Searching it for garbage takes a tenth of their time, and later, now and
    then, a tenth of a second in the middle of an answer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Hardware:
    """Where and how exactly models compute."""

    threads: opt.Threads = None
    dtype: Annotated[
        str | None,
        option(
            value="NAME",
            panel=MACHINE,
            text="float32, bfloat16, float16, int8, int4 (the blocks of a GGUF file) or auto (as stored). "
            "[dim]\\[default: int4 for GGUF on a CPU, otherwise the fastest on the device][/]",
        ),
    ] = None
    device: Annotated[
        str | None, option(value="NAME", panel=MACHINE, text="cpu, cuda, ... [dim]\\[default: a GPU if available][/]")
    ] = None

    kv_dtype: opt.KvDtype = "auto"
    fixed_costs: opt.FixedCosts = False

    def check(self, name: str) -> None:
        """Raise BadInput for threads that this machine lacks, and a model that does not exist."""
        opt.check_threads(self.threads)
        resolve(name)

    def words(self) -> list[str]:
        """These options as they are typed, those that are not the default."""
        found: list[str] = []
        for one in fields(Hardware):
            value, flag = getattr(self, one.name), f"--{one.name.replace('_', '-')}"
            if value != one.default:
                found += [flag] if value is True else [flag, str(value)]
        return found

    def load(self, name: str) -> Model:
        """A model. The thread count is set first: packing depends on it."""
        with _without_garbage_collection():
            import torch

            import outpace.loading

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        with stage(f"loading {name}", brief=True):
            model = outpace.loading.load(
                name, dtype=self.dtype, device=self.device, kv_dtype=self.kv_dtype, fixed_costs=self.fixed_costs
            )
        if note := model.info.get("note"):
            err().print(f"[dim]{escape(name)}: {escape(note)}[/]", soft_wrap=True)
        return model


@dataclass(frozen=True, slots=True)
class Machine(Hardware):
    """Which model, and where and how exactly it computes."""

    model: opt.ModelName = "smollm2"

    def check(self, name: str = "") -> None:
        """As for any model; ``name``: another one than the own."""
        Hardware.check(self, name or self.model)

    def load(self, name: str = "") -> Model:
        """The model, or another one for the same machine."""
        return Hardware.load(self, name or self.model)


@dataclass(frozen=True, slots=True)
class Drafting:
    """How methods draft: their settings and rule, and what they need beside the model."""

    param: opt.Param = None
    rule: Annotated[
        str | None,
        option(
            value="NAME", panel=DRAFTING, text="Acceptance rule to use instead of the method's own; see: outpace rules."
        ),
    ] = None
    rule_param: opt.RuleParam = None
    lossless: Annotated[bool, option("--lossless", panel=DRAFTING, text="Refuse rules and methods that are lossy.")] = (
        False
    )
    controller: opt.ControllerName = None
    controller_param: opt.ControllerParam = None
    draft_model: opt.DraftModel = None
    head: opt.Head = None
    datastore: Annotated[
        Path | None,
        option(
            value="PATH",
            panel=DRAFTING,
            text="Datastore, for methods that copy from one; see: outpace datastore build.",
        ),
    ] = None

    def check(self) -> None:
        """Raise BadInput for draft models, a datastore or heads that do not exist, and for names given twice."""
        self._draft_models()
        if self.datastore is not None:
            from outpace.datastore.store import open_datastore

            open_datastore(self.datastore)
        if self.head:
            from outpace.methods.named_weights import head_folders

            head_folders(self.head)

    def _draft_models(self) -> dict[str, tuple[str, Source | None]]:
        """What --draft-model gives, by name: how it was written, and where the model is; None for a draft LM."""
        if not self.draft_model:
            return {}
        from outpace.methods.bindings import check_names
        from outpace.methods.named_weights import DRAFT_LM, draft_lm_folder, name_and_rest

        found: list[tuple[str, tuple[str, Source | None]]] = []
        for name, text in map(name_and_rest, self.draft_model):
            if text == DRAFT_LM or draft_lm_folder(text) is not None:
                found.append((name or DRAFT_LM, (text, None)))
            else:
                found.append((name or text, (text, resolve(text))))
        check_names("--draft-model", [name for name, _ in found])
        return dict(found)

    def draft_places(self) -> dict[str, str]:
        """Where each draft model is, by name."""
        return {name: text for name, (text, _) in self._draft_models().items()}

    def judge(self) -> AcceptanceRule | None:
        """The rule that was chosen, with its settings; None: the methods' own.

        Raises BadInput for a rule or settings that do not exist, and for a lossy rule with --lossless.
        """
        from outpace.acceptance.registry import find_rule

        settings = opt.rule_settings(self.rule_param)
        if self.rule is None:
            if settings:
                raise BadInput("--rule-param sets a rule that --rule names; give --rule NAME too (see: outpace rules)")
            return None
        rule = find_rule(self.rule, settings)
        self._check_rule(rule)
        return rule

    def rules(self, labels: Iterable[str]) -> list[AcceptanceRule]:
        """The rules that were named: by --rule, and in the methods' labels. Raises BadInput as :meth:`judge` does."""
        from outpace.acceptance.rule_text import rule_from
        from outpace.methods.bindings import split_rule

        judge = self.judge()
        own = [rule_from(text) for label in labels if (text := split_rule(label)[1])]
        return [*([] if judge is None else [judge]), *own]

    def _check_rule(self, rule: AcceptanceRule) -> None:
        if self.lossless and not rule.exact:
            raise BadInput(
                f"--lossless: rule '{rule.name}' is lossy with these settings; leave out --rule, or choose a lossless "
                "one (see: outpace rules)"
            )

    def settings(
        self, names: Iterable[str], params: SamplingParams, *, bench: bool = False
    ) -> dict[str, dict[str, Any]]:
        """The chosen methods with their settings, checked as far as is possible without a model.

        Raises BadInput for methods, settings and rules that do not exist, and for a rule that is not for ``params``.
        """
        from outpace.methods.registry import canonical, configured, find

        infos = {canonical(name): find(name) for name in names}
        if not infos:
            raise BadInput("name at least one method; see: outpace methods")
        pairs = [_unaliased(pair) for pair in self.param or ()]
        settings = opt.settings_by_method(pairs, {name: info.setting_names() for name, info in infos.items()})
        for name, info in infos.items():
            configured(info, settings[name])
            if self.lossless and not info.lossless:
                raise BadInput(f"--lossless: method '{info.name}' is lossy; choose another (see: outpace methods)")
        self.check_rules(infos, params)
        if (choice := self.choice(bench=bench)) is not None:
            from outpace.controllers.registry import configured as configured_controller

            configured_controller(choice)
        return settings

    def check_rules(self, labels: Iterable[str], params: SamplingParams) -> None:
        """Raise BadInput for a rule that is not for ``params``, and for a lossy one with --lossless."""
        for rule in self.rules(labels):
            self._check_rule(rule)
            rule.check_params(params)

    def choice(self, *, bench: bool = False) -> ControllerChoice | None:
        """The controller that was named, if any. ``bench``: whether a bench asks. Raises BadInput for settings without
        one."""
        given = opt.key_values("--controller-param", self.controller_param)
        if self.controller is None:
            if given:
                raise BadInput("--controller-param is for --controller; name one, see: outpace controllers")
            return None
        from outpace.controllers.registry import ControllerChoice

        return ControllerChoice(self.controller, given, bench=bench)

    def load(self, machine: Hardware, *, bench: bool = False) -> dict[str, Any]:
        """What methods need beside the model, loaded, by the names of the parameters of :meth:`Model.methods`.

        A model that has two names is loaded once. ``bench``: as for :meth:`choice`.
        """
        loaded: dict[Source, Model] = {}
        models: dict[str, Model | str] = {}
        for name, (text, source) in self._draft_models().items():
            if source is not None and source not in loaded:
                loaded[source] = machine.load(text)
            models[name] = text if source is None else loaded[source]
        choice = self.choice(bench=bench)
        return {"draft_model": models, "datastore": self.datastore, "head": self.head, "controller": choice}

    def build(self, machine: Machine, settings: dict[str, dict[str, Any]]) -> tuple[Model, list[Method]]:
        """The model, and the methods for it. Raises BadInput for parts that do not fit.

        Where draft models or heads were named, says what is not drafted with, and what is that was not named.
        """
        from outpace.methods.side_by_side import build_all, use_notes

        model = machine.load()
        context = model.context(**self.load(machine))
        built = build_all(list(settings), context, settings, self.judge())
        for note in use_notes({one.name: one.drafts_with for one in built}, context.bindings):
            err().print(f"[dim]{escape(note)}[/]", soft_wrap=True)
        return model, built


def _unaliased(pair: str) -> str:
    """A --param with the method's own name in place of an alias."""
    from outpace.methods.registry import canonical

    key, sign, value = pair.partition("=")
    label, dot, setting = key.rpartition(".")
    with contextlib.suppress(BadInput):  # whoever reads it says which methods there are
        return f"{canonical(label)}.{setting}{sign}{value}" if dot else pair
    return pair


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
            f"reference {path} has {size / 1e6:,.0f} MB and does not fit into memory ({free / 1e6:,.0f} MB are free); "
            "give a shorter one, or build a datastore from it (outpace datastore build) and use method rest"
        )
