"""Tiers of the cache below the device, on one rank: host memory, and the copies between it and the device."""
