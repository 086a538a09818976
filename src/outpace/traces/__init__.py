"""Traces: what requests asked for and what their rounds drafted and committed, in a file that the simulator reads."""
