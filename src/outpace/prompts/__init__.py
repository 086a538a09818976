"""Prompts: questions and prompt files, read by bench, training and certify alike."""
