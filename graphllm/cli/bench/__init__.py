"""`graphllm bench`: load on a running server, throughput and latency without one, and the time a server takes to start.
The JSON has vLLM's names for the same figures."""
