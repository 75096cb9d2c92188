"""`graphllm serve`."""
