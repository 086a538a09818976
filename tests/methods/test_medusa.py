"""Parallel heads: what they learn, which state they read, the trees and chains of medusa and bpd, and exactness."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_support import target_of
from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.errors import BadInput
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.heads.base import Batch, Head, Teacher
from outpace.heads.head_config import TargetFacts
from outpace.heads.kinds import find_kind, plan
from outpace.heads.parallel_drafter import HeadsDrafter, ParallelState, rank_prior
from outpace.heads.parallel_heads import ParallelHeads
from outpace.heads.untrained import as_training_begins, random_head
from outpace.methods.learned.medusa.network import Medusa
from outpace.methods.registry import Context, build
from outpace.targets.base import Target
from outpace.targets.table import TableTarget, random_table
from support import autoregressive_distribution, distance, whole_law
from weights_support import with_head

VOCAB = 12
KINDS = ("medusa", "bpd")
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "two blocks": {"options": {"layers": 2, "heads": 3}},
    "bpd": {},
    "few words": {"vocabulary": 7},
    "low rank": {"rank": 5},
}
"""Heads of every shape: keywords of ``random_head``."""


def toy(vocab: int = VOCAB, order: int = 1) -> TableTarget:
    return TableTarget(vocab, random_table(vocab, 8, order=order, sharpness=2.5))


def head_of(shape: str, target: Target, **more: Any) -> ParallelHeads:
    head = random_head(["bpd" if shape == "bpd" else "medusa"], target, seed=3, **HEADS[shape], **more)
    assert isinstance(head, ParallelHeads)
    return head


def context_of(target: Target, head: Head) -> Context:
    return with_head(target, head)


def made(target: Target, head: Head, settings: dict[str, Any] | None = None) -> Method:
    return build(head.kind, context_of(target, head), settings)


def decoded(target: Target, requests: Seq[Request]) -> list[Generation]:
    decoder = Decoder(target)
    running = [decoder.submit(request) for request in requests]
    decoder.run()
    return running


# -------------------------------------------------------------------------------------------------------- learning


def teacher_for(target: TableTarget, head: Head) -> Teacher:
    every = torch.eye(target.vocab_size)
    return Teacher(
        embedding=every, rows=every[head.draft_vocabulary.d2t], norm=lambda states: states, final=target.num_layers
    )


def texts(target: TableTarget, rows: int, length: int, prompt: int = 3, seed: int = 0) -> Batch:
    """Texts of the target's at temperature 1, with the states that it had."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    states = torch.zeros(rows, length, target.vocab_size)
    for row in range(rows):
        path = [int(torch.randint(target.vocab_size, (), generator=generator))]
        for at in range(length):
            states[row, at] = target.table(tuple(path))
            tokens[row, at] = path[-1]
            path.append(int(torch.multinomial(states[row, at].softmax(-1), 1, generator=generator)))
    answer = torch.zeros(rows, length, dtype=torch.bool)
    answer[:, prompt:] = True
    return Batch(tokens, {target.num_layers: states}, torch.ones_like(answer), answer)


@cache
def trained(kind: str) -> tuple[TableTarget, ParallelHeads, list[float]]:
    """A head that has seen a toy's texts, and its losses on the way."""
    target = toy()
    facts = TargetFacts(name="toy", hidden_size=VOCAB, vocab_size=VOCAB, num_layers=target.num_layers, fingerprint=[])
    config = plan(find_kind(kind), facts, size="large", options={"heads": 3})
    head = random_head([kind], target)
    fresh = find_kind(kind)(config, as_training_begins(head, target).draft_vocabulary)
    teacher, batch = teacher_for(target, fresh), texts(target, 12, 40)
    optimiser = torch.optim.Adam(fresh.parameters(), lr=0.03)
    losses = []
    for _ in range(100):
        optimiser.zero_grad()
        found = fresh.losses(batch, teacher)
        found["loss"].backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(found["loss"].detach()))
    assert isinstance(fresh, ParallelHeads)
    return target, fresh.eval().requires_grad_(False), losses


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss_towards_what_can_be_known(kind: str) -> None:
    target, head, losses = trained(kind)
    assert losses[-1] < 0.7 * losses[0]
    # On other texts: a head that knew the chain of transitions would say exactly this.
    batch, rows = texts(target, 12, 40, seed=5), torch.eye(VOCAB)
    steps = torch.stack([target.table((token,)).softmax(-1) for token in range(VOCAB)])
    found = head.losses(batch, teacher_for(target, head))
    last = batch.tokens[:, 2:-1].flatten()
    best = -(steps[last] @ steps * (steps[last] @ steps).log()).sum(-1).mean()
    states = head.predicted(torch.stack([target.table((int(token),)) for token in last]))[:, 0]
    said = (states @ rows.T).log_softmax(-1)
    loss = -(steps[last] @ steps * said).sum(-1).mean()
    assert float(loss) < float(best) + 0.15
    assert {"loss", "agree_1", "agree_2", "agree_3"} == set(found)
    assert float(found["agree_1"]) > 0.4


