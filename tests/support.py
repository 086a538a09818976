"""What the tests share: exact output laws through the real Decoder, a naive reference, toy drafters and tokenizers.

The reference is written a second time, in float64 and without any cleverness, so that agreement means something.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.acceptance.base import AcceptanceRule
from outpace.acceptance.rejection import RecursiveRejection
from outpace.controllers.base import Budget, Controller
from outpace.controllers.fixed import Fixed
from outpace.core.chance import Chance, ChanceSource, Enumeration
from outpace.core.proposal import Proposal
from outpace.core.q_row import QRow
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting.base import Drafter, DraftState
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context, build
from outpace.targets.base import Sequence
from outpace.targets.table import Table, TableTarget, random_table

OutputDistribution = dict[tuple[int, ...], float]
Path = tuple[int, ...]
Row = npt.NDArray[np.float64]


# ---------------------------------------------------------------------------------------- the naive reference


def reference_logits(logits: Tensor, params: SamplingParams, prompt: Seq[int], output: Seq[int]) -> Row:
    """Bias, repetition penalty, presence and frequency penalties, the user's processors; float64."""
    values = [float(value) for value in logits]
    row: Row = np.array(values, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *output}:
        row[token] = (
            row[token] * params.repetition_penalty if row[token] < 0 else row[token] / params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    for processor in params.processors:
        state = processor.begin(prompt)
        for token in output:
            state = processor.advance(state, token)
        row[:] = processor.process(state, torch.from_numpy(row).float()).double().numpy()
    return row


def reference_probs(logits: Tensor, params: SamplingParams, prompt: Seq[int], output: Seq[int]) -> Row:
    """The distribution of the next token, from the definitions."""
    row = reference_logits(logits, params, prompt, output)
    if params.temperature == 0:
        best: Row = np.zeros_like(row)
        best[row.argmax()] = 1.0
        return best
    row = row / params.temperature
    if params.top_k:
        row[row < np.sort(row)[::-1][min(params.top_k, len(row)) - 1]] = -np.inf
    probs: Row = np.exp(row - row.max())
    probs /= probs.sum()
    if params.top_p < 1:
        mass = 0.0
        kept = np.zeros_like(probs)
        for token in np.argsort(-probs, kind="stable"):
            if mass >= params.top_p:
                break
            kept[token] = probs[token]
            mass += probs[token]
        probs = kept / kept.sum()
    if params.min_p > 0:
        probs[probs < params.min_p * probs.max()] = 0
        probs /= probs.sum()
    return probs


def autoregressive_distribution(
    table: Table, params: SamplingParams, prompt: Seq[int], length: int, start: Path = (), stops: Iterable[int] = ()
) -> OutputDistribution:
    """The law of ``length`` output tokens of autoregressive decoding, given that they begin with ``start``. Stops end
    early."""
    proposal_distribution: OutputDistribution = {start: 1.0}
    stops = set(stops)
    for _ in range(length - len(start)):
        longer: OutputDistribution = defaultdict(float)
        for output, weight in proposal_distribution.items():
            if output and output[-1] in stops:
                longer[output] += weight
                continue
            for token, p in enumerate(reference_probs(table((*prompt, *output)), params, prompt, output)):
                if p > 0:
                    longer[*output, token] += weight * float(p)
        proposal_distribution = dict(longer)
    return proposal_distribution


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Largest difference of probability of any outcome."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


# ------------------------------------------------------------------------------- laws through the real Decoder


class Own:
    """A request's own streams within one enumeration (requests with equal seeds share their numbers)."""

    def __init__(self, source: ChanceSource, name: object) -> None:
        self._source, self._name = source, name

    def at(self, position: int, purpose: str) -> Chance:
        return self._source.at(position, f"{self._name}|{purpose}")


def whole_law(
    target: TableTarget, requests: Seq[Request], source: Callable[[ChanceSource], ChanceSource] = lambda chance: chance
) -> dict[tuple[Path, ...], float]:
    """The exact joint law of the outputs of requests decoded as one batch."""

    def program(chance: ChanceSource) -> tuple[Path, ...]:
        decoder = Decoder(target)
        running = [decoder.submit(request) for request in requests]
        for index, generation in enumerate(running):
            generation.sequence.chance = source(Own(chance, index))
        decoder.run()
        return tuple(tuple(generation.sequence.tokens[len(generation.request.prompt) :]) for generation in running)

    proposal_distribution: dict[tuple[Path, ...], float] = defaultdict(float)
    for outcome, weight in Enumeration.outcomes(program, limit=200_000):
        proposal_distribution[outcome] += weight
    return dict(proposal_distribution)


def round_law(
    target: TableTarget,
    method: Method,
    params: SamplingParams,
    prompt: Path,
    horizon: int,
    source: Callable[[ChanceSource], ChanceSource] = lambda chance: chance,
) -> OutputDistribution:
    """The exact law of the tokens that one round commits."""

    def program(chance: ChanceSource) -> Path:
        decoder = Decoder(target)
        generation = decoder.submit(Request(prompt, method, params, max_new_tokens=horizon))
        generation.sequence.chance = source(chance)
        decoder.step()
        check_consistent(target, generation)
        return tuple(generation.tokens)

    proposal_distribution: OutputDistribution = defaultdict(float)
    for outcome, weight in Enumeration.outcomes(program, limit=200_000):
        proposal_distribution[outcome] += weight
    return dict(proposal_distribution)


def round_error(
    method: Method,
    params: SamplingParams,
    *,
    table: Table,
    vocab: int = 3,
    prompt: Path = (0, 1),
    horizon: int = 3,
    source: Callable[[ChanceSource], ChanceSource] = lambda chance: chance,
) -> float:
    """How far one round, continued by autoregressive decoding to ``horizon`` tokens, is from autoregressive decoding.
    0 is lossless.

    If it is 0 after every prefix, then by induction the law of whole outputs is autoregressive decoding's.
    """
    target = TableTarget(vocab, table)
    continued: OutputDistribution = defaultdict(float)
    for committed, weight in round_law(target, method, params, prompt, horizon, source).items():
        for output, p in autoregressive_distribution(table, params, prompt, horizon, start=committed).items():
            continued[output] += weight * p
    return distance(continued, autoregressive_distribution(table, params, prompt, horizon))


def check_consistent(target: TableTarget, generation: Generation) -> None:
    """K/V hold every committed token but the last."""
    sequence = generation.sequence
    assert sequence.kv == sequence.tokens[:-1]
    assert target.length(sequence.kv) == len(sequence.tokens) - 1


def greedy_is_plain(name: str, settings: dict[str, Any]) -> None:
    """A method gives autoregressive decoding's answers on a toy target, and drafts on the way."""
    target = TableTarget(12, random_table(12, 8))
    context = Context(target)
    plain, drafting = build("none", context), build(name, context, settings)
    for prompt in ((1, 2), (7,), (3, 3, 3)):
        answers = []
        for made in (plain, drafting):
            decoder = Decoder(target)
            generation = decoder.submit(Request(prompt, made, max_new_tokens=50))
            decoder.run()
            answers.append(generation.tokens)
        assert answers[0] == answers[1]
        assert generation.metrics.accepted > 10


# ------------------------------------------------------------------------------------------------ toy drafters

Grow = Callable[[TokenTree, Path, int, Chance], None]
"""Adds draws to a tree: (tree, committed tokens, depth, chance)."""


class Toy(Drafter[DraftState]):
    """A drafter made of one function; it draws from the stream it should."""

    def __init__(self, grow: Grow, proposal: Proposal) -> None:
        self.grow = grow
        self.proposal = proposal

    def begin(self, sequence: Sequence) -> DraftState:
        return DraftState(sequence)

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        tree, sequence = TokenTree(), state.sequence
        self.grow(tree, tuple(sequence.tokens), budget.depth, self.stream(sequence))
        return tree

    def stream(self, sequence: Sequence) -> Chance:
        return sequence.chance.at(len(sequence.tokens), "draft")


@dataclass(frozen=True)
class Q:
    """What a toy draft model says: a table at a temperature, in a precision, perhaps over a reduced vocabulary."""

    table: Table
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    ids: tuple[int, ...] | None = None

    def row(self, path: Path) -> QRow:
        logits = self.table(path) / self.temperature
        if self.ids is None:
            return QRow(logits.softmax(-1).to(self.dtype))
        ids = torch.tensor(self.ids)
        return QRow(logits[ids].softmax(-1).to(self.dtype), ids)


def draw(row: QRow, chance: Chance) -> int:
    """A token from a row."""
    index = chance.categorical(row.probs)
    return index if row.ids is None else int(row.ids[index])


def sampled_chain(q: Q) -> Grow:
    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        node, path = ROOT, tokens
        for _ in range(depth):
            row = q.row(path)
            token = draw(row, chance)
            node, path = tree.add(node, token, row), (*path, token)

    return grow


def sampled_tree(q: Q, draws: Seq[int]) -> Grow:
    """``draws[d]`` draws with replacement after every node at depth d, all from one row."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        level = [ROOT]
        for count in draws[:depth]:
            below: list[int] = []
            for node in level:
                row: QRow | int = q.row((*tokens, *tree.path_tokens(node)))
                held = row
                for _ in range(count):
                    assert isinstance(held, QRow)
                    child = tree.add(node, draw(held, chance), row)
                    row = len(tree.q_rows) - 1
                    below.append(child)
            level = list(dict.fromkeys(below))

    return grow


def certain_tree(seed: int, vocab: int, nodes: int = 5) -> Grow:
    """A deterministic random tree, another one for every context; draws may repeat a node.

    After other growers it goes on from their tree, so what it adds depends on what they drew.
    """

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        rng = np.random.default_rng([seed, *tokens])
        for _ in range(nodes):
            room = [node for node in range(ROOT, len(tree)) if (0 if node == ROOT else tree.depths[node]) < depth]
            if room:
                tree.add(int(rng.choice(room)), int(rng.integers(vocab)))

    return grow


def certain_children(seed: int, vocab: int) -> Grow:
    """After every node there is, no child, one or two: a function of the path to the node and of nothing else."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        for node in range(ROOT, len(tree)):
            path = tree.path_tokens(node)
            rng = np.random.default_rng([seed, *tokens, vocab, *path])
            if len(path) < depth:
                for token in rng.integers(vocab, size=rng.integers(3)):
                    tree.add(node, int(token))

    return grow


def both(*grows: Grow) -> Grow:
    """Draws of several growers interleaved into one tree, the later ones after the earlier at every node."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        for one in grows:
            one(tree, tokens, depth, chance)

    return grow


def merged(*grows: Grow) -> Grow:
    """Each grower builds its own tree; TokenTree.merge unites them."""

    def grow(tree: TokenTree, tokens: Path, depth: int, chance: Chance) -> None:
        parts = []
        for one in grows:
            parts.append(TokenTree())
            one(parts[-1], tokens, depth, chance)
        whole = TokenTree.merge(parts)
        for name in ("tokens", "parents", "depths", "draws", "q_rows", "replacement", "_children"):
            setattr(tree, name, getattr(whole, name))

    return grow


CHAIN = Proposal(tree=False, sampled=True)
TREE = Proposal(tree=True, sampled=True)
SINGLE = Proposal(tree=True, sampled=True, one_sampled_sibling=True)
CERTAIN_TREE = Proposal(tree=True)


def method(
    grow: Grow | None,
    proposal: Proposal = TREE,
    *,
    rule: AcceptanceRule | None = None,
    controller: Controller | None = None,
    length: int = 2,
    name: str = "toy",
) -> Method:
    """A Method of a toy drafter; ``None`` is autoregressive decoding."""
    if grow is None:
        return Method("none", NoDraft(), rule or RecursiveRejection(), Fixed(0))
    return Method(name, Toy(grow, proposal), rule or RecursiveRejection(), controller or Fixed(length))


def toy_growers(vocab: int, seed: int = 100) -> dict[str, tuple[Grow, Proposal]]:
    """One of every kind of tree, over one vocabulary."""
    one, two = random_table(vocab, seed + 1, sharpness=1.0), random_table(vocab, seed + 2, sharpness=1.0)
    q, other = Q(one), Q(two, temperature=0.7)
    reduced = Q(one, ids=tuple(range(vocab - 1, 0, -1)))
    return {
        "chain": (sampled_chain(q), CHAIN),
        "chain, bf16 rows": (sampled_chain(Q(one, dtype=torch.bfloat16)), CHAIN),
        "chain, reduced vocabulary": (sampled_chain(reduced), CHAIN),
        "siblings with replacement": (sampled_tree(q, (2,)), TREE),
        "tree with replacement": (sampled_tree(q, (2, 1)), TREE),
        "certain tree": (certain_tree(seed, vocab), CERTAIN_TREE),
        "certain siblings after a sampled chain": (both(sampled_chain(q), certain_children(seed, vocab)), SINGLE),
        "certain siblings that look at the sample": (both(sampled_chain(q), certain_tree(seed, vocab)), TREE),
        "sampled chain after certain siblings": (both(certain_tree(seed, vocab, 3), sampled_chain(q)), SINGLE),
        "two drafters": (both(sampled_chain(q), sampled_chain(other)), TREE),
        "merged trees": (merged(sampled_chain(q), certain_tree(seed, vocab, 3), sampled_tree(reduced, (1,))), TREE),
    }


# ------------------------------------------------------------------------------------------- users' processors


class NeverTwice:
    """A toy grammar: no output token comes twice (once all have come, everything is allowed again)."""

    def begin(self, prompt: Seq[int]) -> frozenset[int]:
        return frozenset()

    def advance(self, state: frozenset[int], token: int) -> frozenset[int]:
        return state | {token}

    def process(self, state: frozenset[int], logits: Tensor) -> Tensor:
        if len(state) == len(logits):
            return logits.clone()
        out = logits.clone()
        out[list(state)] = -torch.inf
        return out


class Alternate:
    """A toy grammar: even and odd tokens take turns, starting from the prompt's last."""

    def begin(self, prompt: Seq[int]) -> int:
        return prompt[-1] % 2

    def advance(self, state: int, token: int) -> int:
        return token % 2

    def process(self, state: int, logits: Tensor) -> Tensor:
        out = logits.clone()
        out[state::2] = -torch.inf
        return out


class BanAll:
    """Allows nothing: a user's mistake."""

    def begin(self, prompt: Seq[int]) -> None:
        return None

    def advance(self, state: None, token: int) -> None:
        return None

    def process(self, state: None, logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf)


# ---------------------------------------------------------------------------------------------- toy tokenizers


class Pieces:
    """A tokenizer whose vocabulary is a list of byte strings; None is a special token without text."""

    def __init__(self, pieces: Seq[bytes | None]) -> None:
        self.pieces = list(pieces)

    def decode(self, ids: Seq[int]) -> str:
        return b"".join(self.pieces[token] or b"" for token in ids).decode("utf-8", errors="replace")


BYTES = Pieces([bytes([value]) for value in range(256)])


class Releasing(TableTarget):
    """Counts K/V that are open."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[int, list[int]] = {}

    def open(self) -> list[int]:
        kv: list[int] = []
        self.held[id(kv)] = kv
        return kv

    def fork(self, kv: Any, length: int | None = None) -> list[int]:
        twin = super().fork(kv, length)
        self.held[id(twin)] = twin
        return twin

    def close(self, kv: Any) -> None:
        assert self.held.pop(id(kv)) is kv, "closed twice"
