"""Benchmarks. Each module is a command: `python -m bench NAME`, or `python bench/NAME.py`; none is installed."""
