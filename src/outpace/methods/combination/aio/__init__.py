"""A router: per request the strategy that is expected to answer it soonest."""
