"""Encoded weights as the kernels read them; no ops."""
