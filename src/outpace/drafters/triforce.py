"""TriForce: for long contexts, the target drafts for itself while reading a part of its K/V, and is drafted for.

``triforce`` (Sun et al. 2024, arXiv 2404.11912) is a hierarchy of three. The *middle* level is the target's own weights
reading sinks, recent tokens and the chunks of the context that matter now (:mod:`outpace.drafters.retrieval`): nearly
the target, at a cost that does not grow with the context. The *bottom* level drafts for the middle one: a small model
that reads sinks and recent tokens only, or a lookup in the text. The whole target verifies what the middle level says.

Lossless at both levels: the middle level's tokens are speculative samples, token by token, from its own processed
distribution, and that distribution is the q row of each. How many are handed up is fixed before the first is drawn; the
bottom never drafts so far that there could be more. Where the context is so short that the middle level would read all
of it, the bottom drafts for the target directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from outpace.acceptance.base import Verdict
from outpace.acceptance.draws import acceptance_probability, leftover
from outpace.chance import Chance
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.drafters.base import Drafter, Proposal
from outpace.drafters.copying import continuation
from outpace.drafters.draft_model import CATCH_UP, draft_of
from outpace.drafters.growth import ChainGrowth, grow_together
from outpace.drafters.prompt_lookup import NgramIndex
from outpace.drafters.retrieval import Chunks, streaming
from outpace.errors import BadInput
from outpace.method import Context, Parts, register
from outpace.targets.base import Scores, Sequence, SubGraph, Target, TreeScores
from outpace.tree import DETERMINISTIC, ROOT, QRow, TokenTree


class Bottom(ABC):
    """Drafts chains after ``paths``, tokens that are not committed yet, behind each sequence."""

    sampled = False
    """Whether its draws may be random."""

    @abstractmethod
    def begin(self, sequence: Sequence) -> None:
        """A request joins."""

    @abstractmethod
    def draft(
        self, sequences: Seq[Sequence], paths: Seq[Seq[int]], counts: Seq[int], chances: Seq[Chance]
    ) -> list[TokenTree]:
        """Chains of at most ``counts[i]`` tokens that go on after ``paths[i]``."""

    @abstractmethod
    def end(self, sequence: Sequence) -> None:
        """The request left."""


class Lookup(Bottom):
    """Copies what followed the last tokens where they occurred before."""

    def __init__(self, longest: int = 3) -> None:
        self._longest = longest
        self._indices: dict[Sequence, NgramIndex] = {}

    def begin(self, sequence: Sequence) -> None:
        self._indices[sequence] = NgramIndex(1, self._longest)

    def draft(
        self, sequences: Seq[Sequence], paths: Seq[Seq[int]], counts: Seq[int], chances: Seq[Chance]
    ) -> list[TokenTree]:
        chains = []
        for sequence, path, count in zip(sequences, paths, counts, strict=True):
            index = self._indices[sequence]
            index.extend(sequence.tokens[len(index.text) :])
            found = index.find([*sequence.tokens[-self._longest :], *path])
            copied = continuation(index.text, found[0], count, periodic=False) if found else []
            chains.append(TokenTree.chain(copied))
        return chains

    def end(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)


class _Continued(ChainGrowth):
    """A chain that begins behind tokens that are not committed."""

    def follow(self, path: Seq[int]) -> None:
        """Tokens behind the committed ones. Called once, after ``catch_up``."""
        node = ROOT
        for token in path:
            node = self._run_after(node, token)


class Streaming(Bottom):
    """A draft model that reads the first ``sink`` and the last ``window`` tokens of its context."""

    sampled = True

    def __init__(self, model: Target, sink: int, window: int) -> None:
        self.model = model
        self._sink, self._window = sink, window
        self._twins: dict[Sequence, Sequence] = {}

    def begin(self, sequence: Sequence) -> None:
        kv = self.model.open()
        self._twins[sequence] = Sequence(sequence.tokens, sequence.prompt_length, kv, sequence.sampler, sequence.chance)

    def draft(
        self, sequences: Seq[Sequence], paths: Seq[Seq[int]], counts: Seq[int], chances: Seq[Chance]
    ) -> list[TokenTree]:
        model, chains = self.model, [TokenTree() for _ in sequences]
        members: list[tuple[int, Sequence, _Continued]] = []
        for index, (sequence, path, count, chance) in enumerate(zip(sequences, paths, counts, chances, strict=True)):
            room = model.context_length - len(sequence.tokens) - len(path)
            if (depth := min(count, room)) > 0:
                members.append((index, self._twins[sequence], _Continued(self._twins[sequence], Budget(depth), chance)))
        # A pass that reads a part of the K/V is never committed: what has come since is prefilled now and then.
        behind = [twin for _, twin, _ in members if self._lag(twin) > CATCH_UP]
        if behind:
            model.prefill(behind)
        kv: dict[int, Tensor] = {}
        for place, (index, twin, growth) in enumerate(members):
            growth.catch_up(twin.tokens[len(twin.tokens) - self._lag(twin) :])
            growth.follow(paths[index])
            read = streaming(model.length(twin.kv), self._sink, self._window)
            if read is not None:
                kv[place] = read
        grow_together(model, [twin for _, twin, _ in members], [one for _, _, one in members], SubGraph(kv=kv))
        for index, _, growth in members:
            chains[index] = growth.proposal()
        return chains

    def _lag(self, twin: Sequence) -> int:
        return len(twin.tokens) - 1 - self.model.length(twin.kv)

    def end(self, sequence: Sequence) -> None:
        twin = self._twins.pop(sequence, None)
        if twin is not None:
            self.model.close(twin.kv)


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
                    residual, total = leftover(p, q, token)
                    rest = residual if total > 0.0 else p
                if not accepted:
                    token = self.inner.categorical(rest)
                self.chain.add(len(self.chain) - 1, token, QRow(p))
            self.at = self.run.add(self.at, token)


class TriForce(Drafter):
    """Three levels. ``inner``: most tokens that the bottom drafts at a time. ``layer``: whose states chunks go by."""

    proposal = Proposal(sampled=True)
    needs_whole = True

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
        self.taps = (layer,) if retrieved else ()
        self._chunks: dict[Sequence, Chunks] = {}

    def begin(self, sequence: Sequence) -> None:
        self._chunks[sequence] = Chunks(self.chunk)
        self.bottom.begin(sequence)

    def end(self, sequence: Sequence) -> None:
        self._chunks.pop(sequence, None)
        self.bottom.end(sequence)

    def on_prefill(self, sequence: Sequence, position: int, taps: Mapping[int, Tensor]) -> None:
        for states in taps.values():
            self._chunks[sequence].add(position, states)

    def observe(self, sequences: Seq[Sequence], scores: Seq[TreeScores], verdicts: Seq[Verdict]) -> None:
        for sequence, part, verdict in zip(sequences, scores, verdicts, strict=True):
            # An answer may have been cut before the end of the path.
            rows = [0, *(node + 1 for node in verdict.path)][: len(sequence.tokens) - part.length]
            for layer in self.taps:
                self._chunks[sequence].add(part.length - 1, part.taps[layer][rows])

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
    pays="where reading the K/V takes most of a forward: contexts of many thousands of tokens on fast weights; "
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
