"""Products of every format, by the instructions of this processor and of lesser ones."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from outpace.targets.dense import kernel_build

_PARTS = ("linear.cpp", "packing.cpp", "superblocks.cpp", "tile_linear.cpp", "tiles.cpp")
_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(kernel_build.tuning(), id="this processor"),
        pytest.param("-march=x86-64-v3", marks=[_X86, pytest.mark.slow], id="AVX2"),
        pytest.param("-march=x86-64", marks=[_X86, pytest.mark.slow], id="without AVX"),
    ],
)
def test_products_against_float64_and_of_many_rows_against_one(flags: str, tmp_path: Path) -> None:
    checks, source = tmp_path / "checks", kernel_build.SOURCE
    subprocess.run(
        [
            *kernel_build._compiler(),
            *kernel_build._FLAGS,
            *flags.split(),
            "-O1",
            f"-I{source}",
            str(Path(__file__).with_name("product_checks.cpp")),
            *(str(source / part) for part in _PARTS),
            "-o",
            str(checks),
        ],
        check=True,
    )
    done = subprocess.run([checks], capture_output=True, text=True, env={"OUTPACE_TILES": "0"}, check=False)
    assert done.returncode == 0, done.stdout
