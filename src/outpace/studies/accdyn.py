"""``accdyn``: does the task or the depth tell more about acceptance, and where is more than one token a round accepted?

(Mahmoud 2026, arXiv 2604.14682.) A draft is judged at a depth where all before it was accepted. Whether one of its
tokens there is accepted is explained by its depth alone, or by the task of its prompt alone; the share of the deviance
that each explains is compared, in resamples of the prompts of each task.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from outpace.bench.records import Answer
from outpace.core.errors import BadInput
from outpace.core.tree import ROOT
from outpace.core.validation import StrictModel
from outpace.studies.claims import FROM, TO, above, holds, interval, resampled_within, single, undecided
from outpace.studies.decoded import decode
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study

Counts = NDArray[np.float64]


class AccdynSettings(StrictModel):
    """Settings of ``accdyn``."""

    method: str = Field("eagle3", description="method whose draft tokens are counted")
    draft_model: str = Field("", description="draft model of a method that takes one; by default what is shipped")
    max_new_tokens: int = Field(48, ge=2, description="tokens of an answer, at most")
    depth: int = Field(6, ge=2, le=16, description="deepest draft tokens that are counted")


@study("accdyn", title="Acceptance by depth and by task", paper="Mahmoud 2026, arXiv 2604.14682")
def accdyn(context: StudyContext, settings: AccdynSettings) -> Findings:
    """Count the draft tokens of a method by depth and task."""
    model, draft = context.model, context.draft_model(settings.draft_model)
    found = decode(
        model,
        {settings.method: model.method(settings.method, draft_model=draft)},
        context.prompts,
        max_new_tokens=settings.max_new_tokens,
        trees=True,
        seed=context.seed,
    )
    answers = found.answers[settings.method]
    counts = np.stack([judged(one, settings.depth) for one in answers])
    if not counts.any():
        raise BadInput(f"method '{settings.method}' drafted nothing for these prompts")
    tasks = [prompt.category for prompt in found.prompts]
    names = list(dict.fromkeys(tasks))
    member = np.array([[task == name for name in names] for task in tasks], float)
    rounds = np.array([len(one.rounds) for one in answers], float)
    accepted = np.array([sum(len(each.path) for each in one.rounds) for one in answers], float)

    weights = resampled_within(tasks, context.seed)
    whole = np.ones((1, len(answers)))
    by_depth, by_task = explained(whole, counts, member)
    depths, others = explained(weights, counts, member)
    lengths = _per_round(weights, member, accepted, rounds)
    usual = _per_round(whole, member, accepted, rounds)[0]
    claims = [
        above(
            "the task explains more of acceptance than the depth", float((by_task - by_depth)[0]), others - depths, 0.0
        )
    ]
    if "chat" in names and len(names) > 1:
        chat = names.index("chat")
        rest = np.delete(lengths, chat, axis=1)
        only = (lengths[:, chat] > 1.0) & (rest <= 1.0).all(axis=1)
        says = "only chat has more than one accepted draft token a round"
        few = any(single(one) for one in member.T)
        claims.append(undecided(says, None, "a category has one prompt") if few else holds(says, only))
    ends = [(None, None) if single(one) else interval(some) for one, some in zip(member.T, lengths.T, strict=True)]
    rows = [
        {
            "task": name,
            "prompts": int(member[:, at].sum()),
            "accepted_per_round": float(usual[at]),
            "low": ends[at][0],
            "high": ends[at][1],
            **{f"depth_{depth + 1}": rate for depth, rate in enumerate(_rates(counts[member[:, at] > 0].sum(axis=0)))},
        }
        for at, name in enumerate(names)
    ]
    series = {
        row["task"]: [
            PlotPoint(depth, row[f"depth_{depth}"])
            for depth in range(1, settings.depth + 1)
            if row[f"depth_{depth}"] is not None
        ]
        for row in rows
    }
    shown = {"task": "task", "prompts": "prompts", "accepted_per_round": "accepted/round", "low": FROM, "high": TO}
    shown |= {f"depth_{depth}": f"depth {depth}" for depth in range(1, settings.depth + 1)}
    return Findings(
        rows,
        shown,
        claims,
        Plot(
            "Acceptance of draft tokens",
            "depth",
            "accepted, where all before was",
            {k: v for k, v in series.items() if v},
        ),
        [
            f"Deviance explained by depth {100 * float(by_depth[0]):.1f} %, by task {100 * float(by_task[0]):.1f} %, "
            f"of {int(counts.sum())} judgements of drafts of {settings.method}. A depth counts only rounds whose draft "
            "reached it, and drafts are long where they are likely to be accepted."
        ],
    )


def judged(answer: Answer, deepest: int) -> Counts:
    """(deepest, 2): rounds whose draft was judged at each depth, all before it being accepted: those in which none of
    its tokens there was accepted, and those in which one was. A tree's siblings count once, so that a wide tree is no
    worse than a chain."""
    found = np.zeros((deepest, 2))
    for each in answer.rounds:
        for depth, node in enumerate((ROOT, *each.path)[:deepest]):
            if each.tree.children(node):
                found[depth, int(depth < len(each.path))] += 1
    return found


def explained(weights: Counts, counts: Counts, member: Counts) -> tuple[Counts, Counts]:
    """The share of the deviance that depth and that task explains, in each resample.

    ``weights`` (R, P): how often each prompt counts; ``counts`` (P, D, 2); ``member`` (P, T).
    """
    null = _deviance((weights @ counts.sum(axis=1))[:, None, :])
    depth = _deviance(np.einsum("rp,pdk->rdk", weights, counts))
    task = _deviance(np.einsum("rp,pt,pk->rtk", weights, member, counts.sum(axis=1)))
    safe = np.maximum(null, 1e-12)
    return 1.0 - depth / safe, 1.0 - task / safe


def _deviance(table: Counts) -> Counts:
    """(R,) of Bernoulli outcomes in groups (R, G, 2), each group with its own rate."""
    total = table.sum(axis=2, keepdims=True)
    shares = np.divide(table, total, out=np.ones_like(table), where=table > 0)
    found: Counts = -2.0 * (table * np.log(shares)).sum(axis=(1, 2))
    return found


def _per_round(weights: Counts, member: Counts, accepted: Counts, rounds: Counts) -> Counts:
    """(R, T): accepted draft tokens a round; 0 for a task of which a resample has no prompt."""
    some = weights @ (member * rounds[:, None])
    found: Counts = np.divide(weights @ (member * accepted[:, None]), some, out=np.zeros_like(some), where=some > 0)
    return found


def _rates(counts: Counts) -> list[Any]:
    return [float(hit / (miss + hit)) if miss + hit else None for miss, hit in counts]
