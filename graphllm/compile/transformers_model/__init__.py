"""Decoders that transformers knows, without a file of their own: its module code is traced, at compile time only."""
