"""Weights from files to memory: readers, loaders, weights kept in an artifact."""
