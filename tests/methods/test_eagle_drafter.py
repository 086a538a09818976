"""The EAGLE family's methods: exact laws, greedy identity, state in step with requests whatever befalls them."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_support import Written, head_of, method_of, table, true_states
from outpace.acceptance.base import Verdict
from outpace.controllers.base import Budget
from outpace.controllers.fixed import Fixed
from outpace.core.sampling import SamplingParams
from outpace.core.tree import ROOT, TokenTree
from outpace.drafting import dynamic_tree as feature_growth
from outpace.drafting.calibration import Calibration
from outpace.drafting.dynamic_tree import CENTRES, EDGES, DynamicTree, by_confidence, by_rank
from outpace.engine.decoder import Decoder
from outpace.engine.method import Method
from outpace.engine.request import Generation, Request
from outpace.heads import committed_rows, feature_drafter
from outpace.heads.feature_drafter import FeatureDrafter, FeatureState
from outpace.methods.none import NoDraft
from outpace.methods.registry import Context, build
from outpace.targets.base import Target
from outpace.targets.costs import FixedCosts
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.hf import HFTarget
from outpace.targets.table import TableTarget, random_table
from support import NeverTwice, Path, autoregressive_distribution, distance, whole_law
from target_suite import tiny_model
from weights_support import with_head

NAMES = ("eagle", "eagle2", "eagle3")
PARAMS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=1.0, top_k=2),
    "frequency penalty": SamplingParams(temperature=1.0, frequency_penalty=0.9, presence_penalty=0.4),
    "processor": SamplingParams(temperature=1.0, processors=(NeverTwice(),)),
}
MODES: dict[str, dict[str, Any]] = {
    "tree": {"mode": "tree", "max_nodes": 3, "depth": 2, "topk": 2},
    "tree by costs": {"mode": "tree"},
    "likeliest chain": {"mode": "tree", "max_nodes": 2, "depth": 2, "topk": 1},
    "mixed": {"max_nodes": 3, "depth": 2, "topk": 2},
    "mixed, wider": {"max_nodes": 5, "depth": 2, "topk": 3},
    "mixed, noise shared with the rule": {"rule": "gumbel-coupling", "max_nodes": 2, "depth": 2, "topk": 2},
    "mixed chain": {"max_nodes": 2, "depth": 2, "topk": 1},
    "by costs": {},
    "sampled": {"mode": "sampled", "branching": (2, 1)},
    "chain": {"mode": "chain", "depth": 2},
    "careful chain": {"mode": "chain", "depth": 2, "confidence": 0.5},
}

# --------------------------------------------------------------------------------------------------- exactness


def law_error(name: str, mode: str, params: SamplingParams, vocabulary: int, prompt: Path = (0, 2)) -> float:
    proposal_distribution = random_table(3, 1, sharpness=1.0)
    target = TableTarget(3, proposal_distribution)
    method = method_of(name, target, vocabulary, **MODES[mode])
    found = whole_law(target, [Request(prompt, method, params, max_new_tokens=3)])
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    return distance(
        {output: weight for (output,), weight in found.items()},
        autoregressive_distribution(proposal_distribution, params, prompt, 3),
    )


CASES = [
    *((mode, "temperature 1", 2) for mode in MODES),
    *((mode, params, 3) for mode in ("sampled", "chain", "mixed") for params in ("top-k", "processor")),
    ("chain", "frequency penalty", 3),
]


@pytest.mark.parametrize(("mode", "params", "vocabulary"), CASES)
def test_every_mode_keeps_the_law(mode: str, params: str, vocabulary: int) -> None:
    assert law_error("eagle3", mode, PARAMS[params], vocabulary) < 1e-6


@pytest.mark.parametrize(("name", "mode"), [("eagle", "tree"), ("eagle2", "sampled")])
def test_heads_that_foretell_features_keep_the_law(name: str, mode: str) -> None:
    assert law_error(name, mode, PARAMS["temperature 1"], 2) < 1e-6


def test_a_prompt_of_one_token_keeps_the_law() -> None:
    assert law_error("eagle3", "sampled", PARAMS["temperature 1"], 3, prompt=(1,)) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_samples_come_with_the_rows_that_they_were_drawn_from(name: str) -> None:
    """The chain's rows are the written network's distribution over its words, under the request's own sampler."""
    target, tokens = table(12), [3, 1, 4, 1, 5]
    params = SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=5)
    head = head_of("eagle3" if name == "eagle3" else "eagle", target, 9)
    made = build(name, with_head(target, head), {"mode": "chain", "depth": 3})
    [tree] = made.drafter.propose_batch([started(made, target, tokens, params)], [Budget(3)])
    assert len(tree) == 3
    written = Written(head, target)
    fused = written.fused(true_states(target, tokens, head.config.aux_hidden_state_layers))
    rows = written.rows(tokens, fused[:-1], tree.tokens[:2])
    for at, logits in enumerate(rows):
        whole = torch.full((12,), -torch.inf)
        whole[head.draft_vocabulary.d2t] = logits
        naive = autoregressive_distribution(lambda _, whole=whole: whole, params, (*tokens, *tree.tokens[:at]), 1)  # type: ignore[misc]
        right = torch.tensor([naive.get((token,), 0.0) for token in range(12)])
        torch.testing.assert_close(tree.q_rows[at].dense(12), right, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------- greedy, in batches


def answers(target: Target, method: Method, prompts: Seq[Seq[int]], new: int = 16) -> list[list[int]]:
    """Each prompt decoded alone."""
    found = []
    for prompt in prompts:
        decoder = Decoder(target)
        one = decoder.submit(Request(tuple(prompt), method, max_new_tokens=new))
        decoder.run()
        found.append(one.tokens)
    return found


def watched(method: Method) -> list[Any]:
    """The K/V that a method's head holds, kept up to date from now on."""
    drafter: Any = method.drafter
    [part] = [one for one in getattr(drafter, "parts", (drafter,)) if isinstance(one, FeatureDrafter)]
    runner, held = part.net.runner, list[Any]()
    opened, closed = runner.open, runner.close
    runner.open = lambda: held.append(1) or opened()  # type: ignore[func-returns-value, method-assign]
    runner.close = lambda kv: held.pop() and closed(kv)  # type: ignore[method-assign]
    return held


@pytest.fixture(scope="module", params=["table", "dense", "generic"])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "table":
        return table(12)
    model = tiny_model("llama")
    return DenseTarget(read_decoder_spec(model)) if request.param == "dense" else HFTarget(model)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_plain_decodings_in_a_batch_that_changes(target: Target, name: str) -> None:
    rng = random.Random(1)
    plain = build("none", Context(target))
    made = [plain, *(method_of(name, target, target.vocab_size - 2, **MODES[mode]) for mode in ("tree", "by costs"))]
    made.append(method_of(name, target, **MODES["sampled"]))
    prompts = [[rng.randrange(target.vocab_size) for _ in range(rng.choice([1, 2, 9, 30]))] for _ in range(8)]
    right = answers(target, plain, prompts)
    held = [watched(method) for method in made[1:]]
    decoder, running = Decoder(target), []
    for at, prompt in enumerate(prompts):
        running.append(decoder.submit(Request(tuple(prompt), made[at % 4], max_new_tokens=16)))
        decoder.step()
    decoder.run()
    assert [one.tokens for one in running] == right
    assert sum(one.metrics.drafted for one in running) > 30
    assert held == [[], [], []], "K/V are released with their requests"


def rounds_of(target: Target, method: Method, prompts: Seq[Seq[int]], together: bool) -> list[list[list[int]]]:
    """Tokens of every tree that was proposed, by request."""
    decoder = Decoder(target)
    running: list[Generation] = []
    for prompt in prompts:
        params = SamplingParams(temperature=1.0, seed=10 + len(running))
        running.append(decoder.submit(Request(tuple(prompt), method, params, max_new_tokens=10, trace=True)))
        if not together:
            decoder.run()
    decoder.run()
    return [[one.tree.tokens for one in each.rounds] for each in running]


@pytest.mark.parametrize("mode", ["tree", "by costs", "sampled", "chain"])
def test_a_batch_drafts_what_each_would_alone(target: Target, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(target.__dict__, "costs", FixedCosts())  # measured ones depend on the batch
    method = method_of("eagle3", target, **MODES[mode])
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8], [9, 7, 9, 3, 2, 3, 8]]
    assert rounds_of(target, method, prompts, True) == rounds_of(target, method, prompts, False)


