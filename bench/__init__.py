"""Benchmarks: one harness, many cases. `python -m bench` lists the cases; nothing of it is installed."""

import graphllm  # noqa: F401  # sets what OpenMP reads, before a case imports torch
