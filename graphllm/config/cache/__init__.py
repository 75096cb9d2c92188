"""Settings of what the cache tells others."""
