"""Between two vocabularies: tokens that both have, texts in the tokens of the other, probabilities of strings."""
