"""transformers: a model whose ``generate`` is outpace's."""
