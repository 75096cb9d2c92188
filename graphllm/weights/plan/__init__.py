"""The weight plan: each parameter as an expression over tensors of the checkpoint."""