def test_a_head_that_knows_the_target_is_accepted() -> None:
    """The target's next token is a function of the last, and the head is made to know it."""
    target = TableTarget(
        12, lambda path: 9.0 * torch.nn.functional.one_hot(torch.tensor((path[-1] * 5 + 3) % 12), 12).float()
    )
    head = knowing(target)
    method = build("eagle2", with_head(target, head), {"max_nodes": 6, "depth": 3, "topk": 3})
    decoder = Decoder(target)
    one = decoder.submit(Request((1, 2), method, max_new_tokens=40))
    decoder.run()
    assert one.metrics.accepted / one.metrics.rounds > 2.0


def knowing(target: Target) -> Any:
    """An ``eagle`` head whose joint turns an embedding into the logits after it, and whose layer adds nothing."""
    head = head_of("eagle", target)
    for weight in head.parameters():
        weight.data.zero_()
    for token in range(12):
        head.fc.weight.data[(token * 5 + 3) % 12, token] = 9.0
    return head


# ------------------------------------------------------------------------------------- what befalls a request


def started(method: Method, target: Target, tokens: Seq[int], params: SamplingParams | None = None) -> FeatureState:
    state: FeatureState = method.drafter.begin(target.sequence(tokens, params))
    prefilled(method, target, state)
    return state


