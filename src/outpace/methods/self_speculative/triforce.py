"""TriForce: for long contexts, the target drafts for itself while reading a part of its K/V, and is drafted for.

``triforce`` (Sun et al. 2024, arXiv 2404.11912) is a hierarchy of three. The *middle* level is the target's own weights
reading sinks, recent tokens and the chunks of the context that matter now: nearly
the target, at a cost that does not grow with the context. The *bottom* level drafts for the middle one: a small model
that reads sinks and recent tokens only, or a lookup in the text. The whole target verifies what the middle level says.

Lossless at both levels: the middle level's tokens are speculative samples, token by token, from its own processed
distribution, and that distribution is the q row of each. How many are handed up is fixed before the first is drawn; the
bottom never drafts so far that there could be more. Where the context is so short that the middle level would read all
of it, the bottom drafts for the target directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.draws import acceptance_probability, residual_distribution
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance
from outpace.core.errors import BadInput
from outpace.core.proposal import Proposal
from outpace.core.tree import DETERMINISTIC, ROOT, QRow, TokenTree
from outpace.drafting.base import Drafter
from outpace.drafting.bottom_drafters import Bottom, Lookup, Streaming
from outpace.drafting.context_chunks import Chunks
from outpace.methods.registry import Context, Parts, draft_of, register
from outpace.targets.base import Scores, Sequence, SubGraph, Target, TreeScores


@dataclass(slots=True)
class _Middle:
    """One request's draft in the making. ``run``: all that the middle level has to run, the bottom's refused tokens
    included; ``at``: the node that it has come to; ``chain``: what is handed up, ``wanted`` tokens."""

    sequence: Sequence
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
        """The bottom's chain behind ``at``."""
        node = self.at
        for draw in bottom.draws:
            node = self.run.add(node, draw.token, None if draw.q_row == DETERMINISTIC else bottom.q_rows[draw.q_row])

    def judge(self, part: TreeScores) -> None:
        """Speculative sampling from the middle level's distribution, token by token, until a refusal or a bonus."""
        accepted = True
        while accepted:
            if part.distribution.dead_end(self.at):
                self.wanted = len(self.chain)  # nothing can follow: stop before the draw that cannot be made
                return
            drawn = self.run.draws_at(self.at)
            if self.sequence.params.greedy:
                token = part.argmax(self.at)
                accepted = bool(drawn) and drawn[0].token == token
                self.chain.add(len(self.chain) - 1, token)
            else:
                p = rest = part.p(self.at)
                accepted = False
                if drawn:
                    token, row = drawn[0].token, drawn[0].q_row
                    q = None if row == DETERMINISTIC else self.run.q_rows[row].dense(len(p)).to(p.device)
                    accepted = self.inner.bernoulli(acceptance_probability(p, q, token))
                    residual, total = residual_distribution(p, q, token)
                    rest = residual if total > 0.0 else p
                if not accepted:
                    token = self.inner.categorical(rest)
                self.chain.add(len(self.chain) - 1, token, QRow(p))
            self.at = self.run.add(self.at, token)


