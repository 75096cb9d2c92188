"""Connectors: blocks of the cache that come from other engines, and go to them."""
