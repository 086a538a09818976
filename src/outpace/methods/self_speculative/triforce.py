"""TriForce: for long contexts, the target drafts for itself while reading a part of its K/V, and is drafted for.

``triforce`` (Sun et al. 2024, arXiv 2404.11912) is a hierarchy of three. The *middle* level is the target's own weights
reading sinks, recent tokens and, in every layer and head, the chunks of the context whose mean keys have the largest
products with its query: nearly the target, at a cost that does not grow with the context. The query is that of the
latest token in a full forward, and the chunks are chosen again after so many tokens; the authors choose them once, at
the end of the prompt, and read all that follows, as is done here from one choice to the next. The *bottom* level drafts
for the middle one: a small model that reads sinks and recent tokens only, or a lookup in the text. The whole target
verifies the middle level's tokens.

Lossless at both levels: the middle level's tokens are speculative samples, token by token, from its own processed
distribution, and that distribution is the q row of each. How many are proposed is fixed before the first is drawn; the
bottom never drafts so far that there could be more. Where the context is so short that the middle level would read all
of it, the bottom drafts for the target directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from outpace.acceptance.draws import drawn_from, left_by
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.tree import DETERMINISTIC, ROOT, TokenTree
from outpace.core.validation import StrictModel
from outpace.drafting.base import Drafter, DraftState
from outpace.drafting.bottom_drafters import BottomDrafter, LookupBottom, StreamingBottom
from outpace.drafting.context_chunks import Chunks, streaming
from outpace.drafting.draft_token import draft_token
from outpace.methods.registry import Context, Parts, register
from outpace.targets.base import Scores, Sequence, Target, TreeScores
from outpace.targets.sub_graph import SubGraph

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class TriForceState(DraftState):
    """``chunks``: mean keys of the context. ``bottom``: the bottom drafter's state."""

    chunks: Chunks
    bottom: Any


@dataclass(slots=True)
class MiddleDraft:
    """One request's draft under construction. ``run``: all that the middle level has to run, rejected tokens of the
    bottom included; ``at``: the last accepted node of it; ``chain``: the proposal, ``wanted`` tokens."""

    state: TriForceState
    wanted: int
    bottom: Chance
    inner: Chance
    run: TokenTree = field(default_factory=TokenTree)
    at: int = ROOT
    chain: TokenTree = field(default_factory=TokenTree)

    @property
    def left(self) -> int:
        return self.wanted - len(self.chain)

    def take(self, bottom: TokenTree) -> None:
        """Append the bottom's chain after ``at``."""
        node = self.at
        for draw in bottom.draws:
            node = self.run.add(node, draw.token, None if draw.q_row == DETERMINISTIC else bottom.q_rows[draw.q_row])

    def judge(self, part: TreeScores) -> None:
        """Speculative sampling from the middle level's distribution, token by token, to a recovered or bonus token."""
        accepted, sequence = True, self.state.sequence
        while accepted:
            if part.distribution.dead_end(self.at):
                self.wanted = len(self.chain)  # nothing can follow: stop before the draw that cannot be made
                return
            drawn = self.run.draws_at(self.at)
            if sequence.params.greedy:
                token = part.argmax(self.at)
                accepted = bool(drawn) and drawn[0].token == token
                self.chain.add(len(self.chain) - 1, token)
            else:
                p = rest = part.distribution.at(self.at)
                accepted = False
                if sequence.noise is not None:  # the middle level's own token, whatever the bottom drafted
                    token = draft_token(sequence, len(self.chain), p, self.inner)
                    accepted = bool(drawn) and drawn[0].token == token
                elif drawn:
                    token, q = drawn[0].token, drawn_from(self.run, (), drawn[0], p)
                    accepted = self.inner.bernoulli(p.acceptance(q, token))
                    if not accepted:
                        rest, _ = left_by(p, q, token)
                if not accepted and sequence.noise is None:
                    token = self.inner.categorical(rest)
                self.chain.add(len(self.chain) - 1, token, QRow(p))
            self.at = self.run.add(self.at, token)


