"""Serving, simulated: requests, continuous batching and drafts on machines that are not here (docs/simulate.md)."""
