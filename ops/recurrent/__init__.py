"""Layers that keep a state of fixed size for each sequence: short convolutions, state-space models, delta rules."""
