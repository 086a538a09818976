"""bench: methods side by side, on the same prompts, interleaved, with autoregressive decoding among them.

report = bench("smollm2", ["pld", "sam"], limit=7, max_new_tokens=64)
print(report)
report.write_html("report.html")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.bench.bench_report import BenchReport
from outpace.bench.settings import BenchSettings, Progress
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import load_prompts, stratified


def bench(
    model: Model | str,
    methods: Sequence[str | Method] | Mapping[str, Mapping[str, Any]] = ("pld", "sam", "auto"),
    prompts: Sequence[Prompt | str] | str | Path | None = None,
    *,
    limit: int | None = None,
    max_new_tokens: int = 64,
    ignore_eos: bool = False,
    batch_size: int = 1,
    references: Sequence[str] = (),
    namespace: str = "",
    rule: str | None = None,
    draft_model: Model | Sequence[Model] | None = None,
    datastore: str | Path | None = None,
    head: str | Path | Sequence[str | Path] | None = None,
    params: SamplingParams | None = None,
    command: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> BenchReport:
    """Measure methods on one model, each on every prompt; autoregressive decoding (``none``) always runs.

    ``model``: a Model, or a name for :func:`outpace.load`. ``methods``: names, Method objects, or names with their
    settings. ``prompts``: questions, texts, or the path of a file as :func:`~outpace.prompts.questions.load_prompts`
    reads it; None takes the embedded set. ``limit``: use that many, from all categories in turn. ``max_new_tokens``:
    per answer. ``batch_size``: requests decoded together. ``references``: texts that methods may copy from.
    ``namespace``: where each method keeps what it learns from prompt to prompt; "" keeps nothing. ``rule``,
    ``draft_model``, ``datastore`` and ``head`` are those of :meth:`Model.method`; autoregressive decoding keeps its own
    rule. ``params``: None is greedy. ``command``: what the user typed. ``on_progress``: called before every answer.

    Ctrl-C ends the run early: the report then has ``complete`` false and counts whole prompts only. Raises BadInput for
    whatever does not exist, does not fit the model, or is out of range.
    """
    from outpace.bench.runner import run

    params = params or SamplingParams()
    questions = _questions(prompts, limit)
    drafts = [draft_model] if isinstance(draft_model, Model) else list(draft_model or ())
    heads = [head] if isinstance(head, str | Path) else list(head or ())
    named = methods if isinstance(methods, Mapping) else {one: {} for one in methods if isinstance(one, str)}
    settings = BenchSettings(
        max_new_tokens=max_new_tokens,
        params=params,
        batch_size=batch_size,
        ignore_eos=ignore_eos,
        references=tuple(references),
        namespace=namespace,
        command=command,
        extra={
            "method_settings": {name: dict(one) for name, one in named.items()},
            "rule": rule,
            "draft_models": [one.name for one in drafts],
            "datastore": None if datastore is None else str(datastore),
            "heads": [str(one) for one in heads],
        },
    )
    if not isinstance(model, Model):
        import outpace.loading

        model = outpace.loading.load(model)
    built = [
        model.method(
            one,
            named.get(one) if isinstance(one, str) else None,
            rule=None if one == "none" else rule,
            draft_model=drafts,
            datastore=datastore,
            head=heads,
        )
        for one in methods
    ]
    return BenchReport(run(model, built, questions, settings, on_progress))


def _questions(prompts: Sequence[Prompt | str] | str | Path | None, limit: int | None) -> Sequence[Prompt]:
    if prompts is None or isinstance(prompts, str | Path):
        return load_prompts(prompts, limit)
    found = [
        Prompt(f"prompt-{i}", "other", (one,)) if isinstance(one, str) else one for i, one in enumerate(prompts, 1)
    ]
    return found if limit is None else stratified(found, limit)
