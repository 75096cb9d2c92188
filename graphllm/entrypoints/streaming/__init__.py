"""The parts of `AsyncLLM`: streams of requests, threads for texts, single cores, vectors."""
