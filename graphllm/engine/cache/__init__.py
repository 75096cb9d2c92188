"""The KV cache as numbers: blocks, prefix reuse, retention. No torch."""
