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
    # In a process of its own: where the system cannot reset a peak, tests before it would have set it.
    code = """
from outpace.core import machine
machine.reset_peak_memory()
before = machine.peak_memory_mb()
block = bytearray(200_000_000)
block[::4096] = b"x" * len(block[::4096])
during = machine.peak_memory_mb()
del block
after = machine.peak_memory_mb()
machine.reset_peak_memory()
print(before, during, after, machine.peak_memory_mb())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    before, during, after, anew = map(float, done.stdout.split())
    assert during > before + 150
    assert after > before + 150, "a peak stays"
    assert anew < before + 50 or anew > before + 150, "where it cannot be reset, it stays"


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, outpace.core.machine, outpace.prompts.questions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