@pytest.mark.parametrize("shape", HEADS)
def test_each_head_is_asked_for_the_token_that_it_will_be_drafted_for(shape: str) -> None:
    """The loss, written out position by position."""
    target = toy()
    head = head_of(shape, target)
    teacher, batch = teacher_for(target, head), texts(target, 5, 9)
    batch.answer[1, 7:] = False  # a shorter row
    rows, words = teacher.rows, set(head.draft_vocabulary.d2t.tolist())
    total = weights = 0.0
    for index in range(head.options.heads):
        losses = []
        for row in range(5):
            for at in range(9):
                # Only what can be drafted is asked for: an answer's token that is a word, behind such tokens.
                asked = range(at + 2, at + 3 + index)
                if all(to < 9 and batch.answer[row, to] and int(batch.tokens[row, to]) in words for to in asked):
                    state = batch.states[target.num_layers][row, at]
                    before = batch.states[target.num_layers][row, at + 1 + index]
                    p = (rows @ before).softmax(-1).bfloat16().float()
                    losses.append(
                        -(p * head.draft_vocabulary(head.predicted(state[None])[0, index]).log_softmax(-1)).sum()
                    )
        weight = head.options.decay**index
        total, weights = total + weight * float(sum(losses)) / max(1, len(losses)), weights + weight
    assert float(head.losses(batch, teacher)["loss"]) == pytest.approx(total / weights, rel=1e-5)


def test_a_medusa_head_begins_as_the_targets_own() -> None:
    target = toy()
    head = as_training_begins(head_of("two blocks", target), target)
    assert isinstance(head, Medusa)
    states = torch.randn(4, VOCAB)
    for index in range(3):
        assert torch.equal(head.draft_vocabulary(head.predicted(states)[:, index]), target.lm_head(states))


def test_settings_that_do_not_exist_are_named() -> None:
    facts = TargetFacts(name="toy", hidden_size=8, vocab_size=8, num_layers=2, fingerprint=[])
    with pytest.raises(BadInput, match=r"head 'medusa', setting 'depth'.*heads, layers, decay"):
        plan(find_kind("medusa"), facts, options={"depth": 2})
    assert plan(find_kind("bpd"), facts).aux_hidden_state_layers == (2,)
    assert plan(find_kind("medusa"), facts, options={"layers": 3}).layers == 3


# -------------------------------------------------------------------------------------------- beside the target


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", ["medusa", "two blocks", "bpd"])
def test_the_network_runs_as_it_was_trained(shape: str, precision: str) -> None:
    target = target_of("heads-of-16-alone", precision)
    head = head_of(shape, target)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 1:
                weight.normal_()
    states = torch.randn(5, target.hidden_size)
    found, expected = head.beside(target)(states), head.predicted(states)
    close = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.03}[precision]
    assert float((found - expected).abs().max()) < close * float(expected.abs().max())


def best_words(target: TableTarget, head: ParallelHeads, before: Seq[int]) -> Tensor:
    """(heads, words): each head's logits when the last committed token is the one after ``before``."""
    with torch.no_grad():
        found: Tensor = head.draft_vocabulary(head.predicted(target.table(tuple(before))[None])[0])
    return found


@pytest.mark.parametrize("shape", HEADS)
def test_every_draft_reads_the_state_of_the_token_before_the_last(shape: str) -> None:
    """Whatever was accepted in the round before: the first draft is made from the prompt's states alone."""
    target = toy(order=2)
    head = head_of(shape, target)
    drafter = HeadsDrafter(head, target, 1)
    prompt, committed = (3, 1, 4), [3, 1, 4]
    controller = Fixed(head.options.heads)
    method = Method("chain", drafter, build("pld", Context(target)).rule, controller)
    params = SamplingParams(temperature=1.0, seed=4)
    [generation] = decoded(target, [Request(prompt, method, params, max_new_tokens=200, trace=True)])
    lengths, drafted = set(), 0
    for one in generation.rounds:
        expected = head.draft_vocabulary.d2t[best_words(target, head, committed[:-1]).argmax(-1)].tolist()
        assert one.tree.tokens == expected[: len(one.tree)]  # what is too unlikely is left out
        lengths.add(len(one.path))
        drafted += len(one.tree)
        committed += one.committed
    assert len(lengths) > 1 and drafted > len(generation.rounds)


