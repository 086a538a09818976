"""Decoding where the weights are not on the CPU: on a device that refuses operands from two places, as a GPU does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
METHODS = ["none", "sam", "eagle", "eagle3"]


def test_nothing_is_left_on_the_cpu() -> None:
    """Plain decoding, a copy from the text, a head, a batch, and graphs: each moves what it has to move."""
    paths = [str(ROOT / name) for name in ("src", "tests", "benchmarks")]
    around = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(ROOT / "tests" / "pretend_decoding.py"), *METHODS]
    ran = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert "on one device" in found["refused"]
    assert found["device"] == "pretend:0"
    assert found["verdicts"] == dict.fromkeys(METHODS, "2 of 2 answers identical")
    assert [len(one) for one in found["batch"]] == [6, 6]
    assert found["differences"] == []
    assert found["replayed"] > 10
    assert found["refused captures"] == ""
