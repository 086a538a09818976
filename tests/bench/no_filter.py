"""Stands in for the confined program on a system that confines nothing."""

raise SystemExit(97)
