"""The nouns without dependencies: trees, proposals, sampling, randomness, metrics, text, files, errors."""
