"""The Python front door: options, prompts, generate and stream in all their forms, conversations."""
