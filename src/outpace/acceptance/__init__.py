"""Acceptance rules: one file a family. Every module here is imported when the registry is first read."""
