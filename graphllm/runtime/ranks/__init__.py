"""Execution on several ranks: their processes, messages, groups and collectives."""