def test_a_prompt_of_one_token_has_no_state_before_it() -> None:
    target = toy()
    method = made(target, head_of("medusa", target), {"max_nodes": 4})
    [generation] = decoded(target, [Request((3,), method, max_new_tokens=10, trace=True)])
    assert [len(one.tree) > 0 for one in generation.rounds][:2] == [False, True]


# ----------------------------------------------------------------------------------------------- trees and chains


def drafted(drafter: HeadsDrafter, target: TableTarget, tokens: Seq[int], budget: Budget) -> TokenTree:
    [tree] = drafter.propose_batch([begun(drafter, target, tokens)], [budget])
    return tree


def begun(drafter: HeadsDrafter, target: TableTarget, tokens: Seq[int]) -> ParallelState:
    sequence = target.sequence(tokens)
    state = drafter.begin(sequence)
    target.prefill([sequence], drafter.aux_hidden_state_layers, lambda _, *shown: drafter.on_prefill(state, *shown))
    return state


def test_medusas_tree_holds_the_likeliest_combinations_first() -> None:
    target, head, _ = trained("medusa")
    tree = drafted(HeadsDrafter(head, target, 4), target, (3, 1), Budget(8, 10, 4))
    assert tree.is_deterministic and len(tree) == 10
    assert tree.path_acceptance_probs == sorted(tree.path_acceptance_probs, reverse=True)
    assert max(tree.depths) > 1 and len(tree.children(ROOT)) > 1
    ranked = head.draft_vocabulary.d2t[best_words(target, head, (3,)).argsort(-1, descending=True)].tolist()
    for node, token in enumerate(tree.tokens):
        assert token in ranked[tree.depths[node] - 1][:4]


def test_the_sparse_tree_goes_by_ranks_alone() -> None:
    target, head, _ = trained("medusa")
    trees = [
        drafted(HeadsDrafter(head, target, 4, by_rank=True), target, prompt, Budget(8, 9, 4))
        for prompt in ((3, 1), (5, 2), (0, 2))
    ]
    assert trees[0].parents == trees[1].parents == trees[2].parents
    assert len({tuple(tree.tokens) for tree in trees}) == 3
    first = rank_prior((0, 0)), rank_prior((0, 1)), rank_prior((0, 0)) * rank_prior((1, 0))
    assert {round(one, 6) for one in first} <= {round(one, 6) for one in trees[0].path_acceptance_probs}
    dynamic = {
        tuple(drafted(HeadsDrafter(head, target, 4), target, prompt, Budget(8, 9, 4)).parents)
        for prompt in ((3, 1), (5, 2), (0, 2))
    }
    assert len(dynamic) > 1


def test_few_words_are_all_that_is_drafted() -> None:
    target = toy()
    tree = drafted(HeadsDrafter(head_of("few words", target), target, 12), target, (3, 1), Budget(2, 60, 12))
    assert set(tree.tokens) <= set(range(5, 12))
    assert len(set(tree.tokens)) > 1


def test_what_is_dear_is_not_drafted() -> None:
    target = toy()
    dear = Budget(8, 8, 4, relative_costs=(1.0, *(3.0 + n for n in range(8))))
    assert len(drafted(HeadsDrafter(head_of("medusa", target), target, 4), target, (3, 1), dear)) == 0


# ------------------------------------------------------------------------------------------------------ exactness

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"max_nodes": 5, "topk": 3}),
    "by costs": ("medusa", {}),
    "sparse": ("medusa", {"max_nodes": 5, "topk": 3, "tree": "sparse"}),
    "bpd": ("bpd", {"num_draft_tokens": 3}),
}


