"""Speculative decoding on the host: proposing drafts, counting and predicting acceptance. No torch."""
