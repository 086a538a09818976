"""Methods in which a gate decides which draft tokens the target is not asked about. Lossy."""
