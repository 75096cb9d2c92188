"""Cases that measure the engine on a CPU."""
