"""Weights: the plan (data), the checkpoint reader and the streaming loader. Importing this package imports nothing."""
