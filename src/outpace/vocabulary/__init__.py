"""Translation between two vocabularies: shared tokens, texts in the other's tokens, probabilities of strings."""
