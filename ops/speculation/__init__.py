"""Drafts: proposing, accepting, keeping."""
