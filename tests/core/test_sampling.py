"""The processed distribution against transformers' processors, plain definitions, and itself along a path."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outpace.core.errors import BadInput
from outpace.core.sampling import Sampler, SamplingParams
from outpace.core.token_distribution import warp
from outpace.core.tree import ROOT, TokenTree
from outpace.core.tree_distribution import TreeDistribution
from support import Alternate, BanAll, NeverTwice, reference_logits, reference_probs

VOCAB = 8
SMOOTH = st.floats(-12, 12, width=32)
TIED = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0])
LOGITS = st.one_of(
    st.lists(SMOOTH, min_size=VOCAB, max_size=VOCAB), st.lists(TIED, min_size=VOCAB, max_size=VOCAB)
).map(torch.tensor)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)
BIAS = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32), max_size=3)
TEMPERATURE = st.floats(0.2, 3.0)
TOP_K = st.integers(1, VOCAB + 2)
TOP_P = st.floats(0.05, 0.999)
MIN_P = st.floats(0.001, 1.0)
PENALTY = st.floats(0.3, 3.0)


@st.composite
def sampling(draw: st.DrawFn, greedy: bool = False) -> SamplingParams:
    """Any combination of parameters."""
    return SamplingParams(
        temperature=0.0 if greedy else draw(TEMPERATURE),
        top_k=draw(st.just(0) | TOP_K),
        top_p=draw(st.just(1.0) | TOP_P),
        min_p=draw(st.just(0.0) | MIN_P),
        repetition_penalty=draw(st.just(1.0) | PENALTY),
        presence_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        frequency_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        logit_bias=draw(BIAS),
        processors=draw(st.sampled_from([(), (NeverTwice(),), (Alternate(),)])),
    )


def at_root(params: SamplingParams, logits: Tensor, prompt: list[int], output: list[int]) -> TreeDistribution:
    sampler = Sampler(params, prompt, logits.shape[-1])
    sampler.extend(output)
    return TreeDistribution(sampler, TokenTree(), logits[None])


def theirs(params: SamplingParams, logits: Tensor, history: list[int]) -> Tensor:
    """transformers' processors, one after the other, in generate's order."""
    chain: list[Any] = []
    if params.logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    scores = logits[None].clone()
    for processor in chain:
        scores = processor(torch.tensor([history]), scores)
    row: Tensor = scores.softmax(-1)[0]
    return row


def assume_no_edge(params: SamplingParams, logits: Tensor, prompt: list[int], output: list[int]) -> None:
    """Skip inputs that decide a threshold by the last bit, or by the sort order of equal logits."""
    bare = dataclasses.replace(params, top_p=1.0, min_p=0.0)
    probs = np.sort(reference_probs(logits, bare, prompt, output))[::-1]
    if params.top_p < 1.0:
        mass = probs.cumsum()
        assume(bool((np.abs(mass - params.top_p) > 1e-5).all()))
        kept = int((mass < params.top_p).sum()) + 1
        assume(kept >= len(probs) or probs[kept - 1] - probs[kept] > 1e-7)
        probs = probs[:kept] / probs[:kept].sum()
    if params.min_p:
        floor = params.min_p * probs.max()
        assume(bool((np.abs(probs - floor) > 1e-6).all()) or params.min_p == 1.0)
        assume(params.min_p < 1.0 or bool((probs[1:] < floor - 1e-6).all()))
    if params.top_k:
        row = reference_logits(logits, bare, prompt, output)
        row = np.sort(row[np.isfinite(row)])[::-1]
        edge = row[: params.top_k][-1]
        assume(bool(((np.abs(row - edge) > 1e-5) | (row == edge)).all()))


@pytest.mark.parametrize(
    "one",
    [
        {"temperature": TEMPERATURE},
        {"temperature": st.just(1.0), "top_k": TOP_K},
        {"temperature": st.just(1.0), "top_p": TOP_P},
        {"temperature": st.just(1.0), "min_p": MIN_P},
        {"temperature": st.just(1.0), "repetition_penalty": PENALTY},
        {"temperature": st.just(1.0), "logit_bias": BIAS},
        {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P},
        {"temperature": TEMPERATURE, "repetition_penalty": PENALTY, "logit_bias": BIAS, "top_p": TOP_P, "top_k": TOP_K},
    ],
    ids="+".join,
)
@settings(max_examples=50)
@given(data=st.data(), logits=LOGITS, prompt=PROMPT, output=TOKENS)
def test_equals_transformers_processors(
    one: dict[str, Any], data: st.DataObject, logits: Tensor, prompt: list[int], output: list[int]
) -> None:
    params = SamplingParams(**{name: data.draw(values, label=name) for name, values in one.items()})
    assume_no_edge(params, logits, prompt, output)
    ours = at_root(params, logits, prompt, output).p(ROOT)
    torch.testing.assert_close(ours, theirs(params, logits, [*prompt, *output]), atol=1e-6, rtol=1e-5)


@given(sampling(), LOGITS, PROMPT, TOKENS)
def test_equals_the_definitions(params: SamplingParams, logits: Tensor, prompt: list[int], output: list[int]) -> None:
    assume_no_edge(params, logits, prompt, output)
    p = at_root(params, logits, prompt, output).p(ROOT)
    assert p.dtype == torch.float32
    assert float(p.sum()) == pytest.approx(1, abs=1e-6)
    assert p.tolist() == pytest.approx(reference_probs(logits, params, prompt, output).tolist(), abs=2e-6)


def test_order_is_that_of_transformers_generate() -> None:
    """Not our reading of generate, but generate: its raw and its processed logits, all processors on."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=1.0,
    )
    model = LlamaForCausalLM(config).eval()
    bias = {3: 2.0, 5: -4.0, 7: 1.5}
    config_of_generate = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_k=9,
        top_p=0.9,
        min_p=0.03,
        repetition_penalty=1.4,
        sequence_bias=[[[token], value] for token, value in bias.items()],
        max_new_tokens=12,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    prompt = [1, 4, 3]
    out = model.generate(torch.tensor([prompt]), generation_config=config_of_generate)
    output = out.sequences[0, len(prompt) :].tolist()
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.03, repetition_penalty=1.4, logit_bias=bias)
    for step in range(len(output)):
        ours = at_root(params, out.logits[step][0], prompt, output[:step]).p(ROOT)
        torch.testing.assert_close(ours, out.scores[step][0].softmax(-1), atol=1e-6, rtol=1e-5)


