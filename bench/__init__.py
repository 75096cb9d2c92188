"""Benchmarks: one harness, many cases. `python -m bench` lists the cases; nothing of it is installed."""
