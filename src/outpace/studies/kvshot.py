"""``kvshot``: does a drafter keep more of its acceptance along a chain when it is fed with the target's K/V? (Liu et
al. 2026, arXiv 2604.26412.)

Three drafters of EAGLE-3's shape learn from the same answers: fed with hidden states, with the K/V of one layer, or
with both (:mod:`outpace.studies.reuse_drafter`); a fourth, fed with states, has EAGLE-3's own norms, as Attention Drift
(Eldenk et al. 2026, arXiv 2605.09992) finds that its states grow along the chain. Chains are
greedy, from every token of the target's greedy answers; acceptance at a position is that of drafters which read the
answer up to there, so that every position has as many chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from outpace.core.errors import BadInput
from outpace.core.progress import stage
from outpace.core.sampling import SamplingParams
from outpace.core.validation import StrictModel
from outpace.engine.known_answers import KnownAnswer, close_answers, known_answers
from outpace.engine.request import Request
from outpace.heads.base import Batch, teacher_of
from outpace.heads.checkpoint import facts
from outpace.heads.draft_vocabulary import DraftVocabulary
from outpace.heads.kinds import find_kind, plan
from outpace.prompts.overlap import Overlap
from outpace.prompts.questions import bench_texts
from outpace.prompts.sources import source
from outpace.studies.claims import FROM, TO, Claim, above, interval, resampled
from outpace.studies.decoded import Figures, contexts_of, whole
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study
from outpace.studies.reuse_drafter import Reuse, ReuseDrafter, TargetKeysValues
from outpace.training.data import Collected, Collector, open_folder
from outpace.training.data_config import DataConfig
from outpace.training.dataset import Dataset
from outpace.training.schedule import Progress, Schedule
from outpace.training.trainer import Trainer

STATES, KV, BOTH, OLD = "states", "K/V", "states and K/V", "states, norms of EAGLE-3"
_VARIANTS: Mapping[str, tuple[Reuse, str]] = {
    STATES: ("states", "attdrift"),
    KV: ("kv", "attdrift"),
    BOTH: ("both", "attdrift"),
    OLD: ("states", "eagle3"),
}
"""What each drafter is fed with, and where its norms are (``norms`` of an eagle3 head)."""
_ANSWERS = "answers to learn from"


def _part(name: str) -> str:
    return f"drafter fed with {name}"


class KvshotSettings(StrictModel):
    """Settings of ``kvshot``."""

    steps: int = Field(4, ge=2, le=16, description="draft tokens of a chain, in training and in the figures")
    layer: int = Field(-1, ge=-1, description="layer whose K/V are read; -1: the highest that eagle3 reads")
    tokens: int = Field(12_000, ge=1, description="of answers that drafters are trained on, about")
    epochs: float = Field(1.0, gt=0, description="passes over them")
    batch_tokens: int = Field(256, ge=64, description="tokens of a step of training, about")
    answer_tokens: int = Field(128, ge=8, description="tokens of an answer that is trained on, at most")
    train_prompts: str = Field("", description="file of prompts to train on; by default the target writes its own")
    vocabulary: int = Field(8192, ge=16, description="tokens that drafters can draft")
    max_new_tokens: int = Field(48, ge=4, description="tokens of an answer that acceptance is measured on, at most")


@dataclass(frozen=True)
class Chains:
    """Greedy chains of a drafter over the answers to P prompts, by position: (P, steps) each.

    ``rows``: chains; ``right``: those whose draft token is the answer's, the answer being read up to there; ``alive``:
    those whose tokens up to there are all right; ``sizes``: summed norms of the states that the next step begins with.
    """

    rows: Figures
    right: Figures
    alive: Figures
    sizes: Figures

    def acceptance(self, weights: Figures) -> Figures:
        """(R, steps): how many are right."""
        found: Figures = (weights @ self.right) / np.maximum(weights @ self.rows, 1.0)
        return found

    def tokens(self, weights: Figures) -> Figures:
        """(R,): tokens of a round that begins anywhere in the answers, the target's own included."""
        found: Figures = 1.0 + ((weights @ self.alive) / np.maximum(weights @ self.rows, 1.0)).sum(axis=1)
        return found

    def norms(self) -> Figures:
        """(steps,): the mean norm after each step."""
        found: Figures = self.sizes.sum(axis=0) / np.maximum(self.rows.sum(axis=0), 1.0)
        return found

    def growth(self, weights: Figures) -> Figures:
        """(R,): the mean norm after the last step over that after the first."""
        means = (weights @ self.sizes) / np.maximum(weights @ self.rows, 1.0)
        found: Figures = means[:, -1] / np.maximum(means[:, 0], 1e-9)
        return found


