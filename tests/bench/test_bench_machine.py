import json
import subprocess
import sys

from outpace.core import machine
from outpace.targets import machine_limits


def test_description_is_plain_json() -> None:
    found = machine.describe()
    json.dumps(found, allow_nan=False)
    assert found["cpu"]
    assert found["usable_cpus"] >= 1
    assert found["memory_gb"] > 0
    assert found["torch"]


def test_measurements_are_positive_and_sane() -> None:
    assert 0.5 < machine_limits.measure_bandwidth(64) < 5000
    assert machine.measure_matmul("float32", 256) > 0.1


def test_peak_memory_can_be_observed_anew() -> None:
    machine.reset_peak_memory()
    before = machine.peak_memory_mb()
    block = bytearray(64_000_000)
    block[::4096] = b"x" * len(block[::4096])
    during = machine.peak_memory_mb()
    assert during > before + 40
    del block


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, outpace.core.machine, outpace.prompts.questions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
