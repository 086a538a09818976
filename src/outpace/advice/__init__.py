"""Advice: which method to decode with on this machine, or none, and what it is expected to gain.

The package can be called: ``outpace.advice(model, prompts)`` is :func:`outpace.advice.advising.advise`.
"""

from outpace.core.callable_rooms import make_callable

make_callable(__name__, "outpace.advice.advising:advise")
