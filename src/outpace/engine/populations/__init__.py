"""Populations: requests that own a group of sequences. A rule sees the group's trees together."""
