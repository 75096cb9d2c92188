"""Settings and a checkpoint become an artifact: one from the cache, or a new one."""
