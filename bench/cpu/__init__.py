"""graphllm on a CPU beside the systems that one would take instead."""
