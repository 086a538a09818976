"""The stages of ``benchmarks/gpu.py``, one file each; each returns what it found as a JSON object."""