@study(
    "kvshot",
    title="Acceptance along a chain: drafters fed with states, K/V or both",
    paper="Liu et al. 2026, arXiv 2604.26412; Eldenk et al. 2026, arXiv 2605.09992",
    resumable=True,
)
def kvshot(context: StudyContext, settings: KvshotSettings) -> Findings:
    """Train four drafters on the same answers, and let each draft chains after every token of others."""
    context.journal.plan({_ANSWERS: 1.0, **dict.fromkeys(map(_part, _VARIANTS), 2.0)})
    with context.journal.room("kvshot") as place:
        drafters, embedding, tokens = _trained(context, place, settings)
    answers = _answers(context, drafters[STATES], settings)
    chains: dict[str, Chains] = {}
    with stage("drafting chains", total=len(drafters), unit="drafters") as at:
        for number, (name, drafter) in enumerate(drafters.items(), 1):
            chains[name] = chains_of(drafter, answers, embedding, settings.steps)
            at.move(number)
    weights, once = resampled(len(answers), context.seed), whole(len(answers))
    rows: list[dict[str, Any]] = []
    series: dict[str, list[PlotPoint]] = {}
    for name, one in chains.items():
        found, edges = one.acceptance(once)[0], _edges(one.acceptance(weights))
        grown = interval(one.growth(weights))
        rows.append(
            {
                "fed": name,
                "chains": int(one.rows[:, 0].sum()),
                **{f"position_{at + 1}": float(rate) for at, rate in enumerate(found)},
                "tokens": float(one.tokens(once)[0]),
                **{f"norm_{at + 1}": float(size) for at, size in enumerate(one.norms())},
                "growth": float(one.growth(once)[0]),
                "growth_low": grown[0],
                "growth_high": grown[1],
            }
        )
        series[name] = [PlotPoint(at + 1, float(found[at]), *edges[at]) for at in range(settings.steps)]
    columns = {"fed": "fed with", "chains": "chains"}
    columns |= {f"position_{at}": f"position {at}" for at in range(1, settings.steps + 1)}
    columns |= {"tokens": "tokens/round"}
    columns |= {f"norm_{at}": f"norm {at}" for at in range(1, settings.steps + 1)}
    columns |= {"growth": "growth of states", "growth_low": FROM, "growth_high": TO}
    layer = drafters[STATES].keys_values.layer
    return Findings(
        rows,
        columns,
        _claims(chains, weights, once),
        Plot("Accepted draft tokens by position", "position in the chain", "accepted, all before it right", series),
        [
            f"Trained on {tokens} tokens of answers, far fewer than heads in use; K/V of layer {layer}. "
            f"Norm 1 to {settings.steps}: of the state that the next step begins with, the mean; growth of states: the "
            "last over the first, the text being read."
        ],
    )


def _edges(samples: Figures) -> list[tuple[float, float] | tuple[None, None]]:
    """Of each column."""
    return [interval(one) for one in samples.T]


def _claims(chains: Mapping[str, Chains], weights: Figures, once: Figures) -> list[Claim]:
    def more(says: str, better: str, worse: str, at: int, base: int) -> Claim:
        """That ``better`` is accepted more at position ``at`` than ``worse`` at ``base``: the difference."""
        if not chains[better].right[:, at].any() and not chains[worse].right[:, base].any():
            return Claim(says, None, None, "no draft token was right", "undecided")

        def found(some: Figures) -> Figures:
            apart: Figures = chains[better].acceptance(some)[:, at] - chains[worse].acceptance(some)[:, base]
            return apart

        return above(says, float(found(once)[0]), found(weights), 0.0)

    old = chains[OLD]
    return [
        more("acceptance decays along the chain of a drafter fed with states", STATES, STATES, 0, -1),
        more("at the last position a drafter fed with K/V is accepted more than with states", KV, STATES, -1, -1),
        more("at the last position a drafter fed with both is accepted more than with states", BOTH, STATES, -1, -1),
        above("with EAGLE-3's norms states grow along the chain", float(old.growth(once)[0]), old.growth(weights), 1.0),
        more("at the last position Attention Drift's norms are accepted more than EAGLE-3's", STATES, OLD, -1, -1),
    ]


