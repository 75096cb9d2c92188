"""Structured output: what the compilers of grammars have in common, and the backends."""
