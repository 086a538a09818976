"""A whole decoder over a smaller model is the drafter: hierarchical speculative decoding.

``hsd`` (Mohri et al. 2025, arXiv 2510.19705) drafts with a draft model that itself decodes speculatively: with any
registered method, so with a draft model of its own, down to prompt lookup. The inner rounds are those of
:class:`~outpace.engine.decoder.Decoder`, over the inner model's sequence.

Exactness. Inner rounds are lossless, so the tokens they put out follow the inner model's law, one after the other, and
q of each is the inner model's processed distribution where it was put out. ``handover: fixed`` hands up a number of
tokens that is known before any is drawn. What the last inner round put out beyond it is the surplus: no rule has seen
it, so it is kept while the committed tokens continue with it, and dropped with the first that differs.

``handover: variable`` hands up what whole inner rounds gave, C tokens. C depends on what they are, but no token on
whether there is one: a rule is lossless for answers of every length, and for lengths i and i + 1 that says, with
S_i(x) = P(C >= i and the first i tokens are x)::

    sum_c<i  P(C = c, x_1..c) p(x_c+1..i)   + S_i(x_1..i)     = p(x_1..i)
    sum_c<=i P(C = c, x_1..c) p(x_c+1..i+1) + S_i+1(x_1..i+1) = p(x_1..i+1)

The second less p(x_i+1) times the first is S_i+1(x_1..i+1) = P(C > i, x_1..i) p(x_i+1): given the tokens before it and
that there is one more, the next is a draw from the inner model, under every lossless rule. So whether there is a draw
is settled before it is made. To hold back a round's tokens for having been few would be a bias.

Where a user's processor allows no token at all after some draft tokens, the inner round that met it counts as none.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from outpace.acceptance.base import Verdict
from outpace.acceptance.default import default_rule
from outpace.acceptance.registry import rules
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.controllers.hierarchy import best_hierarchy, measured_rates
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.metrics import CacheUse
from outpace.core.proposal import Proposal
from outpace.core.sampling import SamplingParams
from outpace.core.tree import QRow, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.combination import Combined
from outpace.engine.decoder import Decoder, Generation, Request
from outpace.engine.method import Method
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context, Parts, build, register
from outpace.targets.base import Scores, Sequence, Target, TreeScores

Handover = Literal["fixed", "variable"]


class _Recorded(Combined):
    """The inner drafter, and beside it the rows that the inner tokens were put out from, by sequence."""

    def __init__(self, drafter: Drafter, name: str) -> None:
        super().__init__([drafter], [name], drafter.proposal)
        self.rows: dict[Sequence, list[QRow | None]] = {}

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        return self.parts[0].propose(sequences, budgets)

    def reusable_forward(self, sequences: Seq[Sequence]) -> Scores | None:
        return self.parts[0].reusable_forward(sequences)

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence, scored, verdict in zip(sequences, scores, verdicts, strict=True):
            rows = self.rows[sequence]
            for node in (-1, *verdict.path)[: len(sequence.tokens) - scored.length]:
                rows.append(None if sequence.params.greedy else QRow(scored.p(node)))
        super().observe(sequences, scores, verdicts)


class _InnerChance:
    """Streams of the inner rounds: each belongs to one outer round, for the same inner position comes again."""

    def __init__(self, sequence: Sequence, owner: Drafter) -> None:
        self._sequence, self._owner = sequence, owner

    def at(self, position: int, purpose: str) -> Chance:
        outer = self._sequence
        return outer.chance.at(len(outer.tokens), f"{self._owner.purpose}/{position}/{purpose}")


@dataclass(slots=True)
class _Run:
    """The inner decoder's side of one request: ``rows`` of its tokens from ``base`` on, which are not committed above.

    Tokens before ``seen`` have been handed up.
    """

    inner: Generation
    base: int
    rows: list[QRow | None] = field(default_factory=list)
    seen: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.inner.sequence.tokens


class Nested(Drafter):
    """Drafts chains with ``method`` decoding over ``model``. Raises BadInput for a method that cannot be exact.

    ``least``: how many tokens inner rounds are to give, where the handover is variable; all of them go up, as far as
    the budget's depth allows. With a fixed one as many as the budget says go up.
    """

    proposal = Proposal(sampled=True)

    def __init__(self, model: Target, method: Method, handover: Handover = "fixed", least: int = 1) -> None:
        if not method.lossless:
            raise BadInput(
                f"the inner rule '{method.rule.name}' changes the inner model's law, so its tokens have no true q; "
                "choose a lossless one"
            )
        if method.rule.greedy_only:
            raise BadInput(f"the inner rule '{method.rule.name}' is for temperature 0; choose one that samples")
        if method.drafter.needs_whole and not model.whole:
            raise BadInput(
                f"'{method.name}' reads inside the model that it drafts for, and a draft model of another vocabulary "
                "shows only its logits; choose another inner method"
            )
        self.model = model
        self.handover, self.least = handover, least
        self.decoder = Decoder(model)
        self._recorded = _Recorded(method.drafter, method.name)
        self.method = replace(method, drafter=self._recorded)
        self._runs: dict[Sequence, _Run] = {}

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        runs = [self._run(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        self.decoder.admit()
        self._follow([(run, sequence) for run, sequence in zip(runs, sequences, strict=True) if run is not None])
        wanted = [min(self.least, budget.depth) if self.handover == "variable" else budget.depth for budget in budgets]
        while True:
            short = [
                run.inner
                for run, count in zip(runs, wanted, strict=True)
                if run is not None and len(run.rows) < count and run.inner.finish_reason is None
            ]
            if not short:
                break
            self.decoder.round(short)
        return [
            TokenTree() if run is None else self._handed(run, budget) for run, budget in zip(runs, budgets, strict=True)
        ]

    def _run(self, sequence: Sequence, budget: Budget) -> _Run | None:
        """The inner run of a request, a new one if it has none; None where there is nothing to draft."""
        run = self._runs.get(sequence)
        if run is not None and run.inner.finish_reason is not None:  # the context was full, or a grammar a dead end
            self._drop(sequence)
            run = None
        room = self.model.context_length - len(sequence.tokens)
        # A processor may allow nothing after some tokens: the inner round that meets them fails for what they are.
        if budget.depth <= 0 or budget.nodes <= 0 or room <= budget.depth or sequence.params.processors:
            return None
        if run is None:
            run = self._runs[sequence] = _Run(self._submit(sequence), len(sequence.tokens))
            self._recorded.rows[run.inner.sequence] = run.rows
        return run

    def _submit(self, sequence: Sequence) -> Generation:
        params: SamplingParams = replace(sequence.params, logprobs=False, top_logprobs=0)
        inner = self.decoder.submit(
            Request(
                tuple(sequence.tokens[: sequence.prompt_length]),
                self.method,
                params,
                max_new_tokens=self.model.context_length,
                references=sequence.references,
                namespace=sequence.namespace,
            )
        )
        inner.sequence.chance = _InnerChance(sequence, self)
        return inner

    def _follow(self, pairs: Seq[tuple[_Run, Sequence]]) -> None:
        """Bring the inner sequences to what was committed above, with the surplus where it still holds."""
        moved = []
        for run, sequence in pairs:
            tokens = sequence.tokens
            if len(tokens) >= run.seen + 1 and run.tokens[: len(tokens)] == tokens:
                del run.rows[: len(tokens) - run.base]
            else:  # what a rule has seen is never drafted again
                run.rows.clear()
                moved.append((run.inner, tokens))
            run.base = len(tokens)
        self.decoder.rewind(moved)

    def _handed(self, run: _Run, budget: Budget) -> TokenTree:
        count = min(len(run.rows), budget.depth, budget.nodes)
        run.seen = run.base + count
        tree, node = TokenTree(), -1
        for token, row in zip(run.tokens[run.base : run.seen], run.rows, strict=False):
            node = tree.add(node, token, row)
        return tree

    def _drop(self, sequence: Sequence) -> None:
        run = self._runs.pop(sequence, None)
        if run is not None:
            run.inner.cancel()
            self.decoder.admit()
            self._recorded.rows.pop(run.inner.sequence, None)

    def rewind(self, sequence: Sequence, kept: int) -> None:
        """The next proposal follows, whatever has become of the tokens."""

    def caches(self, sequence: Sequence) -> tuple[CacheUse, ...]:
        run = self._runs.get(sequence)
        if run is None or run.inner not in self.decoder.active:
            return ()
        return self._recorded.caches(run.inner.sequence)

    def end(self, sequence: Sequence) -> None:
        self._drop(sequence)


class NestedSettings(BaseModel):
    """Settings of ``hsd``."""

    model_config = ConfigDict(extra="forbid")

    lengths: tuple[int, ...] = Field(
        (6,),
        min_length=1,
        max_length=16,
        description="tokens handed up, from the target's level down; the last one repeats",
    )
    handover: Handover = Field("fixed", description="hand up exactly so many tokens, or all that whole rounds gave")
    inner: str = Field("pld", description="the method by which the lowest model decodes")
    inner_settings: dict[str, Any] = Field(default_factory=dict, description="settings of the inner method")
    inner_rule: str | None = Field(None, description="acceptance rule of the inner rounds; default: the method's own")
    levels: int | None = Field(
        None, ge=1, le=16, description="how many draft models are levels, in the order named (default: all); "
        "the inner method may use the others"
    )  # fmt: skip
    hierarchy: Literal["given", "auto"] = Field(
        "given", description="levels and lengths as given, or those of least expected latency by measured costs"
    )
    acceptance: tuple[tuple[float, ...], ...] = Field(
        (), description="for auto: how often model i accepts a token of model j, the target first; default: measured"
    )


def _models(context: Context) -> list[Target]:
    models = list(context.drafts()) or [context.draft()]
    for model in models:
        if model.vocab_size != context.target.vocab_size:
            raise BadInput(
                f"a draft model has {model.vocab_size} tokens and the target {context.target.vocab_size}; "
                "choose draft models with the target's vocabulary"
            )
    return models


def _stacked(context: Context, models: Seq[Target], levels: int, lengths: Seq[int], settings: NestedSettings) -> Method:
    """The method by which models[0] decodes: the others under it, ``levels`` of them as decoders themselves."""

    def next_draft() -> Target:
        if len(models) < 2:
            raise BadInput(f"inner method '{settings.inner}' needs a further draft model: name one more")
        return models[1]

    if levels:
        rule = settings.inner_rule
        below = _stacked(context, models[1:], levels - 1, lengths[1:] or lengths, settings)
        drafter, length = Nested(models[1], below, settings.handover, lengths[0]), _most(settings, lengths[0])
        if rule is not None:
            return Method("hsd", drafter, rules()[rule](), Fixed(length))
        return Method("hsd", drafter, default_rule(drafter.proposal), Fixed(length))
    inside = replace(context, target=models[0], draft=next_draft, drafts=lambda: tuple(models[1:]))
    return build(settings.inner, inside, settings.inner_settings, settings.inner_rule)


def _most(settings: NestedSettings, length: int) -> int:
    """Tokens that may come up: a variable handover goes beyond the length that it waits for."""
    return 2 * length if settings.handover == "variable" else length


def _texts(context: Context, count: int = 4, tokens: int = 32) -> list[list[int]]:
    """Texts of the target's own, to measure acceptance on."""
    from outpace.prompts.questions import load_prompts

    target, tokenizer = context.target, context.tokenizer
    if tokenizer is None:
        prompts = [[(37 * i + 11 * one) % target.vocab_size for i in range(1, 9)] for one in range(count)]
    else:
        prompts = [tokenizer.chat([{"role": "user", "content": one.turns[0]}]) for one in load_prompts(None, count)]
    decoder, plain = Decoder(target), build("none", context)
    running = [
        decoder.submit(Request(tuple(prompt), plain, SamplingParams(temperature=1.0, seed=index), tokens))
        for index, prompt in enumerate(prompts)
    ]
    decoder.run()
    return [one.sequence.tokens for one in running]


