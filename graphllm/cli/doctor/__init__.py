"""`graphllm doctor`."""