def _trained(
    context: StudyContext, folder: Path, settings: KvshotSettings
) -> tuple[dict[str, ReuseDrafter], Tensor, int]:
    """Drafters, the target's embedding (V, hidden), and the number of answer tokens that they learned from.

    Raises BadInput for a target that hides its weights.
    """
    model = context.model
    target, kind = model.target, find_kind("eagle3")
    read = kind.aux_layers_of(target.num_layers, kind.Options())
    layer = settings.layer if settings.layer >= 0 else min(max(read), target.num_layers - 1)
    if layer >= target.num_layers:
        raise BadInput(f"layer {layer} does not exist: the model has {target.num_layers} layers")
    keys_values = TargetKeysValues.of(target, layer)
    about = facts(target, model.name)
    layers = sorted({*read, layer, target.num_layers})
    shards = open_folder(folder / "data", target, model.name, layers)
    wanted = DataConfig(
        tokens=settings.tokens,
        sources=[source(settings.train_prompts, context.seed)] if settings.train_prompts else (),
        most=settings.answer_tokens,
        seed=context.seed,
    )

    def collect() -> int:
        with stage("answering prompts to learn from", total=settings.tokens, unit="tokens") as at:

            def watch(now: Collected) -> None:
                at.move(now.tokens)
                context.journal.check()

            return Collector(model, shards, wanted, Overlap(bench_texts())).run(watch).tokens

    context.journal.part(_ANSWERS, collect)
    dataset = Dataset(shards, layers, tokens=settings.batch_tokens, pack=True, target=target)
    ids = dataset.words(settings.vocabulary, target.vocab_size, sorted(model.eos_ids))
    device = torch.device(model.info.get("device", "cpu"))
    found: dict[str, ReuseDrafter] = {}
    for number, (name, (reuse, norms)) in enumerate(_VARIANTS.items()):
        options = {"steps": settings.steps, "norms": norms}
        config = keys_values.sized(plan(kind, about, vocabulary=len(ids), options=options))
        torch.manual_seed(context.seed)
        vocabulary = DraftVocabulary(ids, target.lm_head_rows(ids).float().cpu())
        head = ReuseDrafter(config, vocabulary, reuse, keys_values)
        teacher = teacher_of(target, head, device)
        head.initialise(target, teacher)
        schedule = Schedule(epochs=settings.epochs, seed=context.seed)
        (folder / str(number)).mkdir(exist_ok=True)
        trainer = Trainer(head, teacher, dataset, folder / str(number), schedule, device)
        trainer.resume()
        context.journal.part(_part(name), lambda trainer=trainer, name=name: _train(trainer, name, context))  # type: ignore[misc]
        if trainer.best:
            head.load_state_dict(trainer.best, strict=False)
        found[name] = head.eval().requires_grad_(False)
    return found, teacher.embedding, dataset.answer_tokens()


def _train(trainer: Trainer, name: str, context: StudyContext) -> int:
    """To the end; ended before, it goes on from its state the next time. Returns the steps."""
    with stage(f"training a drafter that is fed with {name}", total=1.0) as at:

        def watch(_: Progress, share: float) -> None:
            at.move(share)
            context.journal.check()

        try:
            return trainer.run(watch).step
        except KeyboardInterrupt:
            trainer.save()
            raise


def _answers(context: StudyContext, head: ReuseDrafter, settings: KvshotSettings) -> list[KnownAnswer]:
    """The target's greedy answers with the hidden states that drafters read."""
    model, plain = context.model, context.model.method("none")
    contexts = contexts_of(model, context.prompts, settings.max_new_tokens)
    requests = [Request(ids, plain, SamplingParams(), settings.max_new_tokens, model.eos_ids) for ids in contexts]
    layers = {*head.config.aux_hidden_state_layers, head.keys_values.layer}
    answers = known_answers(model.target, requests, layers)
    close_answers(model.target, answers)  # drafters read tokens and states alone
    found = [one for one in answers if len(one.tokens) > settings.steps]
    if not found:
        raise BadInput(f"the model ends every answer within {settings.steps} tokens: there is no chain to draft")
    return found


def chains_of(head: ReuseDrafter, answers: Seq[KnownAnswer], embedding: Tensor, steps: int) -> Chains:
    """Greedy chains of ``steps`` tokens from every token of the answers, each run as if all before it were accepted."""
    layers = sorted({*head.config.aux_hidden_state_layers, head.keys_values.layer})
    sums = np.stack([_chains(head, one, layers, embedding, steps) for one in answers])
    return Chains(*np.moveaxis(sums, 1, 0))


def _chains(head: ReuseDrafter, answer: KnownAnswer, layers: Seq[int], embedding: Tensor, steps: int) -> Figures:
    """(4, steps): the sums of one answer, in the order of :class:`Chains`."""
    states = {layer: rows[None] for layer, rows in answer.hidden_states(layers).items()}
    count = next(iter(states.values())).shape[1]
    tokens = torch.tensor([*answer.prompt, *answer.tokens])[:count]
    mine = torch.arange(count) >= len(answer.prompt)
    batch = Batch(tokens[None], states, torch.ones(1, count, dtype=torch.bool), mine[None]).to(
        embedding.device, embedding.dtype
    )
    d2t, found = head.draft_vocabulary.d2t, np.zeros((4, steps))
    with torch.no_grad():
        run = head.unrolling(batch, embedding)
        asked = batch.ahead(batch.answer, 2).flatten()  # where there is a token to be drafted
        alive = asked
        for step in range(steps):
            asked = asked & batch.ahead(batch.answer, 2 + step).flatten()
            if not asked.any():
                break
            normed = run.step(asked, batch.ahead(batch.tokens, 1 + step).flatten())
            drafted = d2t[head.draft_vocabulary(normed).argmax(-1)]
            hit = drafted == batch.ahead(batch.tokens, 2 + step).flatten()[run.rows]
            alive = torch.zeros_like(alive).index_fill_(0, run.rows[hit & alive[run.rows]], True)
            norms = run.state.float().norm(dim=-1)
            found[:, step] = len(run.rows), int(hit.sum()), int(alive.sum()), float(norms.sum())
    return found
