"""``rules``: what each lossless verification rule accepts of the very same trees.

While a method decodes at a temperature above 0, every rule that fits its trees judges each scored tree as well, several
times with random numbers of its own; only the method's own verdict is committed. So rules are compared on equal trees,
equal scores and equal contexts. Claims: block verification accepts more than token-by-token rejection (Sun et al. 2024,
arXiv 2403.10444), traversal more than recursive rejection (Weng et al. 2025, arXiv 2505.12398).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from pydantic import Field

from outpace.acceptance.base import AcceptanceRule, Verdict
from outpace.acceptance.registry import all_rules, find_rule
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.validation import StrictModel
from outpace.engine.method import Method
from outpace.studies.claims import FROM, TO, Claim, above, interval, resampled
from outpace.studies.decoded import decode
from outpace.studies.plot import Plot, PlotPoint
from outpace.studies.registry import Findings, StudyContext, study
from outpace.targets.base import TreeScores

_CLAIMS = (
    ("chain", "block", "rejection", "block verification accepts more of a chain than rejection token by token"),
    ("tree", "traversal", "recursive-rejection", "traversal accepts more of a tree than recursive rejection"),
)


class RulesSettings(StrictModel):
    """Settings of ``rules``."""

    chain: str = Field("draft-model", description="method that drafts chains")
    tree: str = Field("sampled-tree", description="method that drafts trees")
    draft_model: str = Field("", description="draft model of methods that take one; by default what is shipped")
    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    max_new_tokens: int = Field(32, ge=2, description="tokens of an answer, at most")
    length: int = Field(4, ge=1, le=16, description="draft tokens on a path in every round, whatever they cost here")
    times: int = Field(8, ge=1, le=64, description="how often each rule judges each tree")


class Comparison(AcceptanceRule):
    """Judges as ``own`` does, and lets ``rules`` judge the same trees ``times`` times; ``found`` has the tokens that
    they would commit, by prompt and rule. It has no name of its own, so that nobody can choose it."""

    paper = ""
    lossless = True

    def __init__(self, own: AcceptanceRule, rules: Seq[AcceptanceRule], times: int) -> None:
        self.own, self.rules, self.times = own, rules, times
        self.name = own.name
        for name in ("takes_trees", "takes_sampled", "takes_without_replacement", "takes_unverified_draws"):
            setattr(self, name, getattr(own, name))
        self.found: dict[tuple[int, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def begin(self, sequence: Any) -> Any:
        return self.own.begin(sequence)

    def accept(self, scores: Seq[TreeScores], states: Seq[Any], chances: Seq[Chance]) -> list[Verdict]:
        for one in scores:
            if not len(one.tree):
                continue
            sequence = one.sequence
            prompt = tuple(sequence.tokens[: sequence.prompt_length])
            for rule in self.rules:
                for number in range(self.times):
                    chance = sequence.chance.at(len(sequence.tokens), f"study {rule.name} {number}")
                    [verdict] = rule.accept([one], [rule.begin(sequence)], [chance])
                    self.found[prompt][rule.name].append(len(verdict.path) + 1.0)
        return self.own.accept(scores, states, chances)


def fitting_rules(name: str, proposal: Proposal) -> list[AcceptanceRule]:
    """The lossless rules that judge such drafts by their scores alone."""
    found = []
    for kind in all_rules():
        if not kind.lossless or kind.greedy_only or kind.shares_noise:
            continue
        rule = find_rule(kind.name)
        try:
            rule.check(name, proposal)
        except BadInput:
            continue
        found.append(rule)
    return found


@study(
    "rules",
    title="What each verification rule accepts of the same trees",
    paper="Sun et al. 2024, arXiv 2403.10444; Weng et al. 2025, arXiv 2505.12398",
)
def rules(context: StudyContext, settings: RulesSettings) -> Findings:
    """Let all rules judge the trees of two methods."""
    model, draft = context.model, context.draft_model(settings.draft_model)
    params = SamplingParams(temperature=settings.temperature, seed=context.seed)
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    series: dict[str, list[PlotPoint]] = {}
    labels: dict[float, str] = {}
    for kind, name in (("chain", settings.chain), ("tree", settings.tree)):
        method = model.method(name, draft_model=draft)
        if not method.drafter.proposal.sampled:
            raise BadInput(f"method '{name}' drafts no sampled tokens, so rules do not differ on its trees")
        judges = fitting_rules(name, method.drafter.proposal)
        comparing = Comparison(method.rule, judges, settings.times)
        # What a draft costs on this machine decides nothing here: every round drafts.
        forced = Fixed(settings.length)
        compared = Method(method.name, method.drafter, comparing, forced)
        decode(
            model, {name: compared}, context.prompts, max_new_tokens=settings.max_new_tokens, params=params,
            seed=context.seed, warm_up=False,
        )  # fmt: skip
        prompts = list(comparing.found.values())
        if not prompts:
            raise BadInput(f"method '{name}' drafted nothing for these prompts")
        weights = resampled(len(prompts), context.seed)
        sums = {rule.name: np.array([sum(one[rule.name]) for one in prompts]) for rule in judges}
        counts = np.array([float(len(one[judges[0].name])) for one in prompts])
        means = {rule: (weights @ total) / (weights @ counts) for rule, total in sums.items()}
        for rule, samples in means.items():
            low, high = interval(samples)
            mean = float(sums[rule].sum() / counts.sum())
            rows.append({"drafts": f"{kind} ({name})", "rule": rule, "tokens": mean, "low": low, "high": high})
            labels[float(len(labels) + 1)] = rule
            series.setdefault(f"{kind} ({name})", []).append(PlotPoint(float(len(labels)), mean, low, high))
        for which, better, base, says in _CLAIMS:
            if which == kind and better in means and base in means:
                gain = float(sums[better].sum() / sums[base].sum())
                claims.append(above(says, gain, means[better] / means[base], 1.0))
    return Findings(
        rows,
        {"drafts": "drafts", "rule": "rule", "tokens": "tokens/round", "low": FROM, "high": TO},
        claims,
        Plot("Tokens that a rule commits in a round", "rule", "tokens a round", series, labels=labels),
        [f"Each rule judged every tree {settings.times} times; rounds without a draft do not count."],
    )
