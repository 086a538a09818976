"""Drafters that learn: data from the target itself, losses, one trainer."""
