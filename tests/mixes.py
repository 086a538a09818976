"""Random mixes of requests for one engine: any registered methods side by side, joining and leaving at any round.

A mix is data (:data:`MIX` draws one), so that a failure shrinks to the smallest. :func:`run` decodes it together and
compares every greedy answer with autoregressive decoding of the same request alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

from hypothesis import strategies as st

from certify_cases import VARIANTS
from dense_support import VOCAB, config, model_of, target_of
from outpace.certify.letters import Letters
from outpace.certify.near_ties import gap, parting
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.datastore.store import Datastore
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.heads.base import Head
from outpace.heads.untrained import random_head
from outpace.methods.bindings import DRAFT_MODEL, Binding, Bindings
from outpace.methods.registry import Context, build, methods
from outpace.model import Model
from outpace.targets.base import Target
from outpace.targets.costs import ForwardCosts
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from outpace.targets.kv_store import KVStore
from outpace.targets.table import TableTarget, random_table
from support import Alternate, NeverTwice
from target_suite import tiny_model

DENSE = ("heads-of-16-alone", "biases", "norms-of-queries", "window-of-6", "softcaps")
GENERIC = ("llama", "gpt2", "gpt_neox", "gemma3")
TARGETS = (*(f"dense {shape}" for shape in DENSE), *(f"hf {architecture}" for architecture in GENERIC))
_LETTERS = "abcdefghijklmnopqrstuvwxyz .,é"
TOKENIZER = Letters([None, None, None, *_LETTERS, *(one + two for one in "abcdefgh" for two in "aeiouxyz")])
"""97 pieces, the first three of them special."""
THEIRS = Letters([*"zyxwvutsrqponmlkjihgfedcba ", "ab", "ho"])
"""The vocabulary of another draft model."""
COMMON = (60, 64, 70, 81)
"""Tokens of which most texts are made; random heads draft them too."""
FEW = dict.fromkeys(COMMON, 60.0)
"""A bias that leaves four tokens: random drafters, too, are right in a quarter of the places."""
PARAMS: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "four tokens": SamplingParams(logit_bias=FEW),
    "two tokens": SamplingParams(logit_bias=dict.fromkeys(COMMON[:2], 60.0)),
    "two tokens, frequency": SamplingParams(logit_bias=dict.fromkeys(COMMON[:2], 60.0), frequency_penalty=1.5),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3),
    "four tokens, penalties": SamplingParams(logit_bias=FEW, repetition_penalty=1.1, frequency_penalty=0.9),
    "bias": SamplingParams(logit_bias={7: 2.5, 64: -4.0}),
    "log-probabilities": SamplingParams(logprobs=True, top_logprobs=2),
    "processor": SamplingParams(processors=(NeverTwice(),)),
    "processor, bias, penalty": SamplingParams(processors=(Alternate(),), logit_bias={6: 3.0}, presence_penalty=0.5),
    "sampled": SamplingParams(temperature=1.0, top_p=0.9, seed=3),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One request: when it joins, what it asks for, and how it leaves."""

    method: str
    variant: int
    """Which of its settings and draft models, modulo how many there are."""
    prompt: tuple[int, ...]
    joins: int
    most: int
    params: str
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    references: tuple[tuple[int, ...], ...]
    namespace: str
    cancelled: int | None
    """The round before which it is cancelled."""
    turns: tuple[tuple[int, tuple[int, ...]], ...]
    """Further turns that continue its kept sequence: how many tokens at its end are given up, and what follows."""


def names() -> list[str]:
    """Every lossless method of the registry; those of tests and of other packages are left out."""
    return [info.name for info in methods() if info.lossless and info.build.__module__.startswith("outpace.")]


TOKEN = st.one_of(st.sampled_from(COMMON), st.integers(3, VOCAB - 1))
TEXT = st.lists(TOKEN, min_size=1, max_size=9).map(tuple)
AGAIN = st.tuples(TEXT, st.integers(1, 3)).map(lambda one: one[0] * one[1])
PLAN = st.builds(
    Plan,
    method=st.integers(0, 2**16).map(lambda number: random.Random(number).choice(names())),
    variant=st.integers(0, 7),
    prompt=AGAIN,
    joins=st.integers(0, 6),
    most=st.sampled_from((1, 2, 5, 12, 20, 28)),
    params=st.sampled_from(sorted(PARAMS)),
    stop_ids=st.sampled_from((frozenset[int](), frozenset({64}), frozenset({2, 70, 40}))),
    stop_strings=st.sampled_from(
        ((), (), (TOKENIZER.decode(COMMON[:2])[1:],), ("a", "xx"), (TOKENIZER.decode(COMMON[2:]),))
    ),
    references=st.one_of(st.just(()), st.lists(AGAIN, max_size=2).map(tuple)),
    namespace=st.sampled_from(("", "mine", "yours")),
    cancelled=st.one_of(st.none(), st.none(), st.integers(0, 5)),
    turns=st.one_of(st.just(()), st.lists(st.tuples(st.integers(0, 9), TEXT), max_size=2).map(tuple)),
)
MIX = st.tuples(st.sampled_from(TARGETS), st.lists(PLAN, min_size=1, max_size=4))
Case = tuple[dict[str, Any], int]
"""A method's settings, and which draft models it has: the target itself first, or another."""


