"""Weights in the host's memory, and their copies to the device within a step."""
