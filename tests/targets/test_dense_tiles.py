"""Products by matrix tiles (Intel AMX).

Most processors have none, so the kernels are built with a model of the instructions. What runs on the instructions
themselves is skipped where there are none.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.models.placement import cpu_flags
from outpace.targets.dense import kernel_build
from outpace.targets.dense.binding import features

_EMULATED = "-DOUTPACE_EMULATED_TILES"
_INSTRUCTIONS = {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps"}
_NO_PERMISSION = 77
"""What the checks end with where tiles cannot be used."""
on_linux = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux", reason="tiles are used on x86-64 Linux"
)

_SCORES = """
import hashlib, random
import torch
from dense_support import KEPT_IN_BLOCKS, SHAPES, Plain, model_of, target_of, threads
from outpace.targets.cost_table import kernels
from outpace.targets.dense.binding import features, product_rate
from outpace.targets.hf_support import disagreement
from target_suite import random_tokens, random_tree

print("kernels", kernels())
print("tiles" in features().split(), product_rate(2, "bfloat16") > 0)
for shape in (*KEPT_IN_BLOCKS, "biases", "fused"):
    for precision in ("bfloat16", "int8", "int4") if shape in KEPT_IN_BLOCKS else ("bfloat16", "int8"):
        rng = random.Random(1)
        target = target_of(shape, precision)
        prompt, tree = random_tokens(45, rng), random_tree(40, rng)
        sequence = target.sequence(prompt)
        with threads(2):
            target.prefill([sequence])
            found = target.score([(sequence, tree)])[0].logits
        assert torch.equal(found, Plain(target, prompt).tree(tree)), (shape, precision)
        if precision == "bfloat16":
            assert disagreement(target, model_of(SHAPES[shape]())) < 0.1, shape
        print(shape, precision, hashlib.sha256(found.numpy().tobytes()).hexdigest())
"""

_LOADING = """
from dense_support import config, model_of
from outpace.targets.choice import check_parts, choose_target
from outpace.targets.dense.architectures import UnsupportedArchitecture
from outpace.targets.dense.dense_target import DenseTarget
from outpace.targets.dense.transformers_weights import read_decoder_spec

model = model_of(config())
for precision in ("bfloat16", "int8"):
    target, why = choose_target(model, precision=precision)
    print(type(target).__name__, why)
    try:
        check_parts(DenseTarget(read_decoder_spec(model), precision), read_decoder_spec(model), "these")
        print("right")
    except UnsupportedArchitecture as error:
        print(error)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels with the model of the instructions are kept once they are built."""
    return tmp_path_factory.mktemp("tiles")


def emulated(cache: Path, *arguments: str, **settings: str) -> str:
    """What Python prints, run with the model of the instructions."""
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {
        "OUTPACE_CACHE": str(cache),
        "OUTPACE_NATIVE_FLAGS": f"{kernel_build.tuning()} -O1 {_EMULATED}",
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
        **settings,
    }
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False, cwd=cache
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def checks(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Build tile_checks.cpp with the kernels that it is about, and run it."""
    names = ("tiles", "tile_linear", "linear", "packing", "superblocks")
    sources = [kernel_build.SOURCE / f"{name}.cpp" for name in names]
    program = folder / "checks"
    options = [*kernel_build._FLAGS, *kernel_build.tuning().split(), *flags, f"-I{kernel_build.SOURCE}"]
    files = [str(one) for one in (Path(__file__).parent / "tile_checks.cpp", *sources)]
    command = [*kernel_build._compiler(), *options, *files, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([str(program)], capture_output=True, text=True, check=False)


def test_instructions_and_products_with_the_model_of_the_instructions(tmp_path: Path) -> None:
    done = checks(tmp_path, "-O0", _EMULATED)
    assert done.returncode == 0, done.stdout + done.stderr


@on_linux
def test_instructions_and_products_on_this_processor(tmp_path: Path) -> None:
    if "amx_tile" not in cpu_flags():
        pytest.skip("this processor has no tiles")
    done = checks(tmp_path)
    if done.returncode == _NO_PERMISSION:
        pytest.skip("the system does not grant tiles")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiles" in features().split()


@on_linux
def test_a_processor_without_tiles_uses_none() -> None:
    if "amx_tile" in cpu_flags():
        pytest.skip("this processor has tiles")
    assert "tiles" not in features().split()


@on_linux
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_the_instructions_are_compiled_for_any_processor() -> None:
    library = kernel_build.library()._name
    listing = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"\b(?:tdpb|tile|ldtile)[a-z0-9]+\b", listing)) >= _INSTRUCTIONS


@pytest.mark.slow
def test_scores_by_tiles(cache: Path) -> None:
    """Trees score as decoding alone does, and quantised formats, which take no tiles, as without them, bit for bit."""
    with_tiles, without = (emulated(cache, "-c", _SCORES, OUTPACE_TILES=on).splitlines() for on in ("1", "0"))
    assert with_tiles[1] == "True True" and without[1] == "False True"
    assert with_tiles[0] != without[0]  # measured times and notes of checks are kept apart
    assert len(with_tiles) == len(without) == 18
    for one, other in zip(with_tiles[2:], without[2:], strict=True):
        assert (one == other) == ("bfloat16" not in one), one


@pytest.mark.slow
def test_a_model_whose_tile_products_are_wrong_does_not_run_on_them(cache: Path) -> None:
    chosen, error, *without = emulated(cache, "-c", _LOADING, OUTPACE_FAULTY_TILES="1").splitlines()
    assert re.match(r"HFTarget .*its scores differ .*; set OUTPACE_TILES=0 to compute without", chosen), chosen
    assert re.match(r"a part of its scores differs .*; set OUTPACE_TILES=0 to compute without", error), error
    assert [line.strip() for line in without] == ["DenseTarget", "right"]  # int8 takes no tiles
    right = emulated(cache, "-c", _LOADING, OUTPACE_FAULTY_TILES="1", OUTPACE_TILES="0").splitlines()
    assert [line.strip() for line in right] == ["DenseTarget", "right"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["test_dense_bitwise", "test_dense_faults", "test_target_dense"])
def test_suites_of_the_fast_target_by_tiles(cache: Path, suite: str) -> None:
    path = Path(__file__).parent / f"{suite}.py"
    assert "tiles" in emulated(cache, "-c", "from outpace.targets.dense.binding import features; print(features())")
    emulated(cache, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path))
