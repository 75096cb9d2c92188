"""Low-rank adapters, a different one for each token."""
