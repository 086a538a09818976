"""Advice: which method to decode with on this machine, or none, and what it is expected to gain."""
