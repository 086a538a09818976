"""Learned drafters as networks: their shapes, their checkpoints, and how they run."""
