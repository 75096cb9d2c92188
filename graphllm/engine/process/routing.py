"""Router: to which of several engine cores a request goes. No sockets and no torch;
`graphllm.engine.process.core_group` asks it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from graphllm.engine.requests.request import CoreInfo, EngineRequest

# A core that holds all of a prompt may have _HELD more sequences than the others, and _HELD_SHARE of their number more.
# So a long prompt is computed once, and a popular prefix still spreads over all cores.
_HELD, _HELD_SHARE = 4.0, 0.5
_ADAPTER = 0.25  # what the tables of an adapter are worth, as a share of a prompt
_MOST_BLOCKS, _MOST_ADAPTERS = 1 << 16, 32  # remembered of a core


@dataclass(slots=True)
class _Live:
    """A request.

    missing: tokens of its prompt that are to be computed.
    size: tokens of prompt and limit together.
    begun: an update of it has come.
    """

    missing: int
    size: int
    begun: bool = False


@dataclass
class _Known:
    """What a front knows of a core.

    live: the front's own unfinished requests on it, by id.
    missing: tokens of their prompts that are to be computed.
    tokens: of their prompts and limits.
    others: sequences of other fronts.
    blocks: keys of blocks that the core has computed, oldest first.
    adapters: digests of adapters that the core has run, oldest first.
    """

    live: dict[str, _Live] = field(default_factory=dict)
    missing: int = 0
    tokens: int = 0
    others: int = 0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)


class Router:
    """Chooses the core of a request, for one front. The front knows its own requests exactly, and the number of
    others'.

    The core with the least cost is taken: its load, less a bonus for the share of the prompt that it has computed
    lately. Equals take turns.

    Load is the number of sequences that a core has not finished, running and waiting alike: they all have to end there,
    and joining the shortest queue is close to the best that can be done where lengths are not known. To it comes for
    each prompt that is still to be computed the share of a step that it fills, in place of vLLM's fixed weight of
    waiting requests, and a little for the longest that prompt and output may become.
    """

    def __init__(self, count: int, prefix: bool = True) -> None:
        """A router without requests.

        count: cores.
        prefix: whether cores cache prefixes of prompts.
        """
        self._cores = [_Known() for _ in range(count)]
        self._prefix = prefix
        self._block_size, self._most_blocks = 16, _MOST_BLOCKS
        self._step_tokens = self._most_tokens = 1
        self._next = 0
        self._owners: dict[str, int] = {}

    def set_sizes(self, info: CoreInfo) -> None:
        """Set the sizes of each core's cache and steps."""
        self._block_size, self._most_blocks = info.block_size, min(info.num_blocks, _MOST_BLOCKS)
        self._step_tokens, self._most_tokens = info.max_num_batched_tokens, info.max_model_len

    def add(self, requests: Sequence[EngineRequest], alive: Sequence[bool]) -> int | None:
        """The core that gets these siblings; None where none is alive. They count as its load from now on. A sibling of
        an earlier request follows it."""
        first = requests[0]
        keys = self._keys(first)
        leader = self._owners.get(first.fork_of)
        there = [engine for engine, lives in enumerate(alive) if lives and leader in (None, engine)]
        if not there:
            return None
        least = min(self.load(engine) for engine in there)
        bonus = _HELD + _HELD_SHARE * least
        turn = self._next
        count = len(self._cores)

        def cost(engine: int) -> tuple[float, int]:
            return self.load(engine) - bonus * self._held(self._cores[engine], keys, first), (engine - turn) % count

        chosen = min(there, key=cost)
        self._next = (chosen + 1) % count
        known = self._cores[chosen]
        missing = len(first.prompt) - self._block_size * self._found(known, keys)
        self._remember(known, keys, first)
        for request in requests:
            one = known.live[request.id] = _Live(missing, len(request.prompt) + request.limit)
            known.missing += one.missing
            known.tokens += one.size
            self._owners[request.id] = chosen
        return chosen

    def began(self, id: str) -> None:
        """News of a request have come. Unknown ids are ignored."""
        engine = self._owners.get(id)
        if engine is not None:
            known = self._cores[engine]
            one = known.live[id]
            if not one.begun:
                one.begun = True
                known.missing -= one.missing

    def ended(self, id: str) -> None:
        """A request is over. Unknown ids are ignored."""
        engine = self._owners.pop(id, None)
        if engine is not None:
            known = self._cores[engine]
            one = known.live.pop(id)
            known.tokens -= one.size
            known.missing -= 0 if one.begun else one.missing

    def owner(self, id: str) -> int | None:
        """The core of a request that is not over."""
        return self._owners.get(id)

    def of(self, engine: int) -> list[str]:
        """Ids of the requests that a core has not finished."""
        return list(self._cores[engine].live)

    def load(self, engine: int) -> float:
        """Of a core, about as many as it has sequences."""
        known = self._cores[engine]
        more = known.missing / self._step_tokens + known.tokens / self._most_tokens
        return len(known.live) + known.others + more

    def reported(self, engine: int, sequences: int) -> None:
        """A core has ``sequences`` of all fronts together."""
        known = self._cores[engine]
        known.others = max(0, sequences - len(known.live))

    def forget(self, engines: Iterable[int]) -> None:
        """The caches of these cores are empty."""
        for engine in engines:
            self._cores[engine].blocks.clear()

    def replaced(self, engine: int) -> None:
        """A new core has replaced one. The requests of the old core have ended."""
        for id in self.of(engine):
            self.ended(id)
        self._cores[engine] = _Known()

    def _keys(self, request: EngineRequest) -> list[int]:
        """A key for each full block of the prompt and all blocks before it. Like the prefix cache's digests, keys also
        depend on the adapter and the salt. They are only guesses, so Python's own hash is enough."""
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

    def _found(self, known: _Known, keys: Sequence[int]) -> int:
        """How many of these blocks, from the first on, a core has computed lately."""
        return next((number for number, key in enumerate(keys) if key not in known.blocks), len(keys))

    def _held(self, known: _Known, keys: Sequence[int], request: EngineRequest) -> float:
        """The share of a prompt that a core has computed lately, 0 to 1."""
        held = self._found(known, keys) * self._block_size / len(request.prompt)
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
