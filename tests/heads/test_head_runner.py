"""A head's layers beside a target: entries, second rows, states behind the norm, the same on kernels and in PyTorch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import linear, rms_norm

from eagle_support import head_of
from outpace.core.errors import OutpaceError
from outpace.heads.head_runner import HeadRunner, Rows, head_spec, matrix_of, norm_of
from outpace.methods.learned.eagle3.drafter import Eagle3Net
from outpace.targets.base import Target
from outpace.targets.dense import binding
from outpace.targets.dense.decoder_spec import Entry, Matrix
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.forward_plan import ForwardPlan
from outpace.targets.hf import HFTarget
from outpace.targets.top import _by_kernels, _log_totals, top, top_and_totals
from target_suite import tiny_model

HERE = torch.device("cpu")


@pytest.fixture(scope="module", params=["dense", "generic"])
def target(request: pytest.FixtureRequest) -> Target:
    model = tiny_model("llama")
    return DenseTarget(read_decoder_spec(model)) if request.param == "dense" else HFTarget(model)


def seen(count: int) -> list[list[int]]:
    return [list(range(row + 1)) for row in range(count)]


@torch.inference_mode()
def ran(stack: HeadRunner, states: torch.Tensor, tokens: list[int], entry: bool = False) -> Any:
    rows = Rows(stack.open(), states, list(range(len(states))), tokens, seen(len(states)), entry=entry)
    return stack.run([rows])[0]


@pytest.mark.parametrize("norms", [(False, False), (True, False), (False, True), (True, True)])
@torch.inference_mode()
def test_an_entry_makes_states_of_wider_rows(target: Target, norms: tuple[bool, bool]) -> None:
    head = head_of("eagle3", target)
    layer, hidden, epsilon = head.layers[0], head.config.hidden_size, head.config.epsilon
    before = torch.rand(3 * hidden) + 0.5 if norms[0] else None
    after = torch.rand(hidden) + 0.5 if norms[1] else None
    fc = torch.nn.Linear(3 * hidden, hidden)
    plan = head_spec(
        head.config,
        [layer],
        rows=head.draft_vocabulary.rows,
        final_norm=head.norm,
        first_norms=[layer.hidden_norm],
        second_norm=layer.input_layernorm,
        entry=Entry(matrix_of(fc, HERE), *(None if one is None else Matrix(one) for one in (before, after))),
    )
    stack = HeadRunner(plan, target)
    raw, tokens = 3.0 * torch.randn(5, 3 * hidden), [4, 1, 4, 2, 7]
    rows = raw
    if before is not None:
        rows = (rms_norm(raw.view(5, 3, hidden), (hidden,), None, epsilon) * before.view(3, hidden)).flatten(1)
    by_hand = linear(rows, fc.weight, fc.bias)
    if after is not None:
        by_hand = rms_norm(by_hand, (hidden,), after, epsilon)
    made, right = ran(stack, raw, tokens, entry=True), ran(stack, by_hand, tokens)
    torch.testing.assert_close(made.states, right.states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(made.logits, right.logits, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_states_come_out_behind_the_norm_where_they_are_handed_on_so(target: Target) -> None:
    head = head_of("eagle3", target, norms="attdrift")
    net = Eagle3Net(head, target)
    plain = HeadRunner(
        head_spec(
            head.config,
            [head.layers[0]],
            rows=head.draft_vocabulary.rows,
            final_norm=head.norm,
            first_norms=[head.layers[0].hidden_norm],
            second_norm=head.layers[0].input_layernorm,
        ),
        target,
    )
    states, tokens = torch.randn(4, head.config.hidden_size), [3, 3, 9, 1]
    normed, stream = ran(net.runner, states, tokens), ran(plain, states, tokens)
    weight = norm_of(head.norm, HERE).weight
    right = rms_norm(stream.states, weight.shape, weight, head.config.epsilon)
    torch.testing.assert_close(normed.states, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normed.logits, stream.logits, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_rows_that_are_only_kept_leave_what_rows_that_are_read_leave(target: Target) -> None:
    stack = Eagle3Net(head_of("eagle3", target), target).runner
    states, tokens = torch.randn(6, target.hidden_size), [3, 3, 9, 1, 4, 4]
    left = []
    for kept in (True, False):
        kv = stack.open()
        rows = [Rows(kv, states[:5], list(range(5)), tokens[:5])]
        if kept:
            stack.keep(rows)
        else:
            stack.run(rows)
        assert stack.length(kv) == 5
        [last] = stack.run([Rows(kv, states[5:], [5], tokens[5:])])
        assert last.logits is not None
        left.append(last.logits)
    assert torch.equal(left[0], left[1])


@torch.inference_mode()
def test_what_the_kernels_are_not_given_is_said() -> None:
    target = DenseTarget(read_decoder_spec(tiny_model("llama")))
    stack = Eagle3Net(head_of("eagle3", target), target).runner
    states = torch.randn(1, target.hidden_size)
    for token in (-1, target.vocab_size):
        with pytest.raises(OutpaceError, match="not in the vocabulary"):
            ran(stack, states, [token])
    with pytest.raises(OutpaceError, match="reads a second input, and there is none"):
        ran(stack, states, [])
    with pytest.raises(OutpaceError, match="no entry"):
        target.run(ForwardPlan([], entry_inputs=states), [0], logits=True)


@given(
    rows=st.integers(1, 4),
    vocab=st.sampled_from([5, 300, 1000, 4097]),
    k=st.integers(1, 8),
    inverse_temperature=st.sampled_from([1.0, 0.25, 3.0]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_totals_make_probabilities_of_logits(
    rows: int, vocab: int, k: int, inverse_temperature: float, seed: int
) -> None:
    logits = 5.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    right = (inverse_temperature * logits).logsumexp(-1).tolist()
    binding.features()  # the kernels are there from here on
    assert _by_kernels(logits)
    for found in (
        top_and_totals(logits, k, inverse_temperature),
        top_and_totals(logits.double(), k, inverse_temperature),
    ):
        listed = list(found)
        assert [list(one[1]) for one in listed] == [ids for _, ids in top(logits, k)]
        assert [one[2] for one in listed] == pytest.approx(right, abs=2e-5)


def test_totals_of_what_is_not_finite() -> None:
    rows = torch.zeros(3, 100)
    rows[0] = -torch.inf
    rows[1, 3] = torch.inf
    rows[2, 5:] = -torch.inf
    binding.features()
    none, endless, five = [total for *_, total in top_and_totals(rows, 2)]
    assert none == -math.inf
    assert endless == math.inf
    assert five == pytest.approx(math.log(5))
    assert _log_totals(rows[2:3])[0] == pytest.approx(five)
