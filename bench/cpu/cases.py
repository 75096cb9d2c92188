"""What is measured of a loaded system, and how figures come from the times at which tokens came."""

from __future__ import annotations

from typing import NamedTuple

from bench.cpu.peer import Times

FIRST = "start to first token, s"
PEAK = "peak memory, GB"
FIRST_PROMPT = 16  # tokens of the first prompt of all


class Case(NamedTuple):
    """Prompts of ``tokens`` tokens at once, and how many tokens are generated for each. One token measures only the
    prompts."""

    name: str
    prompts: int
    tokens: int
    generated: int

    def rate(self, begun: float, times: Times) -> float:
        """Tokens a second: of the prompts, or of decoding from when every prompt has its first token."""
        if self.generated == 1:
            return self.prompts * self.tokens / (max(t[0] for t in times) - begun)
        start, end = max(t[0] for t in times), max(t[-1] for t in times)
        return sum(at > start for t in times for at in t) / (end - start)


CASES = (
    Case("decode batch 1, tokens/s", 1, 128, 64),
    Case("decode batch 8, tokens/s", 8, 128, 64),
    Case("prefill 1,024, tokens/s", 1, 1024, 1),
)
LONGEST = max(case.prompts * case.tokens + case.generated * case.prompts for case in CASES)