@given(LOGITS, PROMPT, TOKENS, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalties_count_the_output_alone(
    logits: Tensor, prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    """OpenAI: mu[j] - c[j] * frequency - float(c[j] > 0) * presence, c over what was generated."""
    params = SamplingParams(temperature=1.0, presence_penalty=presence, frequency_penalty=frequency)
    expected = [
        value - output.count(token) * frequency - float(output.count(token) > 0) * presence
        for token, value in enumerate(logits.tolist())
    ]
    ours = at_root(params, logits, prompt, output)
    assert ours.processed([ROOT])[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_penalties_count_the_output_and_the_path_together() -> None:
    params = SamplingParams(1.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    sampler = Sampler(params, [0], 5)
    sampler.extend([1, 1, 2])
    tree = TokenTree.chain([1, 3, 3])
    rows = TreeDistribution(sampler, tree, torch.full((4, 5), 8.0)).processed([ROOT, 0, 1, 2])
    seen = 4.0 - 0.5
    assert rows.tolist() == [
        [4.0, seen - 0.5, seen - 0.25, 8.0, 8.0],
        [4.0, seen - 0.75, seen - 0.25, 8.0, 8.0],
        [4.0, seen - 0.75, seen - 0.25, seen - 0.25, 8.0],
        [4.0, seen - 0.75, seen - 0.25, seen - 0.5, 8.0],
    ]


@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_a_node_sees_its_path(data: st.DataObject, greedy: bool) -> None:
    """The distribution at a node is that of a fresh sampler whose output was extended by the path."""
    params = data.draw(sampling(greedy))
    prompt, output = data.draw(PROMPT), data.draw(TOKENS)
    tree = TokenTree()
    for _ in range(data.draw(st.integers(0, 6))):
        tree.add(data.draw(st.integers(ROOT, len(tree) - 1)), data.draw(st.integers(0, VOCAB - 1)))
    logits = torch.randn(1 + len(tree), VOCAB, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    sampler = Sampler(params, prompt, VOCAB)
    sampler.extend(output)
    at_nodes = TreeDistribution(sampler, tree, logits)
    order = data.draw(st.permutations(range(ROOT, len(tree))))
    if data.draw(st.booleans()):
        at_nodes.ensure(order)
    for node in order:
        path = tree.path_tokens(node)
        fresh = at_root(params, logits[node + 1], prompt, [*output, *path])
        assert torch.equal(at_nodes.p(node), fresh.p(ROOT))
        assert at_nodes.argmax(node) == fresh.argmax(ROOT)
        forked = sampler.fork()
        forked.extend(path)
        assert torch.equal(TreeDistribution(forked, TokenTree(), logits[node + 1][None]).p(ROOT), fresh.p(ROOT))
    after = at_root(params, logits[0], prompt, output)
    assert torch.equal(TreeDistribution(sampler, tree, logits).p(ROOT), after.p(ROOT)), "the tree left a trace"


@given(sampling(greedy=True), LOGITS, PROMPT, TOKENS)
def test_argmax_is_the_argmax_of_p(
    params: SamplingParams, logits: Tensor, prompt: list[int], output: list[int]
) -> None:
    distribution = at_root(params, logits, prompt, output)
    choice = distribution.argmax(ROOT)
    assert distribution.p(ROOT).tolist() == [float(token == choice) for token in range(VOCAB)]
    processed = distribution.processed([ROOT])[0].tolist()
    assert choice == processed.index(max(processed)), "ties go to the smallest id"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_p_beyond_the_head_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    """The nucleus may be larger than the head that is sorted first; ties must not depend on the company."""
    generator = torch.Generator().manual_seed(1)
    flat = (0.3 * torch.randn(3000, generator=generator)).to(dtype)
    peaked = (6.0 * torch.randn(3000, generator=generator)).to(dtype)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    tree = TokenTree.chain([1])
    alone = [at_root(params, row, [0], []).p(ROOT) for row in (flat, peaked)]
    together = TreeDistribution(Sampler(params, [0], 3000), tree, torch.stack([flat, peaked]))
    together.ensure([ROOT, 0])
    for node, one in zip((ROOT, 0), alone, strict=True):
        assert torch.equal(together.p(node), one)
    for row, one in zip((flat, peaked), alone, strict=True):
        probs = row.float().softmax(-1)
        assert float(probs[one > 0].sum()) >= 0.9 - 1e-5
        assert float(probs[one > 0].sum() - probs[one > 0].min()) < 0.9 + 1e-5, "not the smallest set"
        assert float(probs[one > 0].min()) >= float(probs[one == 0].max())


def test_equal_logits_are_cut_alike_in_any_company() -> None:
    """Half-precision logits tie all the time; which of them stay must depend on their row alone."""
    row = torch.zeros(2000)
    row[:5] = torch.tensor([9.0, 8.5, 8.0, 7.5, 7.0])
    wide = torch.zeros(2000)
    params = SamplingParams(temperature=1.0, top_p=0.91)
    alone = warp(row[None], params)[0]
    assert torch.equal(warp(torch.stack([row, wide]), params)[0], alone)
    assert torch.equal(warp(torch.stack([wide, row, wide]), params)[1], alone)


@pytest.mark.parametrize("params", [SamplingParams(0.7, top_p=0.9), SamplingParams(0.7, min_p=0.01)])
def test_a_row_is_processed_to_the_same_bits_in_any_company(params: SamplingParams) -> None:
    """Over a large vocabulary torch splits the sum of one row among threads, but gives of several rows each to one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = 3.0 * torch.randn(16, 49_152, generator=torch.Generator().manual_seed(0))
        together = warp(rows, params)
        assert all(torch.equal(warp(row[None], params)[0], found) for row, found in zip(rows, together, strict=True))
    finally:
        torch.set_num_threads(threads)


@given(LOGITS, st.integers(0, VOCAB - 1), st.integers(0, VOCAB))
def test_logprobs_are_those_of_the_raw_logits(logits: Tensor, token: int, top: int) -> None:
    params = SamplingParams(temperature=0.3, top_k=1, repetition_penalty=2.0, logit_bias={0: 9.0})
    value, best = at_root(params, logits, [0, 1], [2]).logprobs(ROOT, token, top)
    expected = logits.double().log_softmax(-1)
    assert value == pytest.approx(float(expected[token]), abs=1e-4)
    assert [one for _, one in best] == pytest.approx(sorted(expected.tolist(), reverse=True)[:top], abs=1e-4)
    assert all(one == pytest.approx(float(expected[index]), abs=1e-4) for index, one in best)
    assert len({index for index, _ in best}) == top


def test_more_top_logprobs_than_tokens_are_all_of_them() -> None:
    _, best = at_root(SamplingParams(), torch.randn(VOCAB), [0], []).logprobs(ROOT, 0, 20)
    assert len(best) == VOCAB


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, -math.inf]),
        ("top_p", [0.0, -0.5, 1.0001, math.nan, math.inf]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("top_k", [-1, math.nan, 1.5]),
        ("repetition_penalty", [0.0, -1.0, math.nan, math.inf]),
        ("presence_penalty", [math.nan, math.inf, -math.inf]),
        ("frequency_penalty", [math.nan, math.inf]),
        ("top_logprobs", [-1, 10**9, math.nan]),
        ("logit_bias", [{0: math.nan}, {0: math.inf}]),
    ],
)
def test_bad_parameters_are_refused_in_one_line(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(BadInput, match=name) as caught:
            SamplingParams(**{name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**12])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(BadInput, match=f"logit_bias names token {token}; the vocabulary has {VOCAB}"):
        Sampler(SamplingParams(logit_bias={token: 1.0}), [0], VOCAB)


def test_a_bias_of_minus_infinity_bans_a_token() -> None:
    for params in (SamplingParams(logit_bias={2: -math.inf}), SamplingParams(1.0, logit_bias={2: -math.inf})):
        p = at_root(params, torch.tensor([0.0, 1.0, 9.0]), [0], []).p(ROOT)
        assert float(p[2]) == 0
        assert float(p.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(processors=(BanAll(),)),
        SamplingParams(1.0, processors=(BanAll(),)),
        SamplingParams(1.0, top_k=2, top_p=0.5, min_p=0.1, processors=(BanAll(),)),
        SamplingParams(1.0, logit_bias=dict.fromkeys(range(VOCAB), -math.inf)),
        SamplingParams(0.0, logit_bias=dict.fromkeys(range(VOCAB), -math.inf)),
    ],
)
@pytest.mark.parametrize("ask", ["p", "argmax"])
def test_nothing_left_to_say_is_an_error_in_words(params: SamplingParams, ask: str) -> None:
    distribution = at_root(params, torch.randn(VOCAB), [0], [])
    assert distribution.failure(ROOT) is None
    getattr(distribution, ask)(ROOT)
    assert "every token" in str(distribution.failure(ROOT))
    assert float(distribution.p(ROOT).sum()) == pytest.approx(1), "others in the batch are judged beside a stand-in"


def test_a_dead_end_below_a_node_that_nobody_asks_for_is_no_error() -> None:
    """A draft may run into a dead end of the user's grammar; only what is reached matters."""

    class OneMore(BanAll):
        def process(self, state: None, logits: Tensor) -> Tensor:
            return logits if float(logits[0]) > 0 else super().process(state, logits)

    logits = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    params = SamplingParams(1.0, processors=(OneMore(),))
    distribution = TreeDistribution(Sampler(params, [0], 2), TokenTree.chain([1]), logits)
    distribution.ensure([ROOT, 0])
    assert float(distribution.p(ROOT).sum()) == pytest.approx(1)
    assert distribution.failure(ROOT) is None
    assert "every token" in str(distribution.failure(0))


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-12, 1e-30, 1e-44])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    p = at_root(SamplingParams(temperature, top_p=0.9, min_p=0.1), torch.tensor([10.0, 30.0, -5.0]), [0], []).p(ROOT)
    assert p.tolist() == [0.0, 1.0, 0.0]


def test_half_precision_logits_are_processed_in_float32_and_left_alone() -> None:
    logits = torch.randn(2, VOCAB).bfloat16()
    before = logits.clone()
    everything = SamplingParams(
        0.7, 5, 0.9, 0.05, 1.2, 0.3, 0.2, logit_bias={1: 1.0}, processors=(Alternate(),), logprobs=True
    )
    for params in (SamplingParams(), SamplingParams(1.0), everything):
        distribution = TreeDistribution(Sampler(params, [0], VOCAB), TokenTree.chain([2]), logits)
        distribution.ensure([ROOT, 0])
        distribution.argmax(0)
        distribution.logprobs(0, 1, 3)
        assert distribution.p(0).dtype == torch.float32
        assert torch.equal(logits, before)


@given(
    st.dictionaries(st.integers(0, 11), st.floats(-5, 5), max_size=3),
    st.lists(st.integers(0, 11), max_size=6),
    st.lists(st.integers(0, 11), max_size=6),
    st.lists(st.integers(0, 11), max_size=6),
)
def test_changes_of_logits_are_those_of_the_definition(
    bias: dict[int, float], prompt: list[int], answer: list[int], path: list[int]
) -> None:
    params = SamplingParams(0.8, logit_bias=bias, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5)
    row = torch.randn(12, generator=torch.Generator().manual_seed(len(prompt)))
    expected = []
    for token, raw in enumerate(row.tolist()):
        logit = raw + bias.get(token, 0.0)
        count = (answer + path).count(token)
        repeated = logit * 1.5 if logit < 0 else logit / 1.5
        penalised = repeated if token in prompt or count else logit
        expected.append(penalised - 0.5 * count - (0.25 if count else 0.0))
    sampler = Sampler(params, prompt, 12)
    sampler.extend(answer[:2])
    sampler.extend(answer[2:])
    changes = sampler.changes(path)
    assert changes is not None
    assert changes.apply(row.clone()).tolist() == pytest.approx(expected, abs=1e-5)
