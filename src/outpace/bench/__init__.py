"""Bench: methods beside each other, and beside other libraries; the report for terminal, JSON and HTML.

The package can be called: ``outpace.bench(model, ["pld", "sam"])`` is :func:`outpace.bench.benchmark.bench`.
"""

from outpace.core.callable_rooms import make_callable

make_callable(__name__, "outpace.bench.benchmark:bench")
