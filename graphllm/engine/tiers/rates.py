"""Rates: how fast this engine computes prompts, and how fast copies come from its tiers, as measured."""

from __future__ import annotations

_NEWEST = 0.2  # weight of the newest measurement
_AGAIN = 64  # refusals after which a tier is tried again, whatever was measured
_LEAST_TOKENS = 64  # of a step whose speed is a prompt's
_LATENCY = 2e-4  # seconds until a copy begins and its end is seen


class Rates:
    """tokens: computed a second, by steps with prompts. bytes: copied a second, by tier. 0: not measured yet."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self.bytes = dict[str, float]()
        self._refused = dict[str, int]()

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has ended."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            self.tokens = _mean(self.tokens, tokens / seconds)

    def copied(self, tier: str, nbytes: int, seconds: float) -> None:
        """Contents have come from a tier."""
        if nbytes and seconds > 0:
            self.bytes[tier] = _mean(self.bytes.get(tier, 0.0), nbytes / seconds)

    def worth(self, tokens: int, nbytes: dict[str, int]) -> bool:
        """Whether these bytes of tiers come sooner than that many tokens are computed. Yes while nothing is measured;
        and at times in any case, so that an old measurement does not stand for ever."""
        known = [tier for tier in nbytes if self.bytes.get(tier)]
        if not self.tokens or len(known) < len(nbytes):
            return True
        seconds = _LATENCY + sum(nbytes[tier] / self.bytes[tier] for tier in known)
        slowest = min(known, key=lambda tier: self.bytes[tier], default="")
        if seconds < tokens / self.tokens:
            self._refused[slowest] = 0
            return True
        self._refused[slowest] = (self._refused.get(slowest, 0) + 1) % _AGAIN
        return self._refused[slowest] == 0


def _mean(old: float, new: float) -> float:
    return new if not old else old + _NEWEST * (new - old)
