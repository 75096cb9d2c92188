"""How evenly tokens spread over experts."""

from __future__ import annotations

from collections.abc import Sequence


def imbalance(tokens: Sequence[Sequence[int]]) -> dict[int, float]:
    """By the number of each layer with tokens: tokens of its busiest expert over the mean of all; 1 is balanced.

    tokens: of each layer's experts.
    """
    return {i: max(row) * len(row) / sum(row) for i, row in enumerate(tokens) if any(row)}
