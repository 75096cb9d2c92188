"""graphllm and the systems that one would take instead, on a CPU."""
