"""Rows copied, kept or averaged."""
