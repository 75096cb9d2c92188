"""Router: to which of several engine cores a request goes. No sockets and no torch; `graphllm.engine.group` asks it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graphllm.engine.request import CoreInfo, EngineRequest

# A sequence without its first token waits for room, or for a whole prompt to be computed; one that decodes is a row of
# a step. The same ratio as in vLLM's balancing of data parallel engines, which counts its schedulers' queues.
WAITING, RUNNING = 4.0, 1.0
# A core that holds all of a prompt may have so much more load than the others, and half of theirs more: then a long
# prompt is computed once, and a popular beginning still spreads over all cores.
_HELD, _HELD_SHARE = 2 * WAITING, 0.5
_ADAPTER = 0.25  # what the tables of an adapter are worth, as a share of a prompt
_MOST_BLOCKS, _MOST_ADAPTERS = 1 << 16, 32  # remembered of a core


@dataclass
class _Known:
    """What a front knows of a core. begun: of the requests that it has not finished, by id, whether tokens of theirs
    have come; waiting: how many have none. sizes: tokens of prompt and limit, by id; tokens: the sum. others: load by
    other fronts. blocks: keys of blocks that it has computed, oldest first; adapters: digests of those it has run,
    likewise."""

    begun: dict[str, bool] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    waiting: int = 0
    others: float = 0.0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def own(self) -> float:
        return WAITING * self.waiting + RUNNING * (len(self.begun) - self.waiting)


class Router:
    """For one front, which knows its own requests exactly and is told of the load by others.

    The core with the least cost is taken: its load, less a bonus for the share of the prompt that it has computed
    lately. Among equals it is the one with the fewest tokens to come, and then they take turns.
    """

    def __init__(self, count: int, prefix: bool = True) -> None:
        """count: of cores. prefix: whether they keep what prompts begin with."""
        self._cores = [_Known() for _ in range(count)]
        self._prefix = prefix
        self._block_size, self._most_blocks = 16, _MOST_BLOCKS
        self._next = 0
        self._owners: dict[str, int] = {}

    def told(self, info: CoreInfo) -> None:
        """The sizes of each core's cache."""
        self._block_size, self._most_blocks = info.block_size, min(info.num_blocks, _MOST_BLOCKS)

    def add(self, requests: Sequence[EngineRequest], alive: Sequence[bool]) -> int | None:
        """The core that gets these siblings; None where none is alive. They count as its load from now on."""
        first = requests[0]
        keys = self._keys(first)
        there = [engine for engine, lives in enumerate(alive) if lives]
        if not there:
            return None
        least = min(self.load(engine) for engine in there)
        bonus = _HELD + _HELD_SHARE * least
        turn = self._next
        count = len(self._cores)

        def cost(engine: int) -> tuple[float, int, int]:
            known = self._cores[engine]
            return self.load(engine) - bonus * self._held(known, keys, first), known.tokens, (engine - turn) % count

        chosen = min(there, key=cost)
        self._next = (chosen + 1) % count
        self._remember(self._cores[chosen], keys, first)
        known = self._cores[chosen]
        for request in requests:
            size = len(request.prompt) + request.limit
            known.begun[request.id], known.sizes[request.id] = False, size
            known.tokens += size
            known.waiting += 1
            self._owners[request.id] = chosen
        return chosen

    def began(self, id: str) -> None:
        """News of a request have come. Unknown ids are ignored."""
        engine = self._owners.get(id)
        if engine is not None and not (known := self._cores[engine]).begun[id]:
            known.begun[id] = True
            known.waiting -= 1

    def ended(self, id: str) -> None:
        """A request is over. Unknown ids are ignored."""
        engine = self._owners.pop(id, None)
        if engine is not None:
            known = self._cores[engine]
            known.tokens -= known.sizes.pop(id)
            known.waiting -= not known.begun.pop(id)

    def owner(self, id: str) -> int | None:
        """The core of a request that is not over."""
        return self._owners.get(id)

    def of(self, engine: int) -> list[str]:
        """Ids of the requests that a core has not finished."""
        return list(self._cores[engine].begun)

    def load(self, engine: int) -> float:
        """Of a core: its sequences, those that wait for their first token with more weight."""
        known = self._cores[engine]
        return known.own + known.others

    def reported(self, engine: int, waiting: int, running: int) -> None:
        """A core has so many sequences by all fronts together."""
        known = self._cores[engine]
        known.others = max(0.0, WAITING * waiting + RUNNING * running - known.own)

    def forget(self, engines: Iterable[int]) -> None:
        """The caches of these cores are empty."""
        for engine in engines:
            self._cores[engine].blocks.clear()

    def replaced(self, engine: int) -> None:
        """Another core has taken the place of one, whose requests have ended."""
        for id in self.of(engine):
            self.ended(id)
        self._cores[engine] = _Known()

    def _keys(self, request: EngineRequest) -> list[int]:
        """One for each full block of the prompt, of it and all before it; as the prefix cache's digests, what they
        depend on beside tokens enters. These are only guesses, so that Python's own hash is enough."""
        if not self._prefix:
            return []
        size = self._block_size
        digest = "" if request.adapter is None else request.adapter.digest
        key = hash((digest, request.cache_salt, tuple(item.content_hash for item in request.items)))
        keys = []
        for start in range(0, len(request.prompt) - size + 1, size):
            key = hash((key, *request.prompt[start : start + size]))
            keys.append(key)
        return keys

    def _held(self, known: _Known, keys: Sequence[int], request: EngineRequest) -> float:
        """The share of a prompt that a core has computed lately, 0 to 1."""
        found = 0
        for key in keys:
            if key not in known.blocks:
                break
            found += 1
        held = found * self._block_size / len(request.prompt)
        if request.adapter is not None and request.adapter.digest in known.adapters:
            held = max(held, _ADAPTER)
        return held

    def _remember(self, known: _Known, keys: Sequence[int], request: EngineRequest) -> None:
        # The end of a prompt first: as in the cache, what others may share lasts longest.
        for key in reversed(keys):
            known.blocks[key] = None
            known.blocks.move_to_end(key)
        while len(known.blocks) > self._most_blocks:
            known.blocks.popitem(last=False)
        if request.adapter is not None:
            known.adapters[request.adapter.digest] = None
            known.adapters.move_to_end(request.adapter.digest)
            while len(known.adapters) > _MOST_ADAPTERS:
                known.adapters.popitem(last=False)
