"""Experts of traced models: one call in a trace, then `fused_moe`, and their routing `moe_route`."""