@pytest.mark.parametrize("name", METHODS)
def test_greedy_answers_are_plain_decodings(name: str) -> None:
    kind, settings = METHODS[name]
    target, head, _ = trained(kind)
    method, plain = made(target, head, settings), build("none", Context(target))
    for prompt in ((1, 2), (7,), (3, 3, 3)):
        [one] = decoded(target, [Request(prompt, plain, max_new_tokens=50)])
        [other] = decoded(target, [Request(prompt, method, max_new_tokens=50)])
        assert one.tokens == other.tokens
        assert other.metrics.accepted > (0 if name == "by costs" else 10)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("medusa", {"max_nodes": 3, "topk": 2}),
        ("two blocks", {"max_nodes": 3, "topk": 2, "tree": "sparse"}),
        ("bpd", {"num_draft_tokens": 2}),
        ("low rank", {"max_nodes": 2, "topk": 2}),
        ("few words", {"max_nodes": 3, "topk": 2}),
    ],
)
def test_sampled_answers_have_plain_decodings_law(shape: str, settings: dict[str, Any]) -> None:
    target = TableTarget(3, random_table(3, 5))
    changes = {"few words": {"vocabulary": 2}, "low rank": {"rank": 2}}.get(shape, HEADS[shape])
    head = random_head(["bpd" if shape == "bpd" else "medusa"], target, seed=1, **changes)
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, repetition_penalty=1.3)):
        requests = [Request((0, 1), made(target, head, settings), params, max_new_tokens=4)]
        proposal_distribution = {outputs[0]: weight for outputs, weight in whole_law(target, requests).items()}
        assert distance(proposal_distribution, autoregressive_distribution(target.table, params, (0, 1), 4)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_requests_draft_side_by_side_as_they_do_alone(kind: str) -> None:
    target, head, _ = trained(kind)
    requests = [
        Request(
            prompt,
            made(target, head, {"max_nodes": 5} if kind == "medusa" else {"num_draft_tokens": 3}),
            params,
            trace=True,
        )
        for prompt, params in (
            ((1, 2), SamplingParams()),
            ((7,), SamplingParams(temperature=1.0, seed=3)),
            ((3, 3, 3, 5), SamplingParams(temperature=0.8, seed=9)),
        )
    ]
    method = requests[0].method
    requests = [Request(one.prompt, method, one.params, max_new_tokens=30, trace=True) for one in requests]
    alone = [decoded(target, [one])[0] for one in requests]
    together = decoded(target, requests)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert [(r.tree.tokens, r.tree.parents) for r in one.rounds] == [
            (r.tree.tokens, r.tree.parents) for r in other.rounds
        ]


# ------------------------------------------------------------------------------------------ a drafter among others


class ByHand:
    """A request, its drafter, and rounds by hand."""

    def __init__(self, tokens: Seq[int] = (3, 1, 4)) -> None:
        self.target = toy(order=2)
        self.head = head_of("medusa", self.target)
        self.drafter = HeadsDrafter(self.head, self.target, 1)
        self.state = begun(self.drafter, self.target, tokens)
        self.sequence = self.state.sequence

    def proposed(self) -> list[int]:
        return self.drafter.propose_batch([self.state], [Budget(4, 4)])[0].tokens[:2]

    def expected(self) -> list[int]:
        before = self.sequence.tokens[:-1]
        best: list[int] = self.head.draft_vocabulary.d2t[best_words(self.target, self.head, before).argmax(-1)].tolist()
        return best[:2]

    def round(self, tree: TokenTree, path: tuple[int, ...], token: int, cut: int | None = None) -> None:
        scores = self.target.score([(self.sequence, tree)], self.drafter.aux_hidden_state_layers)
        committed = [*(tree.tokens[node] for node in path), token][:cut]
        self.target.commit(scores, [path[: len(committed) - 1]])
        self.sequence.tokens += committed
        self.drafter.observe(self.state, Verdict(path, token, scores[0], tuple(committed)))


def others() -> TokenTree:
    """A tree that this drafter did not propose; the path taken through it is 2, 0, 5."""
    tree = TokenTree()
    right = tree.add(ROOT, 9), tree.add(ROOT, 2)
    tree.add(right[0], 7)
    below = tree.add(right[1], 0)
    tree.add(right[1], 8)
    tree.add(below, 5)
    return tree


@pytest.mark.parametrize("proposes", [True, False])
def test_rounds_of_other_drafters_are_followed(proposes: bool) -> None:
    """Also those in which it was not asked."""
    here = ByHand()
    for _ in range(3):
        if proposes:
            assert here.proposed() == here.expected()
        here.round(others(), (1, 3, 5), 6)
        here.round(others(), (1,), 3)
        here.round(TokenTree(), (), 4)
    assert here.proposed() == here.expected()


def test_an_answer_that_was_cut_short_leaves_no_states_of_what_was_cut() -> None:
    here = ByHand()
    here.round(others(), (1, 3, 5), 6, cut=2)
    assert here.sequence.tokens == [3, 1, 4, 2, 0]
    assert here.proposed() == here.expected()


def test_after_a_rewind_it_waits_for_the_next_state() -> None:
    here = ByHand()
    here.round(others(), (1, 3, 5), 6)
    del here.sequence.tokens[-2:]
    here.state = here.drafter.rewind(here.state, here.sequence, len(here.sequence.tokens))
    here.sequence.kv = here.target.truncate(here.sequence.kv, len(here.sequence.tokens) - 1)
    assert here.proposed() == []
    here.round(others(), (1, 3, 5), 6)
    assert here.proposed() == here.expected()
