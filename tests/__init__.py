"""Tests of graphllm. A package, so that a `tests` of some other distribution is not taken for it."""
