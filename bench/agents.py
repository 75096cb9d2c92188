"""The load of agents: conversations that begin alike, grow turn by turn, and come back while others run in between."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bench.driving import request


class Sizes(NamedTuple):
    """Tokens of an agent's conversation.

    common: that all conversations begin with.
    first: of a conversation's own beginning.
    turn: that come with each further turn.
    out: of each answer.
    """

    common: int = 20_000
    first: int = 10_000
    turn: int = 2_048
    out: int = 900


@dataclass
class Found:
    """What a load took.

    prompts: tokens of the prompts of all turns; cached: of them, from the cache.
    attainable: of them, tokens that some turn before had computed.
    first: seconds to the first token of each turn.
    texts: of the answers, by conversation.
    """

    seconds: float = 0.0
    turns: int = 0
    prompts: int = 0
    cached: int = 0
    attainable: int = 0
    first: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """As a row."""
        ms = np.array(self.first) * 1e3
        return {
            "turns": self.turns, "s": round(self.seconds, 2), "prompt tokens/s": round(self.prompts / self.seconds),
            "hit rate": round(self.cached / self.prompts, 4), "attainable": round(self.attainable / self.prompts, 4),
            "TTFT ms, mean": round(float(ms.mean()), 1), "TTFT ms, p50": round(float(np.median(ms)), 1),
            "TTFT ms, p99": round(float(np.percentile(ms, 99)), 1),
        }  # fmt: skip


def serve_agents(
    core: Any, sizes: Sizes, conversations: int, turns: int, at_once: int, vocab: int, most_seconds: float = 1e9
) -> Found:
    """Serve the turns of all conversations in rounds, so many at once.

    most_seconds: no turn begins later. What users write is random, the same in every run.
    """
    rng = np.random.default_rng(0)
    common = rng.integers(3, vocab, sizes.common).tolist()
    histories = [[*common, *rng.integers(3, vocab, sizes.first).tolist()] for _ in range(conversations)]
    new = rng.integers(3, vocab, (turns, conversations, sizes.turn)).tolist()
    found, begun, before = Found(texts=[[] for _ in histories]), time.perf_counter(), common
    waiting = deque((turn, i) for turn in range(turns) for i in range(conversations))
    running: dict[str, tuple[int, float]] = {}
    answered: set[str] = set()
    known = [0] * conversations  # tokens of each conversation that were computed
    while waiting or running:
        late = time.perf_counter() - begun > most_seconds
        while waiting and len(running) < at_once and not late:
            turn, i = waiting[0]
            if any(i == other for other, _ in running.values()):
                break
            waiting.popleft()
            if turn:
                histories[i] += new[turn][i]
            number = found.turns
            found.turns += 1
            found.prompts += len(histories[i])
            found.attainable += max(known[i], len(before) if number else 0)
            core.add(request(number, histories[i], sizes.out, temperature=0.0))
            running[str(number)] = i, time.perf_counter()
        if late and not running:
            break
        for output in core.step():
            i, start = running[output.id]
            if output.tokens and output.id not in answered:
                answered.add(output.id)
                found.first.append(time.perf_counter() - start)
            found.cached += output.cached
            histories[i] += output.tokens
            found.texts[i] += output.tokens
            if output.finish_reason:
                known[i] = len(histories[i])
                del running[output.id]
    found.seconds = time.perf_counter() - begun
    return found