@register(
    "hsd",
    family="combination",
    paper="Mohri et al. 2025, arXiv 2510.19705",
    summary="A draft model that decodes speculatively itself, with any method inside, any number of levels deep.",
    when_to_use="Above a dear target whose draft model is dear enough to be worth speeding up. "
    "Not where the draft model is cheap: inner rounds have their price.",
    aliases=("hierarchical",),
    needs=("draft model",),
    tiny={"lengths": (2,), "levels": 1, "inner": "pld", "inner_settings": {"length": 2}},
)
def build_nested(context: Context, settings: NestedSettings) -> Parts:
    """The decoders under the target."""
    if any(length < 1 for length in settings.lengths):
        raise BadInput(f"lengths must be at least 1, not {list(settings.lengths)}")
    models, lengths = _models(context), settings.lengths
    levels = len(models) if settings.levels is None else settings.levels
    if levels > len(models):
        raise BadInput(f"{levels} levels need as many draft models; {len(models)} are named")
    if settings.hierarchy == "auto":
        everyone = [context.target, *models]
        rates = settings.acceptance or measured_rates(everyone, _texts(context))
        best = best_hierarchy([model.costs.seconds for model in everyone], rates)
        if len(best.models) == 1:
            return Parts(NoDraft(), Fixed(0))
        models, lengths, levels = [everyone[one] for one in best.models[1:]], best.lengths, len(best.models) - 1
    inner = _stacked(context, models, levels - 1, lengths[1:] or lengths, settings)
    drafter = Nested(models[0], inner, settings.handover, lengths[0])
    return Parts(drafter, Fixed(_most(settings, lengths[0])))
