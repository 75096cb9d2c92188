"""vLLM's names and command lines, read as settings."""
