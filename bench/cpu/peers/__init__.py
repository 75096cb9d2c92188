"""One file for each system that the benchmark knows."""
