"""bench: methods side by side, on the same prompts, interleaved, with autoregressive decoding among them.

report = bench("smollm2", ["pld", "sam"], limit=7, max_new_tokens=64)
print(report)
report.write_html("report.html")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.registry import configured_rule
from outpace.bench.bench_report import BenchReport
from outpace.bench.quality.task_scores import check_tasks
from outpace.bench.settings import BenchSettings, Progress
from outpace.bench.sweep import Sweep, swept
from outpace.constraints.grammar import DEFAULT_LIMITS, Grammar, GrammarLimits
from outpace.controllers.registry import ControllerChoice, find_controller
from outpace.core.sampling import SamplingParams
from outpace.engine.method import Method
from outpace.methods.named_weights import DraftModels, Heads
from outpace.methods.registry import configured, find
from outpace.methods.side_by_side import build_all, use_notes
from outpace.model import Model
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import prompts_of


def bench(
    model: Model | str,
    methods: Sequence[str | Method] | Mapping[str, Mapping[str, Any]] = ("pld", "sam", "auto"),
    prompts: Sequence[Prompt | str] | str | Path | None = None,
    *,
    limit: int | None = None,
    sweep: Sweep | None = None,
    max_new_tokens: int = 64,
    ignore_eos: bool = False,
    batch_size: int = 1,
    references: Sequence[str] = (),
    namespace: str = "",
    rule: str | AcceptanceRule | None = None,
    rule_settings: Mapping[str, Any] | None = None,
    draft_model: DraftModels = None,
    datastore: str | Path | None = None,
    head: Heads = None,
    controller: str | ControllerChoice | None = None,
    params: SamplingParams | None = None,
    quality: bool = False,
    warmup_tokens: int = 8,
    grammar: Any = None,
    grammar_limits: GrammarLimits = DEFAULT_LIMITS,
    command: str = "",
    trace: str | Path | None = None,
    trace_texts: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> BenchReport:
    """Measure methods on one model, each on every prompt; autoregressive decoding (``none``) always runs.

    ``model``: a Model, or a name for :func:`outpace.load`. ``methods``: names, Method objects, or names with their
    settings. A name may have a label, so that one method runs twice: ``{"pld#2": {"num_draft_tokens": 2}, "pld#8":
    {"num_draft_tokens": 8}}``, and behind it an acceptance rule: ``pld@top-beta(tau=0.5)``. ``prompts``: questions,
    texts, or the path of a file as :func:`~outpace.prompts.questions.load_prompts` reads it; None takes the embedded
    set. ``limit``: use that many, from all categories in turn. ``sweep``: values of settings,
    ``{"pld.num_draft_tokens": [2, 4]}``; each combination is a row of its own, ``pld#num_draft_tokens=2`` (at most 64
    rows). ``max_new_tokens``: per answer. ``batch_size``: requests decoded at once; another joins when one ends.
    ``references``: texts that methods may copy from. ``namespace``: where each method keeps what it learns from prompt
    to prompt; "" keeps nothing. ``rule``, ``draft_model``, ``datastore`` and ``head`` are those of
    :meth:`Model.method`, ``rule_settings`` those of the rule; autoregressive decoding keeps its own. ``controller``:
    decides how much is drafted. ``params``: None is greedy. ``quality``: measure how far the answers diverge from the
    target, and score those to prompts with a known answer or tests (:mod:`outpace.bench.quality.quality_row`).
    ``warmup_tokens``: length of each method's first answers, which are not counted; 0 for methods that have answered.
    ``grammar``: what all answers must look like, as :func:`outpace.generate` takes it, but for prompts with a grammar
    of their own; ``grammar_limits``: bounds on these. ``command``: what the user typed. ``trace``: a file that
    gets the counts and times of all rounds, for ``outpace simulate``; ``trace_texts``: with prompts and answers.
    ``on_progress``: called before every turn of a prompt or batch, while it is answered, and at the end.

    Ctrl-C ends the run early: the report then has ``complete`` false and counts whole prompts only. Raises BadInput for
    whatever does not exist, does not fit the model, or is out of range.
    """
    from outpace.bench.bench_trace import BenchTrace, check_traceable
    from outpace.bench.runner import run

    params = params or SamplingParams()
    questions = prompts_of(prompts, limit)
    if quality:
        check_tasks(questions)
    if not isinstance(model, Model):
        import outpace.loading

        model = outpace.loading.load(model)
    named = methods if isinstance(methods, Mapping) else {one: {} for one in methods if isinstance(one, str)}
    rows = swept(named, sweep or {})
    choice = ControllerChoice(controller) if isinstance(controller, str) else controller
    choice = choice and replace(choice, bench=True)
    context = model.context(draft_model=draft_model, datastore=datastore, head=head, controller=choice)
    ready = [one for one in methods if isinstance(one, Method)]
    judge = configured_rule(rule, rule_settings or {})
    built = build_all([*rows, *ready], context, rows, judge)
    if trace is not None:
        check_traceable(built)
    settings = BenchSettings(
        max_new_tokens=max_new_tokens,
        params=params,
        batch_size=batch_size,
        ignore_eos=ignore_eos,
        references=tuple(references),
        namespace=namespace,
        quality=quality,
        warmup_tokens=warmup_tokens,
        command=command,
        grammar=None if grammar is None else Grammar.read(grammar),
        grammar_limits=grammar_limits,
        trace=None if trace is None else BenchTrace(Path(trace), texts=trace_texts),
        extra={
            "method_settings": {label: _typed(label, one) for label, one in rows.items()},
            "rule": judge.described if isinstance(judge, AcceptanceRule) else judge,
            "controller": choice and {"name": find_controller(choice.name).name, "settings": dict(choice.settings)},
            "draft_models": [one.option for one in context.bindings.draft_models],
            "datastore": None if datastore is None else str(datastore),
            "heads": [one.option for one in context.bindings.heads],
            "drafts_with": {one.name: list(one.drafts_with) for one in built if one.drafts_with},
            "notes": use_notes({one.name: one.drafts_with for one in built}, context.bindings),
        },
    )
    report = BenchReport(run(model, built, questions, settings, on_progress))
    if settings.trace is not None:
        settings.trace.write(model, batch_size, command)
    return report


def _typed(label: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of a method's settings, as the method reads it."""
    return configured(find(label), settings).model_dump(exclude_unset=True)
