"""The engine: the round, the decoder that requests join and leave, and what a request is."""
