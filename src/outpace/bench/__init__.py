"""Bench: methods side by side on one model. The package is called like its function: ``outpace.bench(model, ...)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.callable_rooms import make_callable

if TYPE_CHECKING:
    from outpace.bench.settings import Progress
    from outpace.core.sampling import SamplingParams
    from outpace.engine.method import Method
    from outpace.model import Model
    from outpace.prompts.questions import Prompt


def bench(
    model: Model,
    methods: Sequence[str | Method] = ("pld", "sam", "auto"),
    prompts: Sequence[Prompt] | None = None,
    *,
    draft_model: Model | Sequence[Model] | None = None,
    datastore: str | Path | None = None,
    head: str | Path | Sequence[str | Path] | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 1,
    ignore_eos: bool = False,
    references: Sequence[str] = (),
    namespace: str = "",
    params: SamplingParams | None = None,
    command: str = "",
    noted: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Decode prompts with every method by turns and compare: rates, acceptance, answers.

    ``methods``: names, or methods that were built (:meth:`Model.method`); autoregressive decoding (``none``) is always
    among them. ``prompts``: as ``outpace.prompts.questions.load_prompts`` reads them; None takes the embedded ones.
    ``draft_model``, ``datastore`` and ``head`` are for the methods that are named. ``references``: texts that drafters
    may copy from. ``namespace``: keeps what methods learn from prompt to prompt. ``params``: None is greedy.
    ``command`` and ``noted`` stand in the result as they are. ``on_progress`` is called before each batch.

    Returns the object that ``outpace bench --json`` writes; its figures are defined in docs/metrics.md. After Ctrl-C it
    holds the prompts that were finished, with ``complete`` false. Raises BadInput for what does not exist or fit.
    """
    from outpace.bench.runner import run
    from outpace.bench.settings import BenchSettings
    from outpace.core.sampling import SamplingParams
    from outpace.prompts.questions import load_prompts

    settings = BenchSettings(
        max_new_tokens=max_new_tokens,
        params=params or SamplingParams(),
        batch_size=batch_size,
        ignore_eos=ignore_eos,
        references=tuple(references),
        namespace=namespace,
        command=command,
        extra=noted or {},
    )
    built = [model.method(one, draft_model=draft_model, datastore=datastore, head=head) for one in methods]
    return run(model, built, load_prompts() if prompts is None else prompts, settings, on_progress)


make_callable(__name__, bench)
