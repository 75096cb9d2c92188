"""What one step needs of the host: the batch, its inputs, token masks, the device's states."""
