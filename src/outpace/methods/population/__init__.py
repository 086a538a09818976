"""Methods that decode a group of sequences."""
