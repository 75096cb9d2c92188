"""Inputs for gather_rows, in a group of one: hidden states, no rows."""

from __future__ import annotations

from graphllm.ir.testing import moved_rows

CASES = moved_rows("one rank gathers its own numbers", group="experts", ranks=1)
