"""Bench: methods beside each other, and beside other libraries; the report for terminal, JSON and HTML."""
