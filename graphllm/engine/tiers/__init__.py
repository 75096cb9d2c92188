"""Tiers of the cache below the device: what lies in host memory and further away, and what comes back."""
