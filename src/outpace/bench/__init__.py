"""Bench: prompts, runner, statistics, and the report for terminal, JSON and HTML."""
