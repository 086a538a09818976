"""The kernels as other processors run them: without the instruction sets of this one. Building them takes a while."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.models.placement import cpu_flags

# In a process of its own, for the kernels are loaded once in each.
_CHECK = """
import random, sys
import torch
from dense_support import Plain, SHAPES, KEPT_IN_BLOCKS, model_of, target_of, threads
from outpace.targets.dense.binding import features
from outpace.targets.dense.transformers_weights import read_decoder_spec
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.hf_support import disagreement
from target_suite import random_tokens, random_tree

wanted = sys.argv[1].split()
assert features().split() == wanted, features()
bounds = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.3}
for shape in ("heads-of-8-in-threes", "window-of-20", "norms-of-queries", "softcaps", "fused"):
    for precision, bound in bounds.items():
        model = model_of(SHAPES[shape]())
        found = disagreement(DenseTarget(read_decoder_spec(model), precision), model)
        assert found < bound, (shape, precision, found)
for shape in KEPT_IN_BLOCKS:
    for precision in (*bounds, "int4", "bfloat16/int8"):
        rng = random.Random(1)
        target = target_of(shape, precision, 16)
        prompt, tree = random_tokens(40, rng), random_tree(20, rng)
        sequence = target.sequence(prompt)
        with threads(2):
            target.prefill([sequence])
            found = target.score([(sequence, tree)])[0].logits
        assert torch.equal(found, Plain(target, prompt).tree(tree)), (shape, precision)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize(("machine", "features"), [("x86-64-v3", "avx2"), ("x86-64", "")])
def test_kernels_of_a_lesser_machine(tmp_path: Path, machine: str, features: str) -> None:
    _check(tmp_path, f"-march={machine} -O1", features)


@pytest.mark.slow
@pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="a processor without the instruction of bfloat16")
@pytest.mark.parametrize("switch", ["", " -DOUTPACE_WIDE_BF16"], ids=["in pairs", "widened"])
def test_bfloat16_in_pairs_and_widened(tmp_path: Path, switch: str) -> None:
    _check(tmp_path, f"-march=native -O1{switch}", "avx512 int8-dot" if switch else "avx512 bf16-dot int8-dot")


def _check(tmp_path: Path, flags: str, features: str) -> None:
    environment = os.environ | {
        "OUTPACE_CACHE": str(tmp_path),
        "OUTPACE_NATIVE_FLAGS": flags,
        "OUTPACE_TILES": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, features], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
