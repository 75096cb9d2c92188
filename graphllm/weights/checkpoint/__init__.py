"""Checkpoint files: which tensors they hold, under which names."""
