"""Cases that measure servers and several processes."""
