"""Naps of a core that waits for copies: short where they come, long where a disk hangs."""

from __future__ import annotations

from graphllm.engine.tiers.naps import Naps


def test_what_hangs_is_looked_at_seldom() -> None:
    """A copy that comes within a tenth of a second is seen after at most 5 % more, or a millisecond; 30 seconds without
    one take less than 700 looks."""
    now, taken = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        taken.append(seconds)

    naps = Naps(lambda: now, sleep)
    while now < 30:
        waited = now
        naps.nap()
        assert taken[-1] <= max(0.001, 0.05 * waited)
    assert len(taken) < 700
    assert max(taken) == 0.05
    naps.end()
    naps.nap()
    assert taken[-1] == 0.001