def prefilled(method: Method, target: Target, state: FeatureState) -> None:
    drafter = method.drafter
    target.prefill(
        [state.sequence], drafter.aux_hidden_state_layers, lambda _, *shown: drafter.on_prefill(state, *shown)
    )


def told(method: Method, target: Target, state: FeatureState, tree: TokenTree, path: Seq[int], token: int) -> None:
    """A round in which ``tree``, whoever drafted it, was scored, and ``path`` and ``token`` committed."""
    scores = target.score([(state.sequence, tree)], method.drafter.aux_hidden_state_layers)
    target.commit(scores, [list(path)])
    committed = (*(tree.tokens[node] for node in path), token)
    state.sequence.tokens += committed
    method.drafter.observe(state, Verdict(tuple(path), token, scores[0], committed))


def fresh_draft(name: str, target: Target, tokens: Seq[int]) -> TokenTree:
    """What a drafter says that was given all tokens as a prompt."""
    method = method_of(name, target, **MODES["tree"])
    [tree] = method.drafter.propose_batch([started(method, target, tokens)], [Budget(2, 3, 2)])
    return tree


def same(one: TokenTree, other: TokenTree) -> None:
    """The same tokens; estimates have learned meanwhile."""
    assert {tuple(one.path_tokens(node)) for node in range(len(one))} == {
        tuple(other.path_tokens(node)) for node in range(len(other))
    }


