"""Training of gates: labels from decoding with a draft model, a small classifier, and the thresholds."""
