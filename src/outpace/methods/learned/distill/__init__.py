"""Distilled draft language models (DistillSpec): everything that belongs to the method lies in this folder."""
