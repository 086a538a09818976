"""Parts of benchmarks/soak.py: the server as a child process, its callers, what they ask, and what is checked."""
