"""A request from its prompt to its output."""
