"""Rows of tables by token."""
