"""Attention over the paged cache, without a cache, and rotary positions."""
