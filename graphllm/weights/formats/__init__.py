"""One file for each way of keeping matrices in integers and scales that graphllm knows; found by their folder."""
