"""Ray: many replicas of the server behind one address, and offline batches over many workers."""
