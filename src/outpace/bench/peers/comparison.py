"""From what the user asked for to the result: weights, prompts as token ids, the run, the JSON object.

Every process is given the same ids. Only the first turn of a conversation is asked: a second would continue answers
that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outpace.bench.figure_text import percent
from outpace.bench.peers.cpu_contention import NOTED
from outpace.bench.peers.entries import Question
from outpace.bench.peers.libraries import Peer
from outpace.bench.peers.peer_rows import compared
from outpace.bench.peers.peers_report import PeersReport
from outpace.bench.peers.processes import Job, Plan, available, context_for, make_plan
from outpace.bench.peers.round_robin import RoundRobin
from outpace.bench.peers.weights import Weights, find, float_of, precisions
from outpace.bench.results import plain_figures
from outpace.bench.settings import Progress
from outpace.core import machine
from outpace.core.errors import BadInput
from outpace.core.version import __version__
from outpace.prompts.prompt import Prompt
from outpace.prompts.questions import unique

_WARM_UP = "Describe a quiet morning in a harbour town. Then say the same again in one sentence."


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """What the user asked for. ``dtypes`` None takes the defaults."""

    model: str
    peers: tuple[Peer, ...]
    methods: tuple[str, ...] = ("none",)
    dtypes: tuple[str, ...] | None = None
    draft_model: str | None = None
    heads: tuple[str, ...] = ()
    vllm_python: str | None = None
    max_new_tokens: int = 64
    threads: int = 1
    timeout: float = 900.0
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

    def run(self, on_progress: Callable[[Progress], None] | None = None) -> PeersReport:
        """Measure, and return the results. Ctrl-C ends it early, with ``complete`` false."""
        drafts = [self.job.draft] if self.job.draft else []
        work = RoundRobin(
            self.plan,
            self.questions,
            self.warm_up,
            length=self.settings.max_new_tokens,
            threads=self.settings.threads,
            timeout=self.settings.timeout,
            offline=all(one.local for one in (self.job.weights, *drafts)),
            on_progress=on_progress,
        )
        return self._result(work.go(), work.others.share)

    def _result(self, complete: bool, others: float | None) -> PeersReport:
        weights = self.job.weights
        told = {peer.name: {one.name: dict(one.settings) for one in peer.configs} for peer in self.settings.peers}
        noted = asdict(replace(self.settings, peers=())) | {
            "peers": told,
            "heads": [Path(folder).name for folder in self.settings.heads],
            "dtypes": self.dtypes,
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
            "machine": machine.describe()
            | {"threads": self.settings.threads, "taken_by_others": None if others is None else round(others, 3)},
            "model": {"name": weights.name, "folder_dtype": self.job.dtype, "gguf": weights.gguf_kind or None},
            "settings": noted,
            **compared(self.plan.entries, self.questions),
            "skipped": self.plan.skipped,
            "notes": list(self.notes),
        }
        if others is not None and others >= NOTED:
            found["notes"].append(
                f"Other programs took {percent(others)} of the CPUs while this ran. Libraries whose threads spin lose "
                "most by that: these rates cannot be compared. Run it again on an idle machine."
            )
        return PeersReport(plain_figures(found))


def prepare(settings: ComparisonSettings, prompts: Sequence[Prompt]) -> Comparison:
    """Find what is installed, convert the weights, encode the prompts. Raises BadInput for what cannot work."""
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
    job = Job(weights, draft, dtype, settings.threads, context_for(longest, settings.max_new_tokens), settings.heads)
    plan = make_plan(job, dtypes, settings.methods, pythons, skipped)
    told = tuple(dict.fromkeys([*notes, *more]))
    return Comparison(settings, plan, job, tuple(dtypes), tuple(questions), warm_up, told)


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
