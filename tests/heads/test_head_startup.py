"""Reading a head takes no second of imports, and no random weights."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from outpace.heads.blocks import Uninitialised, initialised
from outpace.heads.head_config import TargetFacts
from outpace.heads.kinds import kinds, plan, weight_shapes

FACTS = TargetFacts(name="toy", hidden_size=64, vocab_size=100, num_layers=6, fingerprint=[])


def test_shapes_of_every_kind_need_no_compiler_of_torch() -> None:
    program = (
        "import sys\n"
        "from outpace.heads.head_config import TargetFacts\n"
        "from outpace.heads.kinds import kinds, plan, weight_shapes\n"
        f"facts = TargetFacts(**{FACTS.model_dump()!r})\n"
        "assert len([weight_shapes(plan(one, facts)) for one in kinds().values()]) > 5\n"
        "print([name for name in ('sympy', 'torch._dynamo', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", kinds())
def test_shapes_are_those_of_a_head_that_is_made(kind: str) -> None:
    from outpace.heads.draft_vocabulary import DraftVocabulary

    config = plan(kinds()[kind], FACTS)
    head = kinds()[kind](config, DraftVocabulary(torch.arange(100), torch.zeros(100, 64)))
    assert weight_shapes(config) == {name: tuple(value.shape) for name, value in head.own_weights().items()}


def test_nothing_is_drawn_inside_and_everything_again_behind() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with Uninitialised():
        linear = nn.Linear(4, 4)
        initialised(linear)
        assert torch.equal(linear(torch.zeros(2, 4)), linear.bias.expand(2, 4))  # other functions work
    assert torch.equal(torch.get_rng_state(), state)
    initialised(linear)
    assert not torch.equal(torch.get_rng_state(), state) and not linear.bias.any()
