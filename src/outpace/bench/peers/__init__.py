"""Comparison with other libraries: each in a process of its own, prompt by prompt in turn, timed by the same lines."""
