"""What checkpoints hold of the parameters of traced models."""
