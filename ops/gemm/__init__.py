"""Linear layers: dense, encoded, with fused neighbours."""