@dataclass(slots=True)
class Stage:
    """A target, and what its methods are built from. ``refused``: why a method cannot be built for it."""

    target: Target
    contexts: tuple[Context, ...]
    cases: dict[str, list[Case]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


@cache
def stage(name: str) -> Stage:
    """One of TARGETS, built once, and all methods that can be built for it."""
    kind, _, shape = name.partition(" ")
    target: Target = target_of(shape, "float32") if kind == "dense" else HFTarget(tiny_model(shape))
    theirs = TableTarget(len(THEIRS), random_table(len(THEIRS), 4, order=1))
    stranger, other = Model("toy", theirs, THEIRS, frozenset()), _draft()
    rng = random.Random(0)
    store = Datastore.of([[rng.choice((*COMMON, 31)) for _ in range(40)] for _ in range(3)])

    @cache
    def head(kind: str) -> Head:
        return random_head((kind,), target, seed=1, vocabulary=40)

    def context(*drafts: Target) -> Context:
        models = [
            Binding(str(at), DRAFT_MODEL, partial(_given, one), choice=lambda: stranger)
            for at, one in enumerate(drafts)
        ]

        def default(kind: str, name: str) -> list[Binding]:
            return models if kind == DRAFT_MODEL else [Binding(name or kind, kind, partial(head, kind))]

        return Context(target, Bindings(default=default), tokenizer=TOKENIZER, datastore=lambda: store)

    contexts = context(target, other), context(other, target)
    found = Stage(target, contexts)
    for info in methods():
        variants = ({}, {**info.tiny}, *({**info.tiny, **one} for one in VARIANTS.get(info.name, ())))
        for variant in variants if info.name in names() else ():
            try:
                build(info.name, contexts[0], variant)
            except BadInput as error:
                found.refused[info.name] = str(error)
                continue
            found.cases.setdefault(info.name, []).extend(
                (variant, drafts) for drafts in range(2 if _drafts(info) else 1)
            )
    return found


def _drafts(info: Any) -> bool:
    return "draft model" in info.needs or "draft-model" in str(info.tiny)


def _given(target: Target) -> Target:
    return target


@cache
def _draft() -> Target:
    return DenseTarget(read_decoder_spec(model_of(config(num_hidden_layers=1), seed=5)), "float32")


@dataclass(slots=True)
class Seen:
    """What the mixes of a session have had: requests by method, accepted draft tokens by method, near ties."""

    requests: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    near_ties: int = 0


@contextmanager
def open_kv() -> Iterator[WeakSet[KVStore]]:
    """All K/V stores that are made meanwhile; one that is closed holds no rows."""
    made: WeakSet[KVStore] = WeakSet()
    with ExitStack() as patches:
        for kind in KVStore.__subclasses__():
            patches.enter_context(patch.object(kind, "__init__", _tracked(kind.__init__, made)))
        yield made


def _tracked(plain: Callable[..., None], made: WeakSet[KVStore]) -> Callable[..., None]:
    def init(self: KVStore, *args: Any, **named: Any) -> None:
        plain(self, *args, **named)
        made.add(self)

    return init


class Run:
    """One mix under way."""

    def __init__(self, name: str, seen: Seen) -> None:
        self.stage, self.seen = stage(name), seen
        self.decoder = Decoder(self.stage.target, TOKENIZER)
        self._built: dict[tuple[str, int], Method] = {}

    def method(self, plan: Plan) -> Method:
        """The method of a plan, ``none`` where it cannot be built for this target; plans of one mix that mean the same
        one share it, and what it learns."""
        name = plan.method if plan.method in self.stage.cases else "none"
        number = plan.variant % len(self.stage.cases[name])
        if (name, number) not in self._built:
            settings, drafts = self.stage.cases[name][number]
            self._built[name, number] = build(name, self.stage.contexts[drafts], settings)
        return self._built[name, number]

    def request(self, plan: Plan) -> Request:
        """The first turn of a plan."""
        return Request(
            plan.prompt,
            self.method(plan),
            PARAMS[plan.params],
            max_new_tokens=plan.most,
            stop_ids=plan.stop_ids,
            stop_strings=plan.stop_strings,
            references=plan.references,
            namespace=plan.namespace,
            keep=bool(plan.turns),
        )

    def together(self, plans: list[Plan]) -> list[tuple[Generation, bool]]:
        """Decode a mix; returns its generations, further turns too, and whether each was cancelled by us."""
        waiting = [(plan.joins, plan, self.request(plan), plan.turns) for plan in plans]
        running: list[tuple[Generation, Plan, tuple[Any, ...], int]] = []
        done: list[tuple[Generation, bool]] = []
        at, more = 0, True
        while waiting or running or more:
            for item in [one for one in waiting if one[0] <= at]:
                waiting.remove(item)
                _, plan, request, turns = item
                running.append((self.decoder.submit(request), plan, turns, at))
            for one, plan, _, since in running:
                if plan.cancelled is not None and at >= since + plan.cancelled and one.finish_reason is None:
                    one.cancel()
            more = self.decoder.step()
            for entry in [one for one in running if one[0].finish_reason is not None]:
                running.remove(entry)
                one, plan, turns, _ = entry
                done.append((one, one.finish_reason == "cancelled"))
                if one.request.keep and one not in self.decoder.active:
                    self._next_turn(one, plan, turns, waiting, at)
                elif one.request.keep:
                    self.decoder.admit()  # a cancelled one leaves at the next round
                    self._next_turn(one, plan, turns, waiting, at)
            at += 1
            assert at < 400, "the mix does not end"
        for one, _ in done:
            if one.request.keep:
                self.stage.target.close(one.sequence.kv)
        return done

    def _next_turn(self, one: Generation, plan: Plan, turns: tuple[Any, ...], waiting: list[Any], at: int) -> None:
        if turns and one.finish_reason != "error":
            (back, text), rest = turns[0], turns[1:]
            tokens = one.sequence.tokens
            prompt = (*tokens[: max(1, len(tokens) - back)], *text)
            request = replace(one.request, prompt=prompt, kept=one.sequence, keep=bool(rest))
            waiting.append((at + 1, plan, request, rest))

    def alone(self, request: Request) -> Generation:
        """Autoregressive decoding of a request, by itself."""
        decoder = Decoder(self.stage.target, TOKENIZER)
        plain = build("none", self.stage.contexts[0])
        one = decoder.submit(replace(request, method=plain, keep=False, kept=None))
        decoder.run()
        return one

    def check(self, one: Generation, cancelled: bool) -> None:
        """Assert that an answer is autoregressive decoding's, near ties aside."""
        name, request = one.request.method.name, one.request
        self.seen.requests[name] += 1
        self.seen.accepted[name] += one.metrics.accepted
        if not request.params.greedy:
            assert one.finish_reason != "error", one.error
            return
        plain = self.alone(request)
        ours, theirs = list(one.tokens), list(plain.tokens)
        if cancelled:
            theirs = theirs[: len(ours)]
        parted = parting(ours, theirs)
        if parted is None:
            assert cancelled or (one.finish_reason, one.text) == (plain.finish_reason, plain.text), request
            return
        where, found, expected = parted
        apart = gap(
            self.stage.target, request.prompt, theirs[:where], (found, expected), request.params, request.stop_ids
        )
        assert apart.near_tie, (name, self.stage.target, request, ours, theirs, apart)
        self.seen.near_ties += 1


def run(name: str, plans: list[Plan], seen: Seen) -> None:
    """Decode a mix, compare its answers, and assert that all K/V were closed."""
    mix = Run(name, seen)

    def seconds(self: Any, rows: int, context: int = 0) -> float:
        return (1e-3 if self._target is mix.stage.target else 1e-4) + 1e-5 * rows

    # On targets this small no draft would be worth its measured rows, nor a draft model its forwards.
    with patch.object(ForwardCosts, "seconds", seconds), open_kv() as stores:
        done = mix.together(plans)
        left = [store for store in stores if store.length]
        assert not left, f"{len(left)} of {len(stores)} K/V stores were left open: {left}"
    for one, cancelled in done:
        mix.check(one, cancelled)
