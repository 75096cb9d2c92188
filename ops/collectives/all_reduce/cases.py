"""Inputs for all_reduce, in a group of one: the sizes of activations, no tokens."""

from __future__ import annotations

from graphllm.ir.testing import moved_rows

CASES = moved_rows("one rank's sum is its own numbers", group="tensor", ranks=1)
