"""Parts of ``benchmarks/serving.py``: conversations, a client, loads, servers, figures."""
