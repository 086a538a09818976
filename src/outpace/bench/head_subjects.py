"""What is measured of a head: each of its methods by measured costs, and in shapes of the literature.

Speed-ups are measured with draft sizes chosen by costs; accepted lengths are compared at fixed shapes, which do not
depend on the machine: trees of 60 draft tokens, EAGLE-2's number (Li et al. 2024, arXiv 2406.16858), and chains of six.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from outpace.bench.bigram import Bigrams, bigram_method
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Request
from outpace.heads.base import Head
from outpace.heads.head_folder import HeadIdentity
from outpace.methods.bindings import Bindings, heads
from outpace.methods.registry import build, drafting_with, find
from outpace.model import Model
from outpace.prompts.prompt import Prompt

CHAINS: tuple[dict[str, Any], ...] = ({"tree": False}, {"topk": 1})
"""Settings that make a drafter of trees one of chains; a method takes the first that it understands."""
TREE, CHAIN = "tree", "chain"
FULL = {TREE: ("tree of 60", Fixed(6, 10, 60)), CHAIN: ("chain of 6", Fixed(6, 1, 6))}
"""The fixed shapes."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A drafter to be measured. ``drafter`` is shown; ``shape``: "tree" or "chain", sized by costs; or one of FULL, in
    every round. ``head``: the head on disk that it drafts with; None for another drafter, or a head that is not stored.
    """

    drafter: str
    shape: str
    method: Method
    head: HeadIdentity | None = None

    @property
    def label(self) -> str:
        return f"{self.drafter} {self.shape}"

    @property
    def chain(self) -> bool:
        """Whether it drafts chains, of whatever size."""
        return self.shape in (CHAIN, FULL[CHAIN][0])

    def shapes(self) -> list[Subject]:
        """It, and the same drafter in its fixed shape unless its settings fix another."""
        if isinstance(self.method.controller, Fixed):
            return [self]
        shape, controller = FULL[self.shape]
        return [self, replace(self, shape=shape, method=replace(self.method, controller=controller))]


def choose_methods(kind: str, name: str | None) -> list[str]:
    """The methods to measure a head of this kind with: the named one, or all. Raises BadInput where there is none."""
    fitting = drafting_with(kind)
    if name is None:
        if not fitting:
            raise BadInput(f"no method drafts with a head of kind {kind}")
        return fitting
    chosen = find(name).name
    if chosen not in fitting:
        have = ", ".join(fitting) or "none"
        raise BadInput(f"method '{chosen}' does not draft with a head of kind {kind} (methods that do: {have})")
    return [chosen]


def head_subjects(
    model: Model,
    head: Head,
    names: Mapping[str, Mapping[str, Any]],
    label: str = "{}",
    identity: HeadIdentity | None = None,
) -> list[Subject]:
    """Methods with this head, by name with their settings; and as a chain, where all of them draft trees.

    Each with as many draft tokens as the measured costs justify, and in its fixed shape. ``label``: their name, {}
    being the method's. ``identity``: of the head, where it is stored.
    """

    def made(name: str, settings: Mapping[str, Any]) -> list[Subject]:
        context = replace(model.context(), bindings=Bindings(heads({head.config.kind: head})))
        method = build(name, context, settings)
        return Subject(label.format(name), TREE if method.drafter.proposal.tree else CHAIN, method, identity).shapes()

    subjects = [one for name, settings in names.items() for one in made(name, settings)]
    if any(one.chain for one in subjects):
        return subjects
    for name, settings in names.items():
        for chain in CHAINS:
            with suppress(BadInput):  # it has no such setting, or means something else by it
                return [*subjects, *made(name, {**settings, **chain})]
    return subjects


def untrained_subjects(
    model: Model, head: Head, names: Mapping[str, Mapping[str, Any]], label: str = "untrained {}"
) -> list[Subject]:
    """As the largest chain alone: that a head which knows nothing accepts nothing is soon seen."""
    return [one for one in head_subjects(model, head, names, label) if one.chain][-1:]


def bigram_subjects(model: Model, table: Bigrams, nodes: int | None = None) -> list[Subject]:
    """The table as a tree and as a chain: sized by costs and in the fixed shapes, or of ``nodes`` draft tokens."""
    tree, chain = bigram_method(model.target, table, max_nodes=nodes), bigram_method(model.target, table, 1, nodes)
    return [*Subject("bigram", TREE, tree).shapes(), *Subject("bigram", CHAIN, chain).shapes()]


def own_answers(model: Model, prompts: Sequence[Prompt], length: int) -> Bigrams:
    """A table fitted on the target's own answers to the very prompts (first turns): more than a table could know."""
    texts = []
    for prompt in prompts:
        tokens = model.tokenizer.chat(prompt.messages)
        decoder = Decoder(model.target)
        request = Request(tuple(tokens), model.method("none"), max_new_tokens=length, stop_ids=model.eos_ids)
        generation = decoder.submit(request)
        decoder.run()
        texts.append(generation.sequence.tokens[len(tokens) - 1 :])
    return Bigrams.fit(texts, model.target.vocab_size)
