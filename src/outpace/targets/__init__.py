"""Targets: the models whose output distribution is kept."""
