"""Is it lossless? Exact on small vocabularies, statistical on real models, greedy token by token."""