class TriForce(Drafter[TriForceState]):
    """Three levels. ``inner``: most tokens that the bottom drafts at a time.

    ``sink``, ``window``, ``retrieved``: first, latest and retrieved tokens that the middle level reads, the last in
    chunks of ``chunk``, which are chosen anew every ``every`` tokens.
    """

    proposal = Proposal(sampled=True, shares_noise=True)
    needs_target_internals = True

    def __init__(
        self,
        target: Target,
        bottom: BottomDrafter[Any],
        *,
        inner: int = 4,
        chunk: int = 8,
        sink: int = 16,
        window: int = 256,
        retrieved: int = 512,
        every: int = 4,
    ) -> None:
        self.target = target
        self.bottom = bottom
        self.inner = inner
        self.chunk = chunk
        self.sink, self.window, self.retrieved = sink, window, retrieved
        self.every = every

    def begin(self, sequence: Sequence) -> TriForceState:
        return TriForceState(sequence, Chunks(self.chunk), self.bottom.begin(sequence))

    def end(self, state: TriForceState) -> None:
        self.bottom.end(state.bottom)

    def propose_batch(self, states: Seq[TriForceState], budgets: Seq[Budget]) -> list[TokenTree]:
        self._choose(states)
        drafts: list[MiddleDraft] = []
        kv: dict[int, Tensor] = {}
        for state, budget in zip(states, budgets, strict=True):
            sequence = state.sequence
            bottom, inner = (
                sequence.chance.at(len(sequence.tokens), f"{self.purpose}/{level}") for level in ("bottom", "middle")
            )
            draft = MiddleDraft(state, min(budget.depth, budget.max_nodes), bottom, inner)
            read = self.read(state)
            if read is None:
                draft.chain, draft.wanted = self.bottom.draft([state.bottom], [()], [draft.wanted], [bottom])[0], 0
            else:
                kv[len(drafts)] = read
            drafts.append(draft)
        self._run(drafts, kv)
        return [draft.chain for draft in drafts]

    def _choose(self, states: Seq[TriForceState]) -> None:
        """Choose the chunks of requests whose context has become long, or has grown since they were chosen."""
        due = []
        for state in states:
            length, chunks = self.target.length(state.sequence.kv), state.chunks
            grown = chunks.chosen_at < 0 or length - chunks.chosen_at >= self.every
            if self.retrieved and grown and length > self.sink + self.window + self.retrieved:
                due.append((state, length))
        if not due:
            return
        queries = self.target.queries([state.sequence for state, _ in due])
        for (state, length), mine in zip(due, queries, strict=True):
            state.chunks.grow(length, partial(self.target.keys, state.sequence.kv))
            state.chunks.choose(mine, length, self.sink, self.window, self.retrieved)

    def read(self, state: TriForceState) -> Tensor | None:
        """The committed positions that the middle level reads this round, as ``SubGraph.kv`` has them; None: all."""
        length = self.target.length(state.sequence.kv)
        if not self.retrieved:
            return streaming(length, self.sink, self.window)
        return None if state.chunks.chosen_at < 0 else state.chunks.positions(length, self.sink)

    def _run(self, drafts: Seq[MiddleDraft], kv: Mapping[int, Tensor]) -> None:
        """Bottom and middle by turns, all requests together, until every draft has its tokens."""
        members = [draft for index, draft in enumerate(drafts) if index in kv]
        graph = SubGraph(kv=dict(enumerate(kv.values())))
        scores: Scores | None = None
        while growing := [draft for draft in members if draft.left > 0]:
            # One less than are left: the middle level adds one of its own.
            chains = self.bottom.draft(
                [draft.state.bottom for draft in growing],
                [draft.chain.tokens for draft in growing],
                [min(self.inner, draft.left - 1) for draft in growing],
                [draft.bottom for draft in growing],
            )
            for draft, chain in zip(growing, chains, strict=True):
                draft.take(chain)
            scores = self.target.score([(draft.state.sequence, draft.run) for draft in members], (), graph, scores)
            parts = {id(draft): part for draft, part in zip(members, scores.parts, strict=True)}
            for draft in growing:
                draft.judge(parts[id(draft)])


class TriForceSettings(StrictModel):
    """Settings of ``triforce``."""

    num_draft_tokens: int = Field(6, ge=0, le=64, description="tokens that the middle level proposes per round")
    bottom: Literal["auto", "model", "lookup"] = Field(
        "auto", description="what drafts for the middle level; auto uses the draft model if one is named"
    )
    inner: int = Field(4, ge=0, le=64, description="maximum number of tokens that the bottom level drafts at a time")
    retrieved: int = Field(
        512, ge=0, description="tokens that the middle level reads in chunks chosen from the context"
    )
    chunk: int = Field(8, ge=1, description="number of tokens in a chunk")
    every: int = Field(
        4, ge=1, description="number of tokens after which chunks are chosen again, by one more forward pass"
    )
    window: int = Field(256, ge=1, description="number of latest tokens that the middle level and the draft model read")
    sink: int = Field(16, ge=0, description="number of first tokens that both read")


@register(
    "triforce",
    family="self-speculative",
    paper="Sun et al. 2024, arXiv 2404.11912",
    summary="The model drafts for itself while reading only a part of a long context; a small model or a "
    "lookup drafts for that level.",
    when_to_use="Contexts of many thousands of tokens on a target for which reading the K/V takes most of a "
    "forward pass. Not for short contexts.",
    optional=("draft model",),
    tiny={
        "num_draft_tokens": 2, "bottom": "model", "inner": 1, "retrieved": 1, "chunk": 1, "window": 1, "sink": 1,
        "every": 1,
    },
)  # fmt: skip
def build(context: Context, settings: TriForceSettings) -> Parts:
    """The target, and a draft model where one was named."""
    target = context.target
    with_model = settings.bottom == "model" or (settings.bottom == "auto" and bool(context.bindings.draft_models))
    draft = context.draft() if with_model else None
    if draft is not None and not draft.whole:
        if settings.bottom == "model":
            raise BadInput(
                "a draft LM or a draft model of another vocabulary cannot read a part of its K/V; choose bottom=lookup"
            )
        draft = None
    bottom = LookupBottom() if draft is None else StreamingBottom(draft, settings.sink, settings.window)
    drafter = TriForce(
        target,
        bottom,
        inner=settings.inner,
        chunk=settings.chunk,
        sink=settings.sink,
        window=settings.window,
        retrieved=settings.retrieved,
        every=settings.every,
    )
    return Parts(drafter, Fixed(settings.num_draft_tokens, max_nodes=settings.num_draft_tokens))