class TriForce(Drafter):
    """Three levels. ``inner``: most tokens that the bottom drafts at a time. ``layer``: whose states chunks go by."""

    proposal = Proposal(sampled=True)
    needs_target_internals = True

    def __init__(
        self,
        target: Target,
        bottom: Bottom,
        *,
        inner: int = 4,
        chunk: int = 32,
        sink: int = 16,
        window: int = 256,
        retrieved: int = 512,
        layer: int = 1,
    ) -> None:
        self.target = target
        self.bottom = bottom
        self.inner = inner
        self.chunk = chunk
        self.sink, self.window, self.retrieved = sink, window, retrieved
        self.aux_hidden_state_layers = (layer,) if retrieved else ()
        self._chunks: dict[Sequence, Chunks] = {}

    def begin(self, sequence: Sequence) -> None:
        self._chunks[sequence] = Chunks(self.chunk)
        self.bottom.begin(sequence)

    def end(self, sequence: Sequence) -> None:
        self._chunks.pop(sequence, None)
        self.bottom.end(sequence)

    def on_prefill(self, sequence: Sequence, position: int, hidden_states: Mapping[int, Tensor]) -> None:
        for states in hidden_states.values():
            self._chunks[sequence].add(position, states)

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence, part, verdict in zip(sequences, scores, verdicts, strict=True):
            # An answer may have been cut before the end of the path.
            rows = [0, *(node + 1 for node in verdict.path)][: len(sequence.tokens) - part.length]
            for layer in self.aux_hidden_state_layers:
                self._chunks[sequence].add(part.length - 1, part.hidden_states[layer][rows])

    def propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> list[TokenTree]:
        drafts: list[_Middle] = []
        kv: dict[int, Tensor] = {}
        for sequence, budget in zip(sequences, budgets, strict=True):
            at = len(sequence.tokens)
            bottom, inner = (sequence.chance.at(at, f"{self.purpose}/{level}") for level in ("bottom", "middle"))
            draft = _Middle(sequence, min(budget.depth, budget.nodes), bottom, inner)
            read = self.read(sequence)
            if read is None:
                draft.chain, draft.wanted = self._direct(draft), 0
            else:
                kv[len(drafts)] = read
            drafts.append(draft)
        self._run(drafts, kv)
        return [draft.chain for draft in drafts]

    def read(self, sequence: Sequence) -> Tensor | None:
        """The committed positions that the middle level reads this round; None: all."""
        length = self.target.length(sequence.kv)
        return self._chunks[sequence].positions(length, self.sink, self.window, self.retrieved)

    def _direct(self, draft: _Middle) -> TokenTree:
        """The bottom drafts for the target."""
        return self.bottom.draft([draft.sequence], [()], [draft.wanted], [draft.bottom])[0]

    def _run(self, drafts: Seq[_Middle], kv: Mapping[int, Tensor]) -> None:
        """Bottom and middle by turns, all requests together, until every draft has its tokens."""
        members = [draft for index, draft in enumerate(drafts) if index in kv]
        graph = SubGraph(kv=dict(enumerate(kv.values())))
        scores: Scores | None = None
        while growing := [draft for draft in members if draft.left > 0]:
            # One less than are left: the middle level adds one of its own.
            chains = self.bottom.draft(
                [draft.sequence for draft in growing],
                [draft.chain.tokens for draft in growing],
                [min(self.inner, draft.left - 1) for draft in growing],
                [draft.bottom for draft in growing],
            )
            for draft, chain in zip(growing, chains, strict=True):
                draft.take(chain)
            scores = self.target.score([(draft.sequence, draft.run) for draft in members], (), graph, scores)
            parts = {id(draft): part for draft, part in zip(members, scores.parts, strict=True)}
            for draft in growing:
                draft.judge(parts[id(draft)])


class TriForceSettings(BaseModel):
    """Settings of ``triforce``."""

    model_config = ConfigDict(extra="forbid")

    length: int = Field(6, ge=0, le=64, description="tokens that the middle level hands up a round")
    bottom: Literal["auto", "model", "lookup"] = Field(
        "auto", description="who drafts for the middle level; auto takes the draft model, if one is named"
    )
    inner: int = Field(4, ge=0, le=64, description="most tokens that the bottom level drafts at a time")
    retrieved: int = Field(
        512, ge=0, description="tokens that the middle level reads in chunks chosen from the context"
    )
    chunk: int = Field(32, ge=1, description="tokens of a chunk")
    window: int = Field(256, ge=1, description="latest tokens that the middle level reads, and the draft model")
    sink: int = Field(16, ge=0, description="first tokens that both read")
    layer: int | None = Field(None, ge=0, description="whose states chunks are chosen by; by default the middle one")


def _names_a_model(context: Context) -> bool:
    try:
        return bool(context.models())
    except BadInput:
        return False


@register(
    "triforce",
    family="self-speculative",
    paper="Sun et al. 2024, arXiv 2404.11912",
    summary="The model reads a part of a long context to draft for itself; a small model or a lookup drafts for that.",
    when_to_use="where reading the K/V takes most of a forward: contexts of many thousands of tokens on fast weights; "
    "not on short ones, where a forward costs the same whatever it reads",
    tiny={
        "length": 2, "bottom": "model", "inner": 1, "retrieved": 1, "chunk": 1, "window": 1, "sink": 1, "layer": 2,
    },
)  # fmt: skip
def build(context: Context, settings: TriForceSettings) -> Parts:
    """The target, and a draft model where one was named."""
    target = context.target
    layer = target.num_layers // 2 if settings.layer is None else settings.layer
    if layer > target.num_layers:
        raise BadInput(f"there is no layer {layer} to take states from: the model has {target.num_layers}")
    with_model = settings.bottom == "model" or (settings.bottom == "auto" and _names_a_model(context))
    draft = draft_of(context) if with_model else None
    if draft is not None and not draft.whole:
        if settings.bottom == "model":
            raise BadInput("a draft model of another vocabulary cannot read a part of its K/V; choose bottom=lookup")
        draft = None
    bottom = Lookup() if draft is None else Streaming(draft, settings.sink, settings.window)
    drafter = TriForce(
        target,
        bottom,
        inner=settings.inner,
        chunk=settings.chunk,
        sink=settings.sink,
        window=settings.window,
        retrieved=settings.retrieved,
        layer=layer,
    )
    return Parts(drafter, Fixed(settings.length, nodes=settings.length))
