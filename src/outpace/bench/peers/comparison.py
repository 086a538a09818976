"""From what the user asked for to the result: weights, prompts as token ids, the run, the JSON object.

Every process is given the same ids. Only the first turn of a conversation is asked: a second would continue answers
that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outpace.bench.figure_text import percent
from outpace.bench.peers import gguf_formats
from outpace.bench.peers.cpu_contention import NOTED
from outpace.bench.peers.entries import Entry, Question
from outpace.bench.peers.libraries import Peer
from outpace.bench.peers.observer import Observer, Silent
from outpace.bench.peers.peer_rows import compared
from outpace.bench.peers.peers_report import PeersReport
from outpace.bench.peers.processes import Job, Plan, available, context_for, make_plan
from outpace.bench.peers.round_robin import RoundRobin
from outpace.bench.peers.stopping import TimeLimit
from outpace.bench.peers.weights import Weights, find, float_of, precisions
from outpace.bench.results import plain_figures
from outpace.core import machine
from outpace.core.errors import BadInput
from outpace.core.version import __version__
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import unique

_SILENT = Silent()
_WARM_UP = "Describe a quiet morning in a harbour town. Then say the same again in one sentence."


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """What the user asked for. None takes the default of ``dtypes`` and ``gguf_formats``, and is no time limit."""

    model: str
    peers: tuple[Peer, ...]
    methods: tuple[str, ...] = ("none",)
    dtypes: tuple[str, ...] | None = None
    gguf_formats: tuple[str, ...] | None = None
    draft_model: str | None = None
    heads: tuple[str, ...] = ()
    vllm_python: str | None = None
    max_new_tokens: int = 64
    threads: int = 1
    timeout: float = 900.0
    max_minutes: float | None = None
    command: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything found and encoded; nothing is started yet."""

    settings: ComparisonSettings
    plan: Plan
    job: Job
    dtypes: tuple[str, ...]
    questions: tuple[Question, ...]
    warm_up: Question
    notes: tuple[str, ...]
    limit: TimeLimit

    def run(self, observer: Observer = _SILENT) -> PeersReport:
        """Measure, and return the results. Ctrl-C and the time limit end it early, with ``complete`` false."""
        drafts = [self.job.draft] if self.job.draft else []
        work = RoundRobin(
            self.plan,
            self.questions,
            self.warm_up,
            length=self.settings.max_new_tokens,
            threads=self.settings.threads,
            timeout=self.settings.timeout,
            offline=all(one.local for one in (self.job.weights, *drafts)),
            limit=self.limit,
            on_progress=observer.progress,
            on_note=observer.note,
        )

        def tell(finished: Entry | None) -> None:
            observer.results(self._result(work))
            if finished is not None:
                observer.row(finished)

        work.on_change = tell
        observer.results(self._result(work))
        return self._result(work, complete=work.go())

    def _result(self, work: RoundRobin, *, complete: bool = False) -> PeersReport:
        """What there is by now. Only prompts that all rows have answered count; before the first one, that one does."""
        others = work.others.share
        weights = self.job.weights
        told = {peer.name: {one.name: dict(one.settings) for one in peer.configs} for peer in self.settings.peers}
        noted = asdict(replace(self.settings, peers=())) | {
            "peers": told,
            "heads": [Path(folder).name for folder in self.settings.heads],
            "dtypes": self.dtypes,
            "gguf_formats": self.job.gguf_formats,
            "prompts": len(self.questions),
            "categories": list(dict.fromkeys(question.category for question in self.questions)),
            "context": self.job.context,
            "temperature": 0,
            "ignore_eos": True,
            "turns": "the first of each prompt",
        }
        noted.pop("vllm_python")  # a report may be shared, and should hold no paths
        found: dict[str, Any] = {
            "version": __version__,
            "complete": complete,
            "stopped_by": work.stopped,
            "prompts_answered_by_all": work.answered,
            "machine": machine.describe()
            | {"threads": self.settings.threads, "taken_by_others": None if others is None else round(others, 3)},
            "model": {"name": weights.name, "folder_dtype": self.job.dtype, "gguf": weights.gguf_kind or None},
            "settings": noted,
            **compared(self.plan.entries, self.questions[: max(1, work.answered)]),
            "skipped": self.plan.skipped,
            "notes": list(self.notes),
        }
        if any(entry.weights for entry in self.plan.entries):
            found["notes"].append(
                f"Rows that name a GGUF format hold other weights than the file ({weights.gguf_kind}): llama.cpp made "
                "them from it, for the kernels that it has for this format. Their answers differ."
            )
        if others is not None and others >= NOTED:
            found["notes"].append(
                f"Other programs took {percent(others)} of the CPUs while this ran. Libraries whose threads spin lose "
                "most by that: these rates cannot be compared. Run it again on an idle machine."
            )
        return PeersReport(plain_figures(found))


def prepare(settings: ComparisonSettings, prompts: Sequence[Prompt]) -> Comparison:
    """Find what is installed, convert the weights, encode the prompts. Raises BadInput for what cannot work.

    The time limit begins here.
    """
    limit = TimeLimit(settings.max_minutes)
    pythons, skipped = available(settings.peers, settings.vllm_python)
    if not pythons:
        ways = "; ".join(f"{one['name']}: {one['install']}" for one in skipped)
        raise BadInput(f"none of the peers is installed ({ways})")
    dtypes, notes = precisions(settings.dtypes, settings.model)
    dtype, more = float_of(dtypes)
    weights = find(settings.model, dtype)
    draft = find(settings.draft_model, dtype) if settings.draft_model else None
    questions, warm_up = encode(weights, prompts, settings.max_new_tokens)
    longest = max(len(question.tokens) for question in (*questions, warm_up))
    context = context_for(longest, settings.max_new_tokens)
    formats = tuple(gguf_formats.chosen(settings.gguf_formats, Path(weights.gguf) if weights.gguf else None))
    job = Job(weights, draft, dtype, settings.threads, context, settings.heads, formats)
    plan = make_plan(job, dtypes, settings.methods, pythons, skipped)
    told = tuple(dict.fromkeys([*notes, *more]))
    return Comparison(settings, plan, job, tuple(dtypes), tuple(questions), warm_up, told, limit)


def encode(weights: Weights, prompts: Sequence[Prompt], length: int) -> tuple[list[Question], Question]:
    """The prompts' first turns as token ids, and the one to warm up on. Raises BadInput for one that does not fit."""
    from transformers import AutoConfig, AutoTokenizer

    from outpace.models.quiet import explained, quiet
    from outpace.models.tokenizers import HFTokenizer

    with quiet(), explained(f"cannot load the tokenizer of '{weights.name}'"):
        words = HFTokenizer(AutoTokenizer.from_pretrained(weights.folder, local_files_only=weights.local))
        config = AutoConfig.from_pretrained(weights.folder, local_files_only=weights.local)
    room = getattr(config, "max_position_embeddings", None)
    questions = []
    for prompt in unique(prompts):
        tokens = tuple(words.chat(prompt.messages))
        if room is not None and len(tokens) + length > room:
            raise BadInput(
                f"prompt '{prompt.id}' has {len(tokens)} tokens, its answer {length}; the model's context holds {room}"
            )
        questions.append(Question(prompt.id, prompt.category, tokens))
    warm_up = Question("warm-up", "", tuple(words.chat([{"role": "user", "content": _WARM_UP}])))
    return questions, warm_up