@pytest.mark.parametrize("name", ["eagle2", "eagle3"])
def test_rounds_of_others_keep_it_in_step(target: Target, name: str) -> None:
    """It was not asked, or another's tree was scored: later drafts are those of a drafter that saw the whole text."""
    method = method_of(name, target, **MODES["tree"])
    state = started(method, target, [3, 1, 4, 1, 5])
    tree = TokenTree()
    first = tree.add(ROOT, 9)
    tree.add(ROOT, 7)
    second = tree.add(first, 2)
    tree.add(first, 6)
    third = tree.add(second, 8)
    told(method, target, state, tree, (first, second, third), 6)
    told(method, target, state, TokenTree(), (), 11)
    method.drafter.propose_batch([state], [Budget(2, 3, 2)])
    told(method, target, state, TokenTree.chain([4, 4]), (0,), 2)
    assert state.sequence.tokens == [3, 1, 4, 1, 5, 9, 2, 8, 6, 11, 4, 2]
    drafter = method.drafter
    state.calibration = Calibration(by_confidence)  # the rates of a fresh one
    [tree] = drafter.propose_batch([state], [Budget(2, 3, 2)])
    same(tree, fresh_draft(name, target, state.sequence.tokens))


def test_proposing_again_proposes_the_same(target: Target) -> None:
    method = method_of("eagle3", target, **MODES["tree"])
    state = started(method, target, [3, 1, 4, 1, 5])
    first = method.drafter.propose_batch([state], [Budget(2, 3, 2)])[0]
    assert len(method.drafter.propose_batch([state], [Budget(0)])[0]) == 0
    again = method.drafter.propose_batch([state], [Budget(2, 3, 2)])[0]
    assert (first.tokens, first.parents) == (again.tokens, again.parents)
    assert len(first) == 3


@pytest.mark.parametrize("kept", [12, 11, 10, 6, 1])
def test_a_rewound_request_drafts_as_one_that_began_there(target: Target, kept: int) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    method = method_of("eagle3", target, **MODES["tree"])
    drafter, held = method.drafter, watched(method)
    for after in ([], [7], [7, 10, 0]):
        state = started(method, target, tokens)
        drafter.propose_batch([state], [Budget(2, 3, 2)])
        state.sequence.tokens[kept:] = after
        if target.length(state.sequence.kv) > (rows := min(kept, len(state.sequence.tokens) - 1)):
            state.sequence.kv = target.truncate(state.sequence.kv, rows)
        state = drafter.rewind(state, state.sequence, kept)
        prefilled(method, target, state)
        [tree] = drafter.propose_batch([state], [Budget(2, 3, 2)])
        same(tree, fresh_draft("eagle3", target, state.sequence.tokens))
        drafter.end(state)
    assert not held


