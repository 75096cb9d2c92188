"""Rewrites of the plan, of a graph's units and of linked programs. `graphllm.passes` has those of single units."""
