"""The two tiers of the suite (docs/testing.md): what stands only in the second one says so by these."""

from __future__ import annotations

import os
from typing import Any

import pytest

from graphllm.host.machine import detect_target

ON_GPU = detect_target("auto").device == "cuda"
COMPILED = pytest.mark.gpu if ON_GPU else pytest.mark.slow  # of tests that are compiled for the device that is there


def both_tiers() -> bool:
    """Whether the second tier runs, too: conftest.py says it before it collects tests."""
    return os.environ.get("GRAPHLLM_TEST_TIER") == "thorough"


def thorough(*values: Any, **options: Any) -> Any:
    """Values of a parameter, or of several, that only `make test-all` runs. options: of `pytest.param`."""
    return pytest.param(*values, marks=pytest.mark.thorough, **options)


def draws(first: int, second: int) -> int:
    """How often a random test draws in the first tier, and in the second."""
    return second if both_tiers() else first
