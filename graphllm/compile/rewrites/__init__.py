"""Rewrites of the plan, of a whole graph and of linked programs. `graphllm.passes` has passes over single units."""
