"""`graphllm run`: prompts or a file of requests, answered offline."""
