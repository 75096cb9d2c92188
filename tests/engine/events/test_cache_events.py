"""A router that reads nothing but events knows what an engine core's cache holds, at every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphllm.config import SchedulerConfig
from graphllm.config.requests.sampling_params import SamplingParams
from graphllm.engine.core import EngineCore
from graphllm.engine.events.event_encoder import extra_keys
from graphllm.engine.parts.part import CoreSetup
from graphllm.engine.parts.snapshots import Snapshots
from graphllm.engine.requests.request import Adapter, EngineRequest
from graphllm.program.schema import CacheGroup, CacheLayout
from tests.engine.events.wire import AllBlocksCleared, BlockStored, CacheModel
from tests.engine.harness import finish, request
from tests.engine.test_core_states import Recorder
from tests.tiers import draws

FULL = CacheLayout((CacheGroup("full", 0, 4),), 14, max_adapters=2)
LAYOUTS = {
    "full": FULL,
    "windows": FULL._replace(groups=(CacheGroup("full", 0, 8), CacheGroup("window", 6, 4)), num_blocks=20),
    "hybrid": FULL._replace(recurrent=True, num_snapshots=3),
    "recurrent": FULL._replace(groups=(), num_blocks=0, recurrent=True, num_snapshots=3),
    "drafts": FULL._replace(query_lens=(3,), next_seen=True, lookahead=1),
}
_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
_NAMES = itertools.count()


def _core(layout: CacheLayout = FULL, rank: int = 0, secret: str | None = "s", **events: Any) -> EngineCore:
    """A core that publishes in this process."""
    name = f"inproc://events-{next(_NAMES)}"
    config = {"enable_kv_cache_events": True, "endpoint": name, "replay_endpoint": f"{name}-replay"} | events
    options = SchedulerConfig(cache_secret=secret, kv_events_config=config)
    core = EngineCore(Recorder(layout), 64, options, CoreSetup(rank=rank))  # type: ignore[arg-type]
    for number in (1, 2):
        core.write_adapter(f"digest {number}", {})
    return core


@pytest.fixture
def core() -> Iterator[EngineCore]:
    made = _core()
    yield made
    made.close()


def _wire(id: str, prompt: Sequence[int], limit: int, adapter: int = 0, salt: str = "") -> EngineRequest:
    lora = Adapter(f"adapter {adapter}", "", f"digest {adapter}") if adapter else None
    return request(id, prompt, replace(_PARAMS, max_tokens=limit), adapter=lora, cache_salt=salt)


class _Followed:
    """A core and, from its requests and their tokens alone, all that its cache could hold."""

    def __init__(self, layout: CacheLayout) -> None:
        self.core, self.layout = _core(layout), layout
        self.router = CacheModel(self.core)
        self._tokens: dict[str, tuple[EngineRequest, list[int]]] = {}

    def add(self, wire: EngineRequest) -> None:
        self.core.add(wire)
        self._tokens[wire.id] = wire, list(wire.prompt)

    def step(self) -> None:
        for update in self.core.step():
            self._tokens[update.id][1].extend(update.tokens)
        self.check()

    def check(self) -> None:
        """What can be found is what the events say, and they say of it what the requests were."""
        self.router.read()
        cache = self.core.scheduler.cache
        groups = [(g.block_size, i, cache.pool, i) for i, g in enumerate(self.layout.groups)]
        groups += [(cache.boundary, len(self.layout.groups), s.pool, 0) for s in cache.states.pools]
        can_be_found = set()
        for wire, tokens in self._tokens.values():
            chain: list[bytes] = []
            cache.hasher.extend(wire, chain, tokens)
            for size, number, pool, key in groups:
                each = size // cache.block_size
                digests = chain[each - 1 :: each]
                for i, digest in enumerate(digests):
                    if not pool.find(key, digest):
                        continue
                    short = int.from_bytes(digest[-8:], "big")
                    can_be_found.add(("GPU", number, short))
                    told = self.router.blocks[number, short]
                    assert told.tokens == tuple(tokens[i * size : (i + 1) * size])
                    assert told.parent == (int.from_bytes(digests[i - 1][-8:], "big") if i else None)
                    assert told.extra == extra_keys(wire, i * size, (i + 1) * size)
                    assert told.lora_name == (wire.adapter.name if wire.adapter else None)
        assert self.router.held == can_be_found


_ADD = st.tuples(
    st.just("add"), st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(1, 20), st.integers(0, 2),
    st.sampled_from(["", "salt"]),
)  # fmt: skip
_EVENT = st.one_of(_ADD, _ADD, st.tuples(st.sampled_from(["step", "step", "abort", "reset", "rest"])))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@settings(max_examples=draws(12, 300), deadline=None)
@given(events=st.lists(_EVENT, max_size=25))
def test_the_router_knows_the_cache(layout: CacheLayout, events: list[tuple[Any, ...]]) -> None:
    """Prompts of few pieces begin alike; the pool holds two or three of them, so blocks go and sequences wait."""
    followed = _Followed(layout)
    core = followed.core
    for number, (kind, *given_) in enumerate(events):
        if kind == "add":
            pieces, limit, adapter, salt = given_
            prompt = [100 * piece + i for piece in pieces for i in range(6)]
            followed.add(_wire(f"{number}", prompt, limit, adapter, salt))
        elif kind == "abort":
            core.abort([f"{number - 1}"])
        elif kind == "reset":
            core.reset_prefix_cache()
            followed.check()
        for _ in range(1000 if kind == "rest" else 1):
            if core.unfinished:
                followed.step()
    while core.unfinished:
        followed.step()
    if core.reset_prefix_cache():
        followed.check()
        assert followed.router.held == set()
    core.close()


def test_preempted_blocks_and_evictions_come_about() -> None:
    """What the test above is for does happen with its pool."""
    followed = _Followed(FULL)
    for number in range(4):
        followed.add(_wire(f"{number}", range(100 * number, 100 * number + 12), 20))
    while followed.core.unfinished:
        followed.step()
    assert followed.core.stats().preemptions > 0
    assert len(followed.router.blocks) > len(followed.router.held)
    followed.core.close()


def test_a_prompt_is_one_event_and_an_output_is_told_too(core: EngineCore) -> None:
    router = CacheModel(core)
    found = finish(core, [_wire("x", range(10), 8, salt="pepper")])["x"].tokens
    router.read()
    first, *later = router.events
    assert isinstance(first, BlockStored)
    assert (first.token_ids, len(first.block_hashes), first.parent_block_hash) == (list(range(8)), 2, None)
    assert first.extra_keys == [["pepper"], None]
    assert [t for e in later if isinstance(e, BlockStored) for t in e.token_ids] == [8, 9, *found[:6]]
    finish(core, [_wire("again", range(10), 1, salt="pepper")])
    router.read()
    assert len(router.events) == len(later) + 1


def test_resetting_an_idle_engine_is_told_at_once(core: EngineCore) -> None:
    router = CacheModel(core)
    finish(core, [_wire("x", range(10), 1)])
    assert core.reset_prefix_cache()
    router.read()
    assert [type(e) for e in router.events] == [BlockStored, AllBlocksCleared]


def test_engines_with_one_secret_have_the_same_hashes() -> None:
    found = []
    for secret in ("s", "s", "another", None):
        core = _core(secret=secret)
        router = CacheModel(core)
        finish(core, [_wire("x", range(10), 6), _wire("y", range(10), 1, adapter=1)])
        router.read()
        found.append(set(router.blocks.items()))
        core.close()
    assert found[0] == found[1]
    assert not {key for key, _ in found[0]} & {key for key, _ in found[2] | found[3]}
    assert len({key for key, _ in found[0]}) == 3 + 2


@pytest.mark.parametrize(("prompt", "told"), [(range(13), [*range(12)]), ([1, 2], [])])
def test_imported_blocks(core: EngineCore, prompt: Sequence[int], told: list[int]) -> None:
    """They have tokens where a request says them, and else hashes alone."""
    other, wire = _core(), _wire("x", range(10), 1)
    finish(other, [wire])
    router, theirs = CacheModel(core), CacheModel(other)
    assert core.part(Snapshots).import_cache(other.part(Snapshots).export_cache(wire)) == 2
    finish(core, [_wire("y", prompt, 1)])
    router.read()
    theirs.read()
    assert theirs.held <= router.held
    assert [t for e in router.events if isinstance(e, BlockStored) for t in e.token_ids] == told
    other.close()


def test_tiers_tell_of_their_copies(core: EngineCore) -> None:
    """Through the observers of the pool; a copy elsewhere outlives the block."""
    router = CacheModel(core)
    cache = core.scheduler.cache
    wire = _wire("x", range(10), 1)
    chain: list[bytes] = []
    cache.hasher.extend(wire, chain, wire.prompt)
    finish(core, [wire])
    for observer in cache.pool.observers:
        for digest in chain:
            observer.copied("CPU", (0, digest))
        observer.copied("STORAGE", (0, chain[0]))
        observer.dropped("CPU", (0, chain[1]))
    finish(core, [_wire("y", [1, 2], 1)])
    router.read()
    hashes = [int.from_bytes(digest[-8:], "big") for digest in chain]
    assert router.held == {
        ("GPU", 0, hashes[0]), ("GPU", 0, hashes[1]), ("CPU", 0, hashes[0]), ("STORAGE", 0, hashes[0]),
    }  # fmt: skip


def test_without_the_setting_nobody_listens() -> None:
    for config in (None, {}, {"endpoint": "tcp://*:0"}, {"enable_kv_cache_events": True, "publisher": "null"}):
        core = EngineCore(Recorder(FULL), 64, SchedulerConfig(kv_events_config=config))  # type: ignore[arg-type]
        assert core.scheduler.cache.pool.observers == []
        assert core.stats().kv_events == {}
        core.close()