def test_a_request_that_is_rewound_far_begins_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of long ago are forgotten: no draft in the next round, then drafts from what is known."""
    monkeypatch.setattr(committed_rows, "RECENT", 2)
    target = table(12)
    method = method_of("eagle3", target, **MODES["tree"])
    drafter = method.drafter
    state = started(method, target, [at % 12 for at in range(20)])
    drafter.propose_batch([state], [Budget(2, 3, 2)])
    del state.sequence.tokens[6:]
    state.sequence.kv = target.truncate(state.sequence.kv, 5)
    state = drafter.rewind(state, state.sequence, 6)
    assert len(drafter.propose_batch([state], [Budget(2, 3, 2)])[0]) == 0
    told(method, target, state, TokenTree(), (), 7)
    assert len(drafter.propose_batch([state], [Budget(2, 3, 2)])[0]) == 3
    told(method, target, state, TokenTree(), (), 3)
    assert len(drafter.propose_batch([state], [Budget(2, 3, 2)])[0]) == 3


def test_states_are_kept_until_they_are_rows_and_not_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_rows, "CHUNK", 16)
    monkeypatch.setattr(feature_drafter, "CHUNK", 16)
    monkeypatch.setattr(committed_rows, "RECENT", 4)
    monkeypatch.setattr(feature_drafter, "_WAITING", 0)
    monkeypatch.setattr(feature_drafter, "_UNREAD", 16)
    target = table(12)
    method = method_of("eagle3", target, **MODES["tree"])
    drafter = method.drafter
    tokens = [(at * at + 3) % 12 for at in range(120)]
    state = started(method, target, tokens)
    for at in range(60):  # never asked
        told(method, target, state, TokenTree(), (), at % 12)
        assert len(state.hidden) <= 16 + 2 * 4 + 1
    [tree] = drafter.propose_batch([state], [Budget(2, 3, 2)])
    assert len(state.hidden) <= 2 * 4
    monkeypatch.undo()
    same(tree, fresh_draft("eagle3", target, state.sequence.tokens))


@pytest.mark.parametrize("name", ["merge", "cascade"])
def test_it_drafts_beside_others(name: str) -> None:
    target = table(12)
    head = head_of("eagle3", target)
    context = with_head(target, head)
    settings = {"parts": ("pld", "eagle3"), "settings": {"eagle3": MODES["tree"], "pld": {"num_draft_tokens": 3}}}
    combined, plain = build(name, context, settings), build("none", context)
    held = watched(combined)
    prompts = [[1, 2, 1, 2, 1], [7], [3, 3, 3]]
    assert answers(target, combined, prompts) == answers(target, plain, prompts)
    assert not held
    proposal_distribution = random_table(3, 1, sharpness=1.0)
    small = TableTarget(3, proposal_distribution)
    head = head_of("eagle3", small, 2)
    settings["settings"] = {"eagle3": MODES["chain"], "pld": {"num_draft_tokens": 1}}
    combined = build(name, with_head(small, head), settings)
    params = SamplingParams(temperature=1.0)
    found = whole_law(small, [Request((0, 0), combined, params, max_new_tokens=3)])
    assert (
        distance(
            {out: weight for (out,), weight in found.items()},
            autoregressive_distribution(proposal_distribution, params, (0, 0), 3),
        )
        < 1e-6
    )


# ------------------------------------------------------------------------------------------------ growing paths


def grown(budget: Budget, rows: Any, **settings: Any) -> tuple[DynamicTree, list[list[tuple[int, int]]]]:
    """A draft over six words (ids 10 to 15) whose logits after a path of words are ``rows(path)``; what was run."""
    paths = DynamicTree(
        budget, Calibration(by_confidence if settings.get("confident", True) else by_rank), range(10, 16), **settings
    )
    known: list[tuple[int, ...]] = [()]
    asked: list[tuple[int, ...]] = [()]
    levels = []
    while asked:
        wanted = paths.take(torch.stack([rows(path) for path in asked]))
        asked = [(*known[row], token - 10) for row, token in wanted]
        known += asked
        levels.append(wanted)
    return paths, levels


def words(path: tuple[int, ...]) -> Tensor:
    return random_table(6, 4, order=2, sharpness=1.5)(path)


def best_paths(depth: int, width: int) -> list[tuple[float, tuple[int, ...]]]:
    """All paths of the likeliest ``width`` words a node, by probability."""
    level: dict[tuple[int, ...], float] = {(): 1.0}
    found: dict[tuple[int, ...], float] = {}
    for _ in range(depth):
        level = {
            (*path, word): before * float(p)
            for path, before in level.items()
            for p, word in zip(*map(Tensor.tolist, words(path).softmax(-1).topk(width)), strict=True)
        }
        found |= level
    return sorted(((p, path) for path, p in found.items()), reverse=True)


@pytest.mark.parametrize(("depth", "width", "nodes"), [(1, 3, 9), (2, 2, 4), (3, 3, 9), (4, 2, 6)])
def test_the_most_probable_paths_are_drafted(depth: int, width: int, nodes: int) -> None:
    paths, _ = grown(Budget(depth, nodes, width), words, expand=64)
    tree = paths.tree()
    right = best_paths(depth, width)[:nodes]
    assert {tuple(token - 10 for token in tree.path_tokens(node)) for node in range(len(tree))} == {p for _, p in right}
    assert tree.path_acceptance_probs == sorted(tree.path_acceptance_probs, reverse=True)
    assert tree.path_acceptance_probs == pytest.approx([p for p, _ in right], rel=1e-4)


def test_a_level_runs_few_nodes_and_passed_over_ones_come_later() -> None:
    paths, levels = grown(Budget(3, 12, 3), words, expand=2)
    assert [len(level) for level in levels[:3]] == [2, 2, 2]
    assert len(paths.tree()) == 12


def test_temperature_flattens_what_is_promised() -> None:
    cold, _ = grown(Budget(1, 6, 6), words, inverse_temperature=1.0)
    warm, _ = grown(Budget(1, 6, 6), words, inverse_temperature=0.5)
    right = (0.5 * words(())).softmax(-1).sort(descending=True).values.tolist()
    assert warm.tree().path_acceptance_probs == pytest.approx(right, rel=1e-4)
    assert cold.tree().path_acceptance_probs[0] > warm.tree().path_acceptance_probs[0]


def certain(path: tuple[int, ...]) -> Tensor:
    return torch.tensor([8.0, 0, 0, 0, 0, 0])


def test_drafts_end_where_they_do_not_pay() -> None:
    cheap = tuple(1.0 + 0.01 * count for count in range(9))
    dear = tuple(1.0 + 0.9 * count for count in range(9))
    paths, levels = grown(Budget(8, 8, 3, relative_costs=cheap), certain, level=0.01)
    assert max(paths.tree().depths) == 8
    paths, levels = grown(Budget(8, 8, 3, relative_costs=dear), certain, level=0.01)
    assert len(levels) <= 2
    assert len(paths.tree()) <= 1
    _, levels = grown(Budget(8, 8, 3, relative_costs=cheap), certain, level=5.0)
    assert levels == [[]], "a level that costs more than it can bring is not run"
    unsure, levels = grown(Budget(8, 8, 3, relative_costs=dear), lambda path: torch.zeros(6), level=0.01)
    assert levels == [[]]
    assert len(unsure.tree()) == 0


def test_a_threshold_stops_where_the_drafter_is_unsure() -> None:
    def rows(path: tuple[int, ...]) -> Tensor:
        return certain(path) if len(path) < 2 else torch.zeros(6)

    paths, _ = grown(Budget(6, 8, 1, confidence=0.9), rows)
    assert paths.tree().tokens == [10, 10]


def test_rates_are_learned_by_what_was_committed() -> None:
    rates = Calibration(by_confidence)
    for _ in range(40):
        paths = DynamicTree(Budget(2, 4, 2), rates, range(10, 16), expand=2)
        wanted = paths.take(certain(())[None])
        paths.take(torch.stack([certain(())] * len(wanted)))
        before = paths.tree().path_acceptance_probs[0]
        paths.learn([11, 10])  # never what it is sure of
    assert before < 0.4
    ranks = Calibration(by_rank)
    for _ in range(40):
        paths = DynamicTree(Budget(1, 4, 3), ranks, range(10, 16), confident=False)
        paths.take(torch.tensor([[3.0, 2.0, 1.0, 0.0, 0.0, 0.0]]))
        paths.learn([12])
    order = paths.tree().tokens
    assert order[0] == 12, "by rank it is the third that comes"


def test_a_fixed_shape_does_not_look_at_probabilities() -> None:
    sure, _ = grown(Budget(3, 8, 3), certain, confident=False)
    unsure, _ = grown(Budget(3, 8, 3), lambda path: torch.arange(6.0).flip(0) * 0.01, confident=False)
    assert sure.tree().parents == unsure.tree().parents


def test_kinds_lie_between_their_edges() -> None:
    assert len(CENTRES) == len(EDGES) + 1
    for low, centre, high in zip((0.0, *EDGES), CENTRES, (*EDGES, 1.0), strict=True):
        assert low < centre < high
    assert feature_growth.by_rank((1, 99)) == feature_growth.RANKS[-1]


def test_a_forward_serves_a_whole_batch() -> None:
    """Catching up and every level are one forward each, however many requests there are."""
    target = table(12)
    method = method_of("eagle3", target, max_nodes=4, depth=2, topk=2)
    drafter: Any = method.drafter
    states = [started(method, target, tokens) for tokens in ([3, 1, 4], [5, 9, 2, 6, 5], [3, 5, 8, 9])]
    calls: list[int] = []
    run = drafter.net.runner.run
    drafter.net.runner.run = lambda batch, **more: calls.append(len(batch)) or run(batch, **more)  # type: ignore[func-returns-value]
    drafter.propose_batch(states, [Budget(2, 4, 2)] * 3)
    assert calls == [3, 3]


def test_plain_decoding_reads_no_states() -> None:
    assert NoDraft().aux_hidden_state_layers == ()
    assert method_of("eagle3", table(12)).drafter.aux_hidden_state_layers


# ------------------------------------------------------------------------------------------------ long texts


def first_draft(target: Target, tokens: Seq[int], recent_tokens: int | None) -> tuple[FeatureState, TokenTree]:
    """Of a request whose text is ``tokens``, from its K/V rows on."""
    made = method_of("eagle3", target, target.vocab_size - 2, mode="tree", max_nodes=6, recent_tokens=recent_tokens)
    decoder = Decoder(target)
    one = decoder.submit(Request(tuple(tokens), made, max_new_tokens=8, trace=True))
    decoder.step()
    state = one.draft_state
    assert isinstance(state, FeatureState)
    return state, one.rounds[0].tree


def test_of_a_long_text_the_newest_tokens_alone_are_read() -> None:
    """The states of this target follow from the last tokens, so what comes long before cannot matter."""
    target, tail = table(12), [3, 1, 4, 1, 5, 9, 2, 6]
    one, other = [1, 2, 8] * 20 + tail, [7, 3, 5] * 20 + tail
    read, drafted = first_draft(target, one, 4)
    assert read.first == len(one) - 1 - 4 and read.known == len(one) - 1
    assert drafted and drafted == first_draft(target, other, 4)[1]
    whole, all_read = first_draft(target, one, None)
    assert whole.first == 0
    assert all_read.path_acceptance_probs != first_draft(target, other, None)[1].path_acceptance_probs
    assert first_draft(target, tail, 64)[0].first == 0, "a short text is read whole"


def test_answers_stay_the_same_where_a_head_skips_what_came_between_two_drafts(target: Target) -> None:
    made = method_of("eagle3", target, target.vocab_size - 2, mode="tree", max_nodes=4, recent_tokens=3)
    prompt = [index * 5 % target.vocab_size for index in range(40)]
    plain = answers(target, build("none", Context(target)), [prompt], 24)[0]
    decoder = Decoder(target)
    one = decoder.submit(Request(tuple(prompt), made, max_new_tokens=24))
    asked = made.drafter.propose_batch
    turns = count()
    made.drafter.propose_batch = lambda states, budgets: (  # type: ignore[method-assign]
        [TokenTree() for _ in states] if next(turns) % 8 else asked(states, budgets)
    )
    firsts = set[int]()
    while decoder.step():
        if one.finish_reason is None:
            firsts.add(one.draft_state.first)
    assert one.tokens == plain and one.metrics.drafted > 0
    assert len(firsts) > 1, "it began anew after a pause"


def draft_after_a_pause(target: Target, *, left_out: bool) -> tuple[TokenTree, int]:
    """That of the seventeenth round, the first that has one, and how many rounds before came without hidden states:
    ``left_out``, those that are so far away that the head reads nothing of them."""
    made = method_of("eagle3", target, target.vocab_size - 2, mode="tree", max_nodes=4, recent_tokens=5)
    drafter, pause = made.drafter, 16
    asked, layers, turns = drafter.propose_batch, drafter.observed_layers, count()
    drafter.propose_batch = lambda states, budgets: (  # type: ignore[method-assign]
        [TokenTree() for _ in states] if next(turns) < pause else asked(states, budgets)
    )
    read = list[int]()

    def observed(states: Seq[FeatureState], idle: int) -> Seq[int]:
        found = layers(states, pause - len(states[0].sequence.tokens) + 40 - 1 if left_out else 0)
        read.append(len(found))
        return found

    drafter.observed_layers = observed  # type: ignore[method-assign]
    decoder = Decoder(target)
    prompt = [index * 5 % target.vocab_size for index in range(40)]
    one = decoder.submit(Request(tuple(prompt), made, max_new_tokens=24, trace=True))
    for _ in range(pause + 1):
        decoder.step()
    assert not any(rounds.tree for rounds in one.rounds[:pause])
    return one.rounds[pause].tree, sum(1 for layers in read if not layers)


def test_a_head_does_without_the_states_of_rounds_that_it_would_not_read() -> None:
    target = table(12)
    tree, nothing = draft_after_a_pause(target, left_out=False)
    assert nothing == 0
    same, without = draft_after_a_pause(target, left_out=True)
    assert tree and same == tree
    assert without == 16 - 5


def test_a_head_whose_last_states_are_missing_is_not_ready_until_the_next_round() -> None:
    target = table(12)
    made = method_of("eagle3", target, 10, mode="tree", max_nodes=6, recent_tokens=8)
    drafter = made.drafter
    assert isinstance(drafter, FeatureDrafter)
    layers = drafter.aux_hidden_state_layers
    observed = iter([layers, (), layers, layers])
    drafter.observed_layers = lambda states, idle: next(observed)  # type: ignore[method-assign]
    decoder = Decoder(target)
    one = decoder.submit(Request((1, 2, 3, 4), Method("toy", drafter, made.rule, Fixed(0)), max_new_tokens=8))
    ready = []
    for _ in range(4):
        decoder.step()
        ready.append(drafter.ready(one.draft_state))
    assert ready == [True, False, True, True]


def test_what_is_read_does_not_depend_on_how_a_prompt_was_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached beginning, or turns with other requests, cut it anywhere; a seed must repeat its drafts."""
    target, tokens = table(12), [index * 7 % 12 for index in range(60)]
    made = method_of("eagle3", target, 10, mode="tree", max_nodes=6, recent_tokens=8)
    drafter = made.drafter
    assert isinstance(drafter, FeatureDrafter)
    true = true_states(target, tokens, drafter.aux_hidden_state_layers)
    # Room for as many as are read, and for no more.
    monkeypatch.setattr(feature_drafter, "_WAITING", 8 * sum(rows[0].nbytes for rows in true.values()))
    drafted = []
    for pieces in ((59,), (20, 59), (50, 55, 59), tuple(range(1, 60))):
        state = drafter.begin(target.sequence(tokens))
        for start, stop in zip((0, *pieces), pieces, strict=False):
            drafter.on_prefill(state, start, {layer: rows[start:stop] for layer, rows in true.items()})
        [tree] = drafter.propose_batch([state], [Budget(3, 6, 3)])
        assert state.first == 51 and tree
        drafted.append(tree)
    assert all(tree == drafted[0] for tree in drafted)


def test_a_request_that_is_rewound_into_what_was_not_read_goes_on_from_there() -> None:
    target, tokens = table(12), [index * 7 % 12 for index in range(60)]
    made = method_of("eagle3", target, 10, mode="tree", max_nodes=6, recent_tokens=8)
    drafter = made.drafter
    assert isinstance(drafter, FeatureDrafter)
    true = true_states(target, tokens, drafter.aux_hidden_state_layers)
    state = drafter.begin(target.sequence(tokens))
    drafter.on_prefill(state, 0, {layer: rows[:51] for layer, rows in true.items()})
    for at in range(51, 59):  # rounds in which nobody asked
        state.unread.append(feature_drafter._Unread(at, true, range(at, at + 1)))
    state.sequence = shorter = target.sequence(tokens[:50])
    state = drafter.rewind(state, shorter, 50)
    assert state.known == 49 and state.complete
    [tree] = drafter.propose_batch([state], [Budget(3, 6, 3)])
    assert tree and state.first == 43
